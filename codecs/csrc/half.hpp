// float32 to float16 and bfloat16 by bits, nearest even: no compiler support and no device headers needed.
#pragma once

#include "lane.hpp"

namespace kv {

union FloatBits {
  float value;
  kv_u32 bits;
};

// Without branches, so that loops over rows vectorise. Infinity where a finite value overflows.
KV_HD kv_u16 to_float16_bits(float value) {
  FloatBits f, small;
  f.value = value;
  const kv_u32 sign = (f.bits >> 16) & 0x8000u;
  const kv_u32 a = f.bits & 0x7FFFFFFFu;
  small.bits = a;
  small.value += 0.5f;  // below 2^-14, subnormal: adding 0.5 aligns the mantissa and rounds it
  const kv_u32 subnormal = small.bits - 0x3F000000u;
  const kv_u32 normal = (a + 0xFFFu + ((a >> 13) & 1u) - 0x38000000u) >> 13;  // nearest even on the 13 bits dropped
  const kv_u32 bounded = a >= 0x477FF000u ? 0x7C00u : normal;                 // 65520 and more rounds to infinity
  return (kv_u16)(sign | (a < 0x38800000u ? subnormal : bounded));
}

// Sets `overflow` when a finite value rounds to infinity.
KV_HD kv_u16 to_float16(float value, bool& overflow) {
  const kv_u16 bits = to_float16_bits(value);
  overflow |= (bits & 0x7FFF) >= 0x7C00;
  return bits;
}

KV_HD kv_u16 to_bfloat16(float value, bool& overflow) {
  FloatBits f;
  f.value = value;
  const kv_u32 a = f.bits + 0x7FFFu + ((f.bits >> 16) & 1u);
  overflow |= (a & 0x7F800000u) == 0x7F800000u;
  return (kv_u16)(a >> 16);
}

}  // namespace kv
