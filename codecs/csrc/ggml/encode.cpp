#include "encode.hpp"

#include <cmath>
#include <cstring>

#include "../half.hpp"

namespace kv::ggml {

namespace {

bool put_half(float value, kv_u8* out) {
  bool overflow = false;
  const kv_u16 bits = to_float16(value, overflow);
  std::memcpy(out, &bits, 2);
  return !overflow;
}

bool encode_f16(const float* x, kv_u64 n_blocks, kv_u8* out) {
  bool fits = true;
  for (kv_u64 i = 0; i < n_blocks; ++i) fits &= put_half(x[i], out + 2 * i);
  return fits;
}

bool encode_q8_0(const float* x, kv_u64 n_blocks, kv_u8* out) {
  bool fits = true;
  for (kv_u64 b = 0; b < n_blocks; ++b, x += 32, out += 34) {
    float largest = 0;
    for (int i = 0; i < 32; ++i) largest = std::fmax(largest, std::fabs(x[i]));
    const float d = largest / 127, inverse = d > 0 ? 1 / d : 0;
    fits &= put_half(d, out);
    for (int i = 0; i < 32; ++i) out[2 + i] = (kv_u8)(signed char)std::round(x[i] * inverse);
  }
  return fits;
}

}  // namespace

Encode encoder(kv_u32 scheme, int) {
  switch (scheme) {
    case kF16: return encode_f16;
    case kQ8_0: return encode_q8_0;
    default: return nullptr;
  }
}

}  // namespace kv::ggml
