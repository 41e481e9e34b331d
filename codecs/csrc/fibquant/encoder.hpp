// Vectors to norms and indices, on several threads.
#pragma once

#include <atomic>
#include <cstring>
#include <vector>

#include "../error_sums.hpp"
#include "../measure.hpp"
#include "../threads.hpp"
#include "indices.hpp"

namespace kv::fib {

// Vectors that one thread takes at a time.
constexpr kv_u64 kVectorsAtOnce = 16 * kLanes;

// Mean and scale of each channel of a head. Each operation is rounded by itself.
inline void apart(const float* __restrict x, const float* __restrict mean, const float* __restrict inverse, kv_u32 d,
                  float* __restrict out) {
  for (kv_u32 c = 0; c < d; ++c) out[c] = (x[c] - mean[c]) * inverse[c];
}
inline void together(const float* __restrict mean, const float* __restrict scale, kv_u32 d, float* __restrict row) {
  for (kv_u32 c = 0; c < d; ++c) row[c] = row[c] * scale[c] + mean[c];
}

struct Encoding {
  const Book* book;
  const float* x;  // [heads][n][d]
  kv_u64 heads, n;
  const float* mean;   // [heads][d]; null: no statistics
  const float* scale;
  const kv_u8* keep;   // [heads][n]; 0: to be coded
  kv_u8* state;        // the same, or the reason why a vector cannot be coded
  kv_u16* norms;       // [heads][n]; 0 where a vector is not coded, as the indices
  kv_u8* indices;      // [heads][n][index_bytes]
};

// False: memory ran out.
inline bool encode(const Encoding& e, unsigned n_threads, int level, ErrorSums& error) {
  const Book& book = *e.book;
  const Kernels& kernels = kernels_of(level);
  const kv_u32 d = book.d, index_bytes = book.index_bytes;
  const kv_u64 n_vectors = e.heads * e.n;
  std::vector<float> inverse(e.mean == nullptr ? 0 : e.heads * d);
  for (kv_u64 c = 0; c < inverse.size(); ++c) inverse[c] = 1.0f / e.scale[c];
  book.codewords.finder();
  struct Errors {
    double most, squares;
  };
  std::vector<Errors> errors(n_vectors);
  struct Scratch {
    Batch batch;
    Search search;
    Aligned<float> rows;
  };
  const auto work = [&](std::size_t piece, Scratch& s) {
    s.batch.fit(book);
    s.search.start(book.codewords);
    float* const apart_rows = s.rows.resize((std::size_t)kLanes * d);
    const kv_u64 first = piece * kVectorsAtOnce, last = std::min(n_vectors, first + kVectorsAtOnce);
    std::memset(e.norms + first, 0, (last - first) * sizeof e.norms[0]);
    std::memset(e.indices + first * index_bytes, 0, (last - first) * index_bytes);
    std::memcpy(e.state + first, e.keep + first, last - first);
    kv_u64 vectors[kLanes];
    for (kv_u64 v = first; v < last;) {
      kv_u32 many = 0;
      for (; v < last && many < kLanes; ++v)
        if (e.keep[v] == 0) vectors[many++] = v;
      if (many == 0) break;
      const float* rows[kLanes];
      for (kv_u32 l = 0; l < kLanes; ++l) {
        const kv_u64 at = vectors[l < many ? l : 0], head = at / e.n;
        rows[l] = e.x + at * d;
        if (e.mean == nullptr) continue;
        apart(rows[l], e.mean + head * d, inverse.data() + head * d, d, apart_rows + (kv_u64)l * d);
        rows[l] = apart_rows + (kv_u64)l * d;
      }
      kernels.encode(book, s.search, rows, s.batch);
      kernels.decode(book, s.batch);
      for (kv_u32 l = 0; l < many; ++l) {
        const kv_u64 at = vectors[l], head = at / e.n;
        e.state[at] = s.batch.failed[l];
        if (e.state[at] != 0) continue;
        e.norms[at] = s.batch.norms[l];
        pack_indices(book, s.batch.index, l, e.indices + at * index_bytes);
        float* const row = s.batch.rows + (kv_u64)l * d;
        if (e.mean != nullptr) together(e.mean + head * d, e.scale + head * d, d, row);
        measure(e.x + at * d, row, d, errors[at].most, errors[at].squares);
      }
    }
  };
  if (!run_pieces<Scratch>((n_vectors + kVectorsAtOnce - 1) / kVectorsAtOnce, n_threads, work)) return false;
  for (kv_u64 v = 0; v < n_vectors; ++v)
    if (e.state[v] == 0) error.add({errors[v].most, errors[v].squares, d});
  return true;
}

}  // namespace kv::fib
