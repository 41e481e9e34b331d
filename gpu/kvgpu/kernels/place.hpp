// Where decoded rows go: what RowWriter of rows.hpp does, a pair of channels at a time.
#pragma once

#include "arguments.hpp"
#include "half.hpp"
#include "warp.hpp"

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

// Infinities and NaN: what values beyond float32 become.
KV_DEVICE bool beyond_float32(float value) {
  FloatBits f;
  f.value = value;
  return (f.bits & 0x7F800000u) == 0x7F800000u;
}

// The same bits as half.hpp's, whose way costs some ten instructions more; other bits only where `overflow` is set.
KV_DEVICE kv_u16 narrow16(float value, bool& overflow) {
#if defined(__CUDACC_RTC__)
  kv_u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  overflow |= (bits & 0x7FFF) >= 0x7C00;
  return bits;
#else
  return to_float16(value, overflow);
#endif
}

template <kv_u32 kType>
KV_DEVICE void put(kv_u64 row, kv_u32 channel, float value, bool& overflow) {
  if (kType == kFloat32)
    at<float>(row)[channel] = value;
  else
    at<kv_u16>(row)[channel] = kType == kFloat16 ? narrow16(value, overflow) : to_bfloat16(value, overflow);
}

struct Pair {
  float first, second;
};

// Multiply and add stay apart (--fmad=false), as on the CPU.
KV_DEVICE Pair rotated(Pair p, float cos, float sin) {
  return {p.first * cos - p.second * sin, p.second * cos + p.first * sin};
}

}  // namespace kv::gpu
