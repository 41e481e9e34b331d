// The CPU executor of a plan's KVR1 blocks: any streams, on n threads, into the caller's outputs.
#pragma once

#include "../row_blocks.hpp"
#include "../threads.hpp"
#include "avx2.hpp"
#include "avx512.hpp"
#include "portable.hpp"

namespace kv::kvr1 {

// Everything that decoding will index, so that no plan whatever reads or writes outside its tables.
inline const char* block_fault(const PlanTables& p, const Block& b) {
  if (b.stream >= p.n_streams) return "stream";
  const Stream& s = p.streams[b.stream];
  if (s.heads == 0 || s.head_dim == 0 || s.head_dim > 1u << 20 || s.heads > (1u << 20) / s.head_dim) return "heads";
  const kv_u64 n = (kv_u64)s.heads * s.head_dim;
  if (s.components > p.n_components || n > p.n_components - s.components) return "components";
  if (s.sink_div == 0 || s.sink_div > kMaxSinkDiv || s.sink_classes >= kSpreadClasses) return "sink_div";
  if (b.payload >= p.payloads.size()) return "payload";
  for (kv_u64 i = 0; i < n; ++i) {
    const kv_u64 at = s.components + i;
    if (p.classes[at] >= kSpreadClasses || p.rho[at] > 15) return "class or rho";
    if (p.mean[at] >= kValueLimit || p.mean[at] <= -kValueLimit) return "mean";
  }
  return row_place_fault(p, b, s);
}

inline void decode(const Tables& tables, BlockRun* const* runs, kv_u32 n, int level) {
#if KV_X86
  if (level == kAvx512) return avx512::decode(tables.slots, runs, n);
  if (level == kAvx2) return avx2::decode(tables.slots, runs, n);
#endif
  (void)level;
  portable::decode(tables.slots, runs, n);
}

// Blocks go to the threads in pairs, which one thread decodes together; alone where there are too few for that.
inline bool run_blocks(const PlanTables& p, kv_u8* status, unsigned n_threads, int level) {
  const kv_u64 share = p.n_blocks >= 2 * (kv_u64)std::max(n_threads, 1u) ? 2 : 1;
  struct Scratch {
    BlockRun runs[2];
  };
  return run_pieces<Scratch>((p.n_blocks + share - 1) / share, n_threads, [&](std::size_t piece, Scratch& scratch) {
    const kv_u64 first = piece * share;
    BlockRun* started[2];
    kv_u32 n = 0;
    kv_u64 block_of[2];
    for (kv_u64 b = first; b < std::min(first + share, p.n_blocks); ++b) {
      status[b] = kBadBlock;
      BlockRun& run = scratch.runs[n];
      if (!run.start(p, p.blocks[b], narrow_of(level))) continue;
      block_of[n] = b;
      started[n++] = &run;
    }
    decode(*p.tables, started, n, level);
    for (kv_u32 i = 0; i < n; ++i) status[block_of[i]] = started[i]->status();
  });
}

}  // namespace kv::kvr1
