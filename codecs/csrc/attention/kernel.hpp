// A tile of rows of one KV head against the query rows of that head: what all instruction sets share.
#pragma once

#include "../simd.hpp"
#include "../lane.hpp"

namespace kv::attention {

inline constexpr kv_u32 kTileRows = 64;  // rows of a tile at most
inline constexpr kv_u32 kRowStep = 16;   // rows of a tile that are readable: a multiple of this
inline constexpr kv_u32 kPad = 16;       // floats that arrays are padded to; the widest vector
inline constexpr kv_u32 kMaxWidth = 2 * kPad;

// Sums of |q k| beyond this, in units of log2(weight), leave float32: the scores of the tile are taken in float64.
inline constexpr float kLargestSum = 1500.0f;

constexpr kv_u64 padded(kv_u64 n) { return (n + kPad - 1) / kPad * kPad; }

// Query rows that are worked on together.
struct Panel {
  kv_u32 first, n;
  kv_u32 width;  // rows in vectors side by side, at least n; 0: a row by itself, along its channels
};

// Positions that a query row sees, both ends included.
struct Range {
  kv_i64 first, last;
};

// What all heads have in common.
struct Shape {
  kv_u32 k_dim, v_dim;      // channels
  kv_u64 k_stride, v_stride;  // the same, padded
  const Panel* panels;
  kv_u32 n_panels;
  const Range* ranges;      // of each query row
  double factor;            // of scores: the caller's, in units of log2
};

// The query rows of one head. A panel's are at panel.first * k_stride, [channel][width] or [row][channel].
struct HeadQueries {
  const float* as_given;  // [row][k_stride]
  const float* scaled;    // by panels
  const float* largest;   // [panel][k_stride], magnitudes
};

// Running maximum of the scores, sum of the weights, sum of weighted V rows.
struct HeadState {
  float* max;
  float* sum;
  float* out;  // [row][v_stride]
};

// Rows of one head. Reads go up to the padded number of channels and, of K, up to a multiple of kRowStep rows.
struct Tile {
  const float* k;
  const float* v;
  kv_u64 k_stride, v_stride;
  kv_u32 n;
  kv_i64 first_position;
};

struct Scratch {
  float* scores;  // [kTileRows * kMaxWidth] each: what float32 takes of a score, and the rest
  float* rest;
  float* scale;    // [kMaxWidth]
  float* largest;  // [k_stride]
};

struct Kernel {
  kv_u32 lanes;
  void (*attend)(const Shape&, const HeadQueries&, const HeadState&, const Tile&, const Scratch&);
  // Rotates channels (c, half + c) of each row.
  void (*rotate)(float* rows, kv_u64 stride, kv_u32 n_rows, kv_u32 half, kv_u32 n_pairs, const float* cos,
                 const float* sin);
  // Cosines and sines [n_rows][n_pairs] of successive positions.
  void (*angles)(const float* inv_freq, kv_u32 n_pairs, float scaling, kv_i64 position, kv_u32 n_rows, float* cos,
                 float* sin);
};

// The kernel of an instruction set, which the CPU must have.
const Kernel& kernel_of(int level);

}  // namespace kv::attention
