// Codewords in boxes, so that most of a large codebook need not be looked at to find the nearest one.
#pragma once

#include <vector>

#include "../lane.hpp"

namespace kv::fib {

// Members of a group are compared together.
constexpr kv_u32 kGroup = 16;

// From here on a tree finds the nearest codeword sooner than a look at all of them.
constexpr kv_u32 kFewCodewords = 4096;

// Codewords in leaves of nearly equal size, each with the smallest box around it.
struct Tree {
  // `scored`: n rows of a bias and k values.
  Tree(const float* scored, kv_u32 n, kv_u32 k);

  kv_u32 n_leaves = 0;              // a multiple of kGroup; the last may be empty, and their boxes infinitely far
  std::vector<kv_u32> first_group;  // [n_leaves + 1]
  std::vector<float> low, high;     // [k][n_leaves]
  std::vector<kv_u32> ids;          // [groups][kGroup], ascending within a leaf
  std::vector<float> groups;        // [groups][1 + k][kGroup]: biases, then the codewords' values
  kv_u32 largest = 0;               // groups of a leaf at most
  float reach = 0;                  // no codeword is longer
};

}  // namespace kv::fib
