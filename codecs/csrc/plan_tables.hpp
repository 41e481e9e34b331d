// The rows of a plan's tables, as the executors of the CPU and of the GPU read them. No STL, for NVRTC.
#pragma once

#include "lane.hpp"

namespace kv {

enum OutputType : kv_u32 { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2 };

// One lane to decode. lanes.LANE_DTYPE is the same struct.
struct Lane {
  kv_u64 offset;        // of the substream in its payload, bytes
  kv_u64 n_bytes;
  kv_u64 first_token;   // absolute position of the block's first token
  kv_u64 sink;
  kv_u64 channels;      // first entry of the lane in the channel table
  kv_u64 classes;       // first entry of the lane in the class table
  kv_u32 payload;       // index of the payload
  kv_u32 output;        // index of the output
  kv_u32 head;          // of the output
  kv_u32 n_tokens;      // to decode, from the block's first
  kv_u32 skip;          // of these, not written
  kv_u32 row;           // output row of the first token written
  kv_u32 width;         // channels
  kv_u32 n_classes;     // classes present
  kv_u32 sink_div;
  float unit;
  kv_i32 rope;          // index of the cos/sin table, -1: no rotation
  kv_u32 rope_row;      // its row for the first token written
  kv_u32 first_pair;    // RoPE pair of the lane's first channel
  kv_u32 n_pairs;       // pairs of the lane that rotate; the others pass through
};
static_assert(sizeof(Lane) == 104, "lanes.LANE_DTYPE");

// One frame of a codec without lanes or predictions to decode. rows.BLOCK_DTYPE is the same struct.
struct RowBlock {
  kv_u32 stream;
  kv_u32 payload;
  kv_u32 output;
  kv_u32 n_tokens;  // of the frame
  kv_u32 stop;      // tokens wanted, from the frame's first
  kv_u32 skip;      // of these, not wanted
  kv_u32 row;       // output row of the first token wanted
  kv_u32 rope_row;  // and its row of the cos/sin table
  kv_i32 rope;      // index of that table, -1: no rotation
  kv_u32 reserved;
};
static_assert(sizeof(RowBlock) == 40, "rows.BLOCK_DTYPE");

namespace kvr1 {

// What the blocks of one stream share. blocks.STREAM_DTYPE is the same struct.
struct Stream {
  kv_u64 components;    // first entry of the stream in mean, rho and classes
  kv_u64 order;         // first entry in the order table: output channel of each coded channel of a head
  kv_u64 sink;
  kv_u32 heads;
  kv_u32 head_dim;
  kv_u32 n_pairs;       // RoPE pairs of a head
  kv_u32 sink_div;
  kv_u32 sink_classes;  // added to a class at sinks
  float unit;
};
static_assert(sizeof(Stream) == 48, "blocks.STREAM_DTYPE");

// One block to decode. blocks.BLOCK_DTYPE is the same struct.
struct Block {
  kv_u64 first_token;   // absolute position
  kv_u32 stream;
  kv_u32 payload;
  kv_u32 output;
  kv_u32 n_tokens;      // of the block
  kv_u32 stop;          // tokens to decode, from the block's first
  kv_u32 skip;          // of these, not written
  kv_u32 row;           // output row of the first token written
  kv_u32 rope_row;      // and its row of the cos/sin table
  kv_i32 rope;          // index of that table, -1: no rotation
  kv_u32 reserved;
};
static_assert(sizeof(Block) == 48, "blocks.BLOCK_DTYPE");

}  // namespace kvr1

}  // namespace kv
