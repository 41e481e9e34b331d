// Rows of a plan's tables for FibQuant frames; their blocks are RowBlock. No STL, for NVRTC.
#pragma once

#include "../plan_tables.hpp"

namespace kv::fib {

constexpr kv_u64 kNoChannels = ~(kv_u64)0;

// What the frames of one stream share. blocks.STREAM_DTYPE of kvcodecs/fibquant is the same struct.
struct Stream {
  kv_u64 order;     // first entry in the order table: output channel of each coded channel of a head
  kv_u64 channels;  // first of heads * head_dim means and as many scales in the channel table, or kNoChannels
  kv_u32 book;
  kv_u32 heads;
  kv_u32 head_dim;
  kv_u32 n_pairs;   // RoPE pairs of a head
};
static_assert(sizeof(Stream) == 32, "FIB_STREAM_DTYPE");

}  // namespace kv::fib
