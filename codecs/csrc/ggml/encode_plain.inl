// Encoders of the plain and the ternary schemes and of q8_k: loops that the compiler vectorises, in the rounding of the
// `gguf` package where that has the scheme. FORMAT.md section 10.6.
namespace kv::ggml {
namespace {
namespace KV_GGML_LEVEL {

// Bits order magnitudes as numbers do, and whole numbers are what compilers find the largest of in any order.
template <int kN>
inline kv_i32 largest_bits(const float* x) {
  kv_i32 largest = 0;
  for (int i = 0; i < kN; ++i) {
    const kv_i32 magnitude = (kv_i32)(bits_of(x[i]) & 0x7FFFFFFFu);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

template <int kN>
inline float largest_magnitude(const float* x) {
  return float_of((kv_u32)largest_bits<kN>(x));
}

// With its sign, the first of equals.
template <int kN>
inline float largest_value(const float* x) {
  const kv_i32 largest = largest_bits<kN>(x);
  kv_i32 first = kN - 1;
  for (int i = 0; i < kN; ++i) {
    const kv_i32 at = (kv_i32)(bits_of(x[i]) & 0x7FFFFFFFu) == largest ? i : kN - 1;
    first = at < first ? at : first;
  }
  return x[first];
}

// A number in the order of values.
inline kv_i32 ordered(float x) {
  const kv_i32 bits = (kv_i32)bits_of(x);
  return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}
inline float from_ordered(kv_i32 key) { return float_of((kv_u32)(key ^ ((key >> 31) & 0x7FFFFFFF))); }

// Half goes away from zero.
inline kv_i32 nearest(float x) {
  const float magnitude = std::fabs(x);
  kv_i32 whole = (kv_i32)magnitude;
  whole += magnitude - (float)whole >= 0.5f;
  return x < 0 ? -whole : whole;
}

// 0 of 0, and infinite where that overflows.
inline float inverse_of(float d) { return d == 0 ? 0.0f : 1 / d; }
// The same as a factor of values, none of which is to become NaN.
inline float finite_inverse_of(float d) {
  const float inverse = inverse_of(d);
  return std::fabs(inverse) < kInfinity ? inverse : 0.0f;
}

bool encode_f16(const float* x, kv_u64 n_blocks, kv_u8* out) {
  kv_u32 largest = 0;
  for (kv_u64 i = 0; i < n_blocks; ++i) {
    const kv_u16 half = to_float16_bits(x[i]);
    const kv_u32 magnitude = half & 0x7FFF;
    largest = magnitude > largest ? magnitude : largest;
    std::memcpy(out + 2 * i, &half, 2);
  }
  return largest < 0x7C00;
}

bool encode_q8_0(const float* x, kv_u64 n_blocks, kv_u8* out) {
  bool fits = true;
  for (; n_blocks > 0; --n_blocks, x += 32, out += 34) {
    const float d = largest_magnitude<32>(x) / 127, inverse = finite_inverse_of(d);
    fits &= put_half(d, out);
    signed char q[32];
    for (int i = 0; i < 32; ++i) q[i] = (signed char)nearest(x[i] * inverse);
    std::memcpy(out + 2, q, 32);
  }
  return fits;
}

// Codes 0 to `top` of values around `zero` steps, cut off after adding a half.
inline void codes_around(const float* x, float d, float zero, kv_i32 top, kv_u8* c) {
  const float inverse = inverse_of(d);
  if (!(std::fabs(inverse) < kInfinity)) {  // what `gguf` makes of infinities
    std::memset(c, 0, 32);
    return;
  }
  for (int i = 0; i < 32; ++i) {
    const kv_i32 q = (kv_i32)(x[i] * inverse + (zero + 0.5f));
    c[i] = (kv_u8)(q < top ? q : top);
  }
}

inline void put_nibbles(const kv_u8* c, kv_u8* out) {
  for (int i = 0; i < 16; ++i) out[i] = (kv_u8)((c[i] & 15) | c[16 + i] << 4);
}

inline void put_fifth_bits(const kv_u8* c, kv_u8* out) {
  kv_u32 bits = 0;
  for (int i = 0; i < 32; ++i) bits |= (kv_u32)(c[i] >> 4) << i;
  put_u32(bits, out);
}

bool encode_q4_0(const float* x, kv_u64 n_blocks, kv_u8* out) {
  bool fits = true;
  for (; n_blocks > 0; --n_blocks, x += 32, out += 18) {
    const float d = largest_value<32>(x) / -8;
    kv_u8 c[32];
    codes_around(x, d, 8, 15, c);
    fits &= put_half(d, out);
    put_nibbles(c, out + 2);
  }
  return fits;
}

bool encode_q5_0(const float* x, kv_u64 n_blocks, kv_u8* out) {
  bool fits = true;
  for (; n_blocks > 0; --n_blocks, x += 32, out += 22) {
    const float d = largest_value<32>(x) / -16;
    kv_u8 c[32];
    codes_around(x, d, 16, 31, c);
    fits &= put_half(d, out);
    put_fifth_bits(c, out + 2);
    put_nibbles(c, out + 6);
  }
  return fits;
}

// Codes 0 to `top` between the least and the largest value; writes scale and offset.
inline bool codes_between(const float* x, kv_i32 top, kv_u8* c, kv_u8* out) {
  kv_i32 least_key = 0x7FFFFFFF, largest_key = -0x7FFFFFFF - 1;
  for (int i = 0; i < 32; ++i) {
    const kv_i32 key = ordered(x[i]);
    least_key = key < least_key ? key : least_key;
    largest_key = key > largest_key ? key : largest_key;
  }
  float least = from_ordered(least_key);
  const float largest = from_ordered(largest_key);
  if (least == 0) {  // of zeros of both signs the last one counts
    for (int i = 0; i < 32; ++i)
      if (x[i] == 0) least = x[i];
  }
  const float d = (largest - least) / (float)top;
  if (!(d < kInfinity)) {
    std::memset(c, 0, 32);
    return false;
  }
  const float inverse = finite_inverse_of(d);
  for (int i = 0; i < 32; ++i) {
    const kv_i32 q = (kv_i32)((x[i] - least) * inverse + 0.5f);
    c[i] = (kv_u8)(q < top ? q : top);
  }
  const bool fits = put_half(d, out);
  return put_half(least, out + 2) && fits;
}

bool encode_q4_1(const float* x, kv_u64 n_blocks, kv_u8* out) {
  bool fits = true;
  for (; n_blocks > 0; --n_blocks, x += 32, out += 20) {
    kv_u8 c[32];
    fits &= codes_between(x, 15, c, out);
    put_nibbles(c, out + 4);
  }
  return fits;
}

bool encode_q5_1(const float* x, kv_u64 n_blocks, kv_u8* out) {
  bool fits = true;
  for (; n_blocks > 0; --n_blocks, x += 32, out += 24) {
    kv_u8 c[32];
    fits &= codes_between(x, 31, c, out);
    put_fifth_bits(c, out + 4);
    put_nibbles(c, out + 8);
  }
  return fits;
}

bool encode_q1_0(const float* x, kv_u64 n_blocks, kv_u8* out) {
  bool fits = true;
  for (; n_blocks > 0; --n_blocks, x += 128, out += 18) {
    float sum = 0;
    for (int i = 0; i < 128; ++i) sum += std::fabs(x[i]);
    fits &= put_half(sum / 128, out);
    for (int i = 0; i < 16; ++i) {
      kv_u32 bits = 0;
      for (int j = 0; j < 8; ++j) bits |= (kv_u32)(x[8 * i + j] >= 0) << j;
      out[2 + i] = (kv_u8)bits;
    }
  }
  return fits;
}

template <int kN>
bool encode_q2_0(const float* x, kv_u64 n_blocks, kv_u8* out) {
  bool fits = true;
  for (; n_blocks > 0; --n_blocks, x += kN, out += 2 + kN / 4) {
    const float d = largest_magnitude<kN>(x), inverse = finite_inverse_of(d);
    fits &= put_half(d, out);
    kv_u8 c[kN];
    for (int i = 0; i < kN; ++i) c[i] = (kv_u8)(nearest(x[i] * inverse) + 1);
    for (int i = 0; i < kN / 4; ++i)
      out[2 + i] = (kv_u8)(c[4 * i] | c[4 * i + 1] << 2 | c[4 * i + 2] << 4 | c[4 * i + 3] << 6);
  }
  return fits;
}

// The scale is float32 and always fits; dividing serves the least of them too.
bool encode_q8_k(const float* x, kv_u64 n_blocks, kv_u8* out) {
  for (; n_blocks > 0; --n_blocks, x += 256, out += 292) {
    const float d = largest_magnitude<256>(x) / 127, divisor = d > 0 ? d : kInfinity;
    put_u32(bits_of(d), out);
    signed char q[256];
    for (int i = 0; i < 256; ++i) {
      const kv_i32 c = nearest(x[i] / divisor);
      q[i] = (signed char)(c < -127 ? -127 : c > 127 ? 127 : c);
    }
    std::memcpy(out + 4, q, 256);
    for (int g = 0; g < 16; ++g) {
      kv_i32 sum = 0;
      for (int i = 0; i < 16; ++i) sum += q[16 * g + i];
      put_u16((kv_u32)sum, out + 260 + 2 * g);
    }
  }
  return true;
}

// Trits 0, 1, 2 of values -d, 0, d.
inline float trits(const float* x, kv_u8* c) {
  const float d = largest_magnitude<256>(x), inverse = finite_inverse_of(d);
  for (int i = 0; i < 256; ++i) c[i] = (kv_u8)(nearest(x[i] * inverse) + 1);
  return d;
}

// The first trit is the highest digit; the byte is the fraction of 256 just above the number's of 243.
template <int kRun, int kTrits>
inline const kv_u8* put_trits(const kv_u8* c, kv_u8* out) {
  constexpr kv_u32 kPowers[5] = {81, 27, 9, 3, 1};
  for (int i = 0; i < kRun; ++i) {
    kv_u32 number = 0;
    for (int k = 0; k < kTrits; ++k) number += kPowers[k] * c[kRun * k + i];
    out[i] = (kv_u8)((number * 256 + 242) / 243);
  }
  return c + kRun * kTrits;
}

bool encode_tq1_0(const float* x, kv_u64 n_blocks, kv_u8* out) {
  bool fits = true;
  for (; n_blocks > 0; --n_blocks, x += 256, out += 54) {
    kv_u8 c[256];
    fits &= put_half(trits(x, c), out + 52);
    const kv_u8* rest = put_trits<32, 5>(c, out);
    rest = put_trits<16, 5>(rest, out + 32);
    put_trits<4, 4>(rest, out + 48);
  }
  return fits;
}

bool encode_tq2_0(const float* x, kv_u64 n_blocks, kv_u8* out) {
  bool fits = true;
  for (; n_blocks > 0; --n_blocks, x += 256, out += 66) {
    kv_u8 c[256];
    fits &= put_half(trits(x, c), out + 64);
    for (int half = 0; half < 2; ++half) {
      const kv_u8* from = c + 128 * half;
      for (int i = 0; i < 32; ++i)
        out[32 * half + i] = (kv_u8)(from[i] | from[32 + i] << 2 | from[64 + i] << 4 | from[96 + i] << 6);
    }
  }
  return fits;
}

Encode plain_encoder(kv_u32 scheme) {
  switch (scheme) {
    case kF16: return encode_f16;
    case kQ4_0: return encode_q4_0;
    case kQ4_1: return encode_q4_1;
    case kQ5_0: return encode_q5_0;
    case kQ5_1: return encode_q5_1;
    case kQ8_0: return encode_q8_0;
    case kQ8_K: return encode_q8_k;
    case kQ1_0: return encode_q1_0;
    case kQ2_0: return encode_q2_0<64>;
    case kQ2_0_128: return encode_q2_0<128>;
    case kTQ1_0: return encode_tq1_0;
    case kTQ2_0: return encode_tq2_0;
    default: return nullptr;
  }
}

}  // namespace KV_GGML_LEVEL
}  // namespace
}  // namespace kv::ggml
