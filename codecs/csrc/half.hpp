// float32 to float16 and bfloat16 by bits, nearest even: no compiler support and no device headers needed.
#pragma once

#include "lane.hpp"

namespace kv {

union FloatBits {
  float value;
  kv_u32 bits;
};

// No subnormal float32 is met on the way, as some processes have them flushed to zero.
KV_HD float from_float16(kv_u16 bits) {
  FloatBits normal, small;
  const kv_u32 magnitude = (kv_u32)(bits & 0x7FFF) << 13;
  normal.bits = magnitude + ((bits & 0x7C00) == 0x7C00 ? 0x70000000u : 0x38000000u);
  small.bits = magnitude + 0x38800000u;  // below 2^-14: its bits behind a leading 2^-14, which is taken away
  small.value -= 6.103515625e-05f;
  normal.bits = ((bits & 0x7C00) == 0 ? small.bits : normal.bits) | (kv_u32)(bits & 0x8000) << 16;
  return normal.value;
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

// Sets `overflow` when a value becomes infinite, as NaN does.
KV_HD kv_u16 to_float16(float value, bool& overflow) {
  const kv_u16 bits = to_float16_bits(value);
  overflow |= (bits & 0x7FFF) >= 0x7C00;
  return bits;
}

// The same; NaN counts as an overflow here too.
KV_HD kv_u16 to_bfloat16(float value, bool& overflow) {
  FloatBits f;
  f.value = value;
  overflow |= (f.bits & 0x7FFFFFFFu) >= 0x7F7F8000u;
  return (kv_u16)((f.bits + 0x7FFFu + ((f.bits >> 16) & 1u)) >> 16);
}

}  // namespace kv
