// What the executors of codecs whose plans are blocks of rows check alike.
#pragma once

#include "plan_tables.hpp"

namespace kv {

// What `block` says of order, output, tokens and RoPE, so that no plan whatever writes outside its output. Null: fine.
template <class Tables, class Block, class Stream>
const char* row_place_fault(const Tables& p, const Block& b, const Stream& s) {
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

}  // namespace kv
