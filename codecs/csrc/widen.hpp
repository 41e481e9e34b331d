// float16 and bfloat16 to float32, and whether values are finite.
#pragma once

#include <cmath>

#include "half.hpp"
#include "simd.hpp"

namespace kv {

KV_CLONES static void widen_half(const kv_u16* __restrict x, kv_u64 n, float* __restrict out) {
  for (kv_u64 i = 0; i < n; ++i) out[i] = from_float16(x[i]);
}

KV_CLONES static void widen_bfloat16(const kv_u16* __restrict x, kv_u64 n, float* __restrict out) {
  for (kv_u64 i = 0; i < n; ++i) {
    FloatBits f;
    f.bits = (kv_u32)x[i] << 16;
    out[i] = f.value;
  }
}

KV_CLONES static bool all_finite(const float* x, kv_u64 n) {
  kv_i32 fine = 1;
  for (kv_u64 i = 0; i < n; ++i) fine &= (kv_i32)(std::fabs(x[i]) <= 3.402823466e+38f);
  return fine != 0;
}

}  // namespace kv
