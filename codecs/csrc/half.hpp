// float32 to float16 and bfloat16 by bits, nearest even: no compiler support and no device headers needed.
#pragma once

#include "lane.hpp"

namespace kv {

union FloatBits {
  float value;
  kv_u32 bits;
};

// Sets `overflow` when a finite value rounds to infinity.
KV_HD kv_u16 to_float16(float value, bool& overflow) {
  FloatBits f;
  f.value = value;
  const kv_u32 sign = (f.bits >> 16) & 0x8000u;
  kv_u32 a = f.bits & 0x7FFFFFFFu;
  if (a >= 0x477FF000u) {  // 65520 and more rounds to infinity
    overflow = true;
    return (kv_u16)(sign | 0x7C00u);
  }
  if (a < 0x38800000u) {  // below 2^-14: subnormal; adding 0.5 aligns the mantissa and rounds it
    FloatBits m;
    m.bits = a;
    m.value += 0.5f;
    return (kv_u16)(sign | (m.bits - 0x3F000000u));
  }
  a += 0xFFFu + ((a >> 13) & 1u);  // nearest even on the 13 bits dropped
  return (kv_u16)(sign | ((a - 0x38000000u) >> 13));
}

KV_HD kv_u16 to_bfloat16(float value, bool& overflow) {
  FloatBits f;
  f.value = value;
  const kv_u32 a = f.bits + 0x7FFFu + ((f.bits >> 16) & 1u);
  if ((a & 0x7F800000u) == 0x7F800000u) overflow = true;
  return (kv_u16)(a >> 16);
}

}  // namespace kv
