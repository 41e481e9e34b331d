// float32 arithmetic whose bits no compiler option changes: CuPy compiles with -ftz=true, which would make zeros of what is
// below 2^-126, and multiply and add must stay apart. Every float that reaches an output comes of these.
#pragma once

#include "half.hpp"
#include "warp.hpp"

namespace kv::gpu {

#if defined(__CUDACC_RTC__)
KV_DEVICE float multiply(float a, float b) {
  float product;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
  return product;
}

KV_DEVICE float add(float a, float b) {
  float sum;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
}

KV_DEVICE float subtract(float a, float b) {
  float difference;
  asm("sub.rn.f32 %0, %1, %2;" : "=f"(difference) : "f"(a), "f"(b));
  return difference;
}

// float16, nearest even; infinity or NaN beyond its range. half.hpp's way costs some ten instructions more.
KV_DEVICE kv_u16 narrow16(float value) {
  kv_u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// Exact.
KV_DEVICE float widen16(kv_u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
#else
inline float multiply(float a, float b) { return a * b; }
inline float add(float a, float b) { return a + b; }
inline float subtract(float a, float b) { return a - b; }
inline kv_u16 narrow16(float value) { return to_float16_bits(value); }
inline float widen16(kv_u16 bits) { return from_float16(bits); }
#endif

}  // namespace kv::gpu
