// Where decoded rows go, and as what: what RowWriter of rows.hpp does, for threads.
#pragma once

#include "arguments.hpp"
#include "floats.hpp"

namespace kv::gpu {

template <class T>
KV_DEVICE T* at(kv_u64 address) {
  return reinterpret_cast<T*>(address);
}

// A pointer as one value. Compilers otherwise keep what it was computed from, and add it up anew for each access.
template <class T>
KV_DEVICE T* fixed(T* pointer) {
#if defined(__CUDACC_RTC__)
  asm("" : "+l"(pointer));
#endif
  return pointer;
}

// What no kernel writes: compilers then know which memory it is in, and take the shorter instructions.
template <class T>
KV_DEVICE T load(const T* from) {
#if defined(__CUDACC_RTC__)
  return __ldg(from);
#else
  return *from;
#endif
}

// Words of shared memory. The device reads them at 32-bit addresses: compilers otherwise work out anew with each access
// where shared memory begins.
#if defined(__CUDACC_RTC__)
struct SharedWords {
  kv_u32 address;
  KV_DEVICE kv_u32 byte(kv_u32 i) const {
    kv_u32 value;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(address + i));
    return value;
  }
  KV_DEVICE kv_u32 word(kv_u32 i) const {
    kv_u32 value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address + 4 * i));
    return value;
  }
};
KV_DEVICE SharedWords shared_words(const kv_u32* words) {
  kv_u32 address = (kv_u32)__cvta_generic_to_shared(words);
  asm("" : "+r"(address));
  return {address};
}
#else
struct SharedWords {
  const kv_u32* words;
  kv_u32 byte(kv_u32 i) const { return ((const kv_u8*)words)[i]; }
  kv_u32 word(kv_u32 i) const { return words[i]; }
};
inline SharedWords shared_words(const kv_u32* words) { return {words}; }
#endif

// To be written to, and not in shared memory.
template <class T>
KV_DEVICE T* global(T* memory) {
#if defined(__CUDACC_RTC__)
  __builtin_assume(__isGlobal(memory));
#endif
  return memory;
}

KV_DEVICE void keep_largest(kv_u32& largest, kv_u32 value) { largest = value > largest ? value : largest; }

KV_DEVICE kv_u64 size_of(kv_u32 type) { return type == kFloat32 ? 4 : 2; }

// Address of a row of the first head.
KV_DEVICE kv_u64 row_address(const Target& t, kv_u32 row) {
  kv_i64 element = (kv_i64)row * t.row_stride;
  if (t.pages != 0) {
    const kv_u32 q = (kv_u32)t.first_row + row, page = q / t.page_rows;
    element = at<const kv_i32>(t.pages)[page] * t.page_stride + (kv_i64)(q - page * t.page_rows) * t.row_stride;
  }
  return t.data + (kv_u64)element * size_of(t.type);
}

// The cosines and sines of one row, of the pairs that a lane or head begins with; none: no rotation.
struct RotationRow {
  const float* cos;
  const float* sin;
};

KV_DEVICE RotationRow rotation_row(const Rotation* rotation, kv_u32 row, kv_u32 first_pair) {
  if (rotation == nullptr) return {nullptr, nullptr};
  const kv_u64 entry = (row * rotation->pairs + first_pair) * sizeof(float);
  return {at<const float>(rotation->cos + entry), at<const float>(rotation->sin + entry)};
}

// Writes a value as its type, and keeps the largest magnitude of those written, as bits: see `overflows`.
template <kv_u32 kType>
KV_DEVICE void put(kv_u64 row, kv_u32 channel, float value, bool rotated, kv_u32& largest) {
  FloatBits f;
  f.value = value;
  const kv_u32 magnitude = f.bits & 0x7FFFFFFFu;
  if (kType == kFloat32) {
    // Before the rotation every value counts as finite.
    if (rotated) keep_largest(largest, magnitude);
    global(at<float>(row))[channel] = value;
  } else if (kType == kFloat16) {
    const kv_u16 bits = narrow16(value);
    keep_largest(largest, bits & 0x7FFFu);
    global(at<kv_u16>(row))[channel] = bits;
  } else {
    bool overflow = false;
    const kv_u16 bits = to_bfloat16(value, overflow);
    keep_largest(largest, bits & 0x7FFFu);
    if (rotated) keep_largest(largest, magnitude >> 16);  // a NaN may round to zero
    global(at<kv_u16>(row))[channel] = bits;
  }
}

// Whether an infinity or NaN is among the values written.
template <kv_u32 kType>
KV_DEVICE bool overflows(kv_u32 largest) {
  return largest >= (kType == kFloat32 ? 0x7F800000u : kType == kFloat16 ? 0x7C00u : 0x7F80u);
}

}  // namespace kv::gpu
