// Fields of blocks as encoders write them.
#pragma once

#include <cstring>

#include "../half.hpp"

namespace kv::ggml {

inline constexpr float kInfinity = __builtin_inff();

inline void put_u16(kv_u32 value, kv_u8* out) {
  const kv_u16 v = (kv_u16)value;
  std::memcpy(out, &v, 2);
}
inline void put_u32(kv_u32 value, kv_u8* out) { std::memcpy(out, &value, 4); }

// Whether the value fits.
inline bool put_half(float value, kv_u8* out) {
  bool overflow = false;
  put_u16(to_float16(value, overflow), out);
  return !overflow;
}

inline kv_u32 bits_of(float value) {
  FloatBits f;
  f.value = value;
  return f.bits;
}
inline float float_of(kv_u32 bits) {
  FloatBits f;
  f.bits = bits;
  return f.value;
}

}  // namespace kv::ggml
