// Indices of vectors in lanes to packed bits and back. Index i of a vector has the bits [i w, i w + w), lowest first.
#pragma once

#include "kernels.hpp"

namespace kv::fib {

// The indices of one lane.
inline void pack_indices(const Book& book, const kv_u32* index, kv_u32 lane, kv_u8* out) {
  const kv_u32 n = book.blocks, width = book.index_bits;
  kv_u64 bits = 0;
  kv_u32 held = 0;
  for (kv_u32 b = 0; b < n; ++b) {
    bits |= (kv_u64)index[b * kLanes + lane] << held;
    for (held += width; held >= 8; held -= 8, bits >>= 8) *out++ = (kv_u8)bits;
  }
  if (held > 0) *out = (kv_u8)bits;
}

// False, and index 0 for what is none: an index that no codeword has, or padding that is not zero.
inline bool unpack_indices(const Book& book, const kv_u8* bytes, kv_u32 lane, kv_u32* index) {
  const kv_u32 n = book.blocks, width = book.index_bits, n_codewords = book.codewords.n();
  kv_u32 bad = 0;
  if (width == 8) {
    for (kv_u32 b = 0; b < n; ++b) {
      const kv_u32 i = bytes[b], none = i >= n_codewords;
      index[b * kLanes + lane] = none ? 0 : i;
      bad |= none;
    }
    return bad == 0;
  }
  const kv_u32 mask = (1u << width) - 1;
  kv_u64 bits = 0;
  kv_u32 held = 0;
  for (kv_u32 b = 0; b < n; ++b) {
    for (; held < width; held += 8) bits |= (kv_u64)*bytes++ << held;
    const kv_u32 i = (kv_u32)bits & mask, none = i >= n_codewords;
    index[b * kLanes + lane] = none ? 0 : i;
    bad |= none;
    bits >>= width;
    held -= width;
  }
  return bad == 0 && bits == 0;
}

}  // namespace kv::fib
