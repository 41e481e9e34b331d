// What the kernels take: one struct of addresses, itself in the device's memory. kvgpu/structs.py has the same structs.
//
// Every pointer is a 64-bit address, so that Python fills in the structs whatever the memory is. Tables are those of the
// plan (plan_tables.hpp) and must have passed _core.check_lanes or check_blocks.
#pragma once

#include "fibquant/tables.hpp"
#include "kvr1/symbols.hpp"
#include "plan_tables.hpp"

namespace kv::gpu {

// A payload: bytes anywhere.
struct Source {
  kv_u64 bytes, n_bytes;
};
static_assert(sizeof(Source) == 16, "structs.SOURCE");

// An output [heads][rows][channels], its last axis contiguous; strides in elements. Row r lies at r * row_stride; or with
// pages, a block table, it is row first_row + r of a sequence whose row q lies in page pages[q / page_rows].
struct Target {
  kv_u64 data;
  kv_u64 pages;        // of i32, 0: none
  kv_i64 head_stride, row_stride, page_stride;
  kv_u64 first_row;    // first_row plus rows below 2^32
  kv_u32 page_rows;
  kv_u32 type;         // OutputType
};
static_assert(sizeof(Target) == 56, "structs.TARGET");

struct Rotation {
  kv_u64 cos, sin;     // of float32 [rows][pairs]
  kv_u64 pairs;
};
static_assert(sizeof(Rotation) == 24, "structs.ROTATION");

// TKV1: one thread per lane.
struct LaneArguments {
  kv_u64 lanes, n_lanes;            // of Lane
  kv_u64 channels, classes, prior;  // of Channel, u8, u32
  kv_u64 sources, targets, rotations;
  kv_u64 status;                    // of u8, one a lane
  kv_u64 scratch, scratch_words;    // of u32, so many for each thread; at least lane_words() of every lane
  kv_u64 n_threads;                 // threads that have scratch: any further ones do nothing
};
static_assert(sizeof(LaneArguments) == 96, "structs.LANE_ARGUMENTS");

// Scratch of a lane: its models, two words of state and a value for each channel.
KV_HD kv_u64 lane_words(kv_u64 n_classes, kv_u64 width) { return n_classes * kClassModels + 3 * width; }

// A component's mean, rho and class, which a warp reads at once.
struct alignas(8) Component {
  kv_i32 mean;
  kv_u32 rho_class;  // rho in bits 0 to 7, class in 8 to 15
  KV_HD kv_i32 rho() const { return (kv_i32)(rho_class & 0xFF); }
  KV_HD kv_u32 cls() const { return rho_class >> 8; }
};
static_assert(sizeof(Component) == 8, "structs.COMPONENT");

// KVR1: one warp per block. Threads come in whole warps, at most kMaxWarps to a thread block.
struct BlockArguments {
  kv_u64 blocks, n_blocks;          // of kvr1::Block
  kv_u64 streams, components, order;  // of kvr1::Stream, Component, u32
  kv_u64 slots;                     // RansTables.slots
  kv_u64 compact;                   // RansTables.compact, 0: look up in `slots`
  kv_u64 sources, targets, rotations;
  kv_u64 status;                    // of u8, one a block
  kv_u64 shared_words;              // of shared memory for each warp: room for the components of most blocks
  kv_u64 scratch, scratch_words;    // of u32, so many for each warp; at least the components of every block with more
  kv_u64 n_warps;                   // warps that have scratch: any further ones do nothing
};
static_assert(sizeof(BlockArguments) == 120, "structs.BLOCK_ARGUMENTS");

// FibQuant: what vectors are decoded with.
struct Book {
  kv_u64 rotation;                  // of float32: the matrix [d][d], or signs [2][d]
  kv_u64 codewords;                 // of float32 [n_codewords][k]
  kv_u32 rotation_kind;             // 0: a matrix, 1: Hadamard
  kv_u32 d, k, n_codewords, index_bits, index_bytes;
  kv_u32 power;                     // the largest power of two that is at most d
  float factor;                     // 1 / sqrt(power)
};
static_assert(sizeof(Book) == 48, "structs.BOOK");

// Where pieces and marks of a block begin, among those of all blocks. A mark is of 32 of its vectors.
struct Span {
  kv_u64 first_piece, first_mark;
};
static_assert(sizeof(Span) == 16, "structs.SPAN");

// FibQuant: one thread per block looks through payloads, then one warp per piece decodes. A piece is kPieceRows of the rows
// that are wanted of a block, of one head.
struct VectorArguments {
  kv_u64 blocks, n_blocks;          // of RowBlock
  kv_u64 streams, books, order, channels;  // of fib::Stream, Book, u32, float32
  kv_u64 sources, targets, rotations;
  kv_u64 spans;                     // of Span, one a block
  kv_u64 contents, marks;           // of Contents, one a block, and RawVectors: what looking through finds
  kv_u64 status;                    // of u8, one a piece
  kv_u64 n_pieces;
  kv_u64 shared_words;              // of shared memory for each warp: room for vectors of most blocks
  kv_u64 scratch, scratch_words;    // of u32, so many for each warp; at least vector_words() of every block with more
  kv_u64 n_warps;                   // warps that have scratch: any further ones do nothing
};
static_assert(sizeof(VectorArguments) == 144, "structs.VECTOR_ARGUMENTS");

constexpr kv_u32 kPieceRows = 16;
constexpr kv_u32 kMaxVectorWarps = 28;  // of a thread block: 896 threads, 72 registers each

// Values at hand, [heads][rows][channels] of the target's type without gaps.
struct Copy {
  kv_u64 values;
  kv_u64 first_row;    // rows of all heads of the copies before it
  kv_u32 target, heads, rows, channels;
};
static_assert(sizeof(Copy) == 32, "structs.COPY");

struct CopyArguments {
  kv_u64 copies, n_copies, n_rows;
  kv_u64 targets;
};
static_assert(sizeof(CopyArguments) == 32, "structs.COPY_ARGUMENTS");

constexpr kv_u32 kMaxWarps = 32;  // of a thread block: 1024 threads, 64 registers each

// Dynamic shared memory of a thread block: the compact tables, if they are given, then each warp's words.
KV_HD kv_u64 shared_bytes(const BlockArguments& a, kv_u64 warps) {
  return 4 * ((a.compact != 0 ? kvr1::kCompactWords : 0) + warps * a.shared_words);
}

}  // namespace kv::gpu
