// What the executors and encoders of codecs whose plans are row blocks share.
#pragma once

#include <cmath>

#include "plan_tables.hpp"
#include "simd.hpp"

namespace kv {

// What `block` says of order, output, tokens and RoPE, so that no plan whatever writes outside its output. Null: fine.
template <class Tables, class Stream>
const char* row_place_fault(const Tables& p, const RowBlock& b, const Stream& s) {
  if (s.order > p.n_order || s.head_dim > p.n_order - s.order) return "order";
  if (b.output >= p.outputs.size()) return "output";
  const auto& out = p.outputs[b.output];
  if (s.heads > out.heads) return "heads of the output";
  for (kv_u64 i = 0; i < s.head_dim; ++i)
    if (p.order[s.order + i] >= out.channels) return "channel of the output";
  if (b.n_tokens == 0 || b.stop > b.n_tokens || b.skip > b.stop) return "tokens";
  const kv_u64 written = b.stop - b.skip;
  if (b.row > out.rows || written > out.rows - b.row) return "row";
  if (b.rope >= 0) {
    if ((kv_u64)b.rope >= p.ropes.size() || s.n_pairs > s.head_dim / 2) return "rope";
    const auto& r = p.ropes[b.rope];
    if (b.rope_row > r.rows || written > r.rows - b.rope_row || s.n_pairs > r.pairs) return "rope_row";
  }
  return nullptr;
}

// Largest difference and sum of squared ones, in an order of adding that depends on nothing.
KV_CLONES static void measure(const float* __restrict x, const float* __restrict y, kv_u64 n, double& largest,
                              double& sum_squares) {
  double most[8] = {}, sums[8] = {};
  kv_u64 i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int j = 0; j < 8; ++j) {
      const double d = std::fabs((double)x[i + j] - (double)y[i + j]);
      most[j] = d > most[j] ? d : most[j];
      sums[j] += d * d;
    }
  }
  for (; i < n; ++i) {
    const double d = std::fabs((double)x[i] - (double)y[i]);
    most[i % 8] = d > most[i % 8] ? d : most[i % 8];
    sums[i % 8] += d * d;
  }
  largest = sum_squares = 0;
  for (int j = 0; j < 8; ++j) {
    largest = most[j] > largest ? most[j] : largest;
    sum_squares += sums[j];
  }
}

}  // namespace kv
