// float32 to float16 and bfloat16 by bits, nearest even: no compiler support and no device headers needed.
#pragma once

#include "lane.hpp"

namespace kv {

union FloatBits {
  float value;
  kv_u32 bits;
};

// Multiplying by 2^112 moves the exponent, of subnormals too; infinities and NaN keep all ones.
KV_HD float from_float16(kv_u16 bits) {
  FloatBits f, largest;
  f.bits = (kv_u32)(bits & 0x7FFF) << 13;
  f.value *= 5.192296858534828e+33f;
  largest.bits = (kv_u32)(bits & 0x7FFF) << 13 | 0x7F800000u;
  f.bits = ((bits & 0x7C00) == 0x7C00 ? largest.bits : f.bits) | (kv_u32)(bits & 0x8000) << 16;
  return f.value;
}

// Without branches or selections, so that loops over rows vectorise on any CPU. Adding 2^13 times the power of two at or
// below |value|, at least 2^-14, leaves the rounded mantissa of the float16 in the lowest bits of the sum.
// Infinity where a finite value overflows.
KV_HD kv_u16 to_float16_bits(float value) {
  FloatBits f, magnitude, power, sum;
  f.value = value;
  magnitude.bits = f.bits & 0x7FFFFFFFu;
  magnitude.value = magnitude.value < 65536.0f ? magnitude.value : 65536.0f;
  power.bits = magnitude.bits & 0x7F800000u;
  power.value = power.value > 6.103515625e-05f ? power.value : 6.103515625e-05f;
  const kv_u32 exponent = (power.bits - 0x38800000u) >> 13;
  power.value *= 8192.0f;
  sum.value = magnitude.value + power.value;
  return (kv_u16)((f.bits >> 16 & 0x8000u) | (exponent + (sum.bits - power.bits)));
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
