// Values that the host has decoded to their places: a thread copies a row of one head after the other.
#pragma once

#include "place.hpp"

namespace kv::gpu {

template <class T>
KV_DEVICE void copy_row(kv_u64 from, kv_u64 to, kv_u32 channels) {
  for (kv_u32 c = 0; c < channels; ++c) at<T>(to)[c] = at<const T>(from)[c];
}

KV_DEVICE void copy_rows(const CopyArguments& a, kv_u64 thread, kv_u64 n_threads) {
  const Copy* copies = at<const Copy>(a.copies);
  for (kv_u64 i = thread; i < a.n_rows; i += n_threads) {
    kv_u64 found = 0;  // the last that begins at row i or before
    for (kv_u64 stop = a.n_copies; stop - found > 1;) {
      const kv_u64 middle = found + (stop - found) / 2;
      (copies[middle].first_row <= i ? found : stop) = middle;
    }
    const Copy& copy = copies[found];
    const Target& target = at<const Target>(a.targets)[copy.target];
    const kv_u64 number = i - copy.first_row, size = size_of(target.type);
    const kv_u64 head = number / copy.rows, row = number % copy.rows;
    const kv_u64 from = copy.values + number * copy.channels * size;
    const kv_u64 to = row_address(target, (kv_u32)row) + head * (kv_u64)target.head_stride * size;
    if (size == 4)
      copy_row<kv_u32>(from, to, copy.channels);
    else
      copy_row<kv_u16>(from, to, copy.channels);
  }
}

}  // namespace kv::gpu
