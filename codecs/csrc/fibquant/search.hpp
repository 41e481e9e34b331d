// Codewords as a search for the nearest one wants them.
#pragma once

#include <vector>

#include "../lane.hpp"

namespace kv::fib {

// Codewords of a group are compared together.
constexpr kv_u32 kGroup = 16;

// All codewords in groups; many of them in leaves of nearly equal size, each with the smallest box around it, so that
// most need not be looked at. Of all codewords, the nearest to t has the largest score: its bias -|c|^2 / 2, and t . c.
struct Finder {
  // n rows of k values.
  Finder(const float* values, kv_u32 n, kv_u32 k);

  kv_u32 k;
  kv_u32 n_groups;
  std::vector<float> groups;        // [n_groups][1 + k][kGroup]: biases, then the codewords' values
  std::vector<kv_u32> ids;          // [n_groups][kGroup], ascending within a leaf
  float reach = 0;                  // no codeword is longer
  kv_u32 n_leaves = 0;              // 0: a few codewords, in their order; else a multiple of kGroup
  std::vector<kv_u32> first_group;  // [n_leaves + 1]; the last leaves may be empty, and their boxes infinitely far
  std::vector<float> low, high;     // [k][n_leaves]
  // Floats that a search needs as room.
  std::size_t room = 0;
};

}  // namespace kv::fib
