// Sixteen codes at a time, as bytes of one vector, and the step from codes to values. Part of decode.inl.
//
// Every value is d * code or d * code + m with a whole code. d is a float16 times a small number, so that the product
// is exact in float32: fused with the sum or not, the value is rounded once. (q8_k, whose d is a float32, has no m.)

using Codes = signed char __attribute__((vector_size(16)));
using Bytes = kv_u8 __attribute__((vector_size(16)));
using Shorts = kv_u16 __attribute__((vector_size(16)));
using Longs = kv_u64 __attribute__((vector_size(16)));

template <class T>
inline T load(const void* at) {
  T x;
  std::memcpy(&x, at, sizeof x);
  return x;
}

// The compiler would keep the scales of a block in vectors and shuffle each out of them, on the port that is busiest
// already; broadcasts from memory are for nothing.
template <class T, int kSize>
inline void keep_in_memory(T (&array)[kSize]) {
  asm("" : "+m"(array));
}

inline Bytes all(int byte) { return Bytes{} + (kv_u8)byte; }

// The `bits` bits of each byte above the `shift` lowest.
inline Bytes field(Bytes x, int shift, int bits) { return (Bytes)((Shorts)x >> shift) & all((1 << bits) - 1); }

// The same bits, moved to the top of a field of `width` bits: what completes the low bits of another field.
inline Bytes high_field(Bytes x, int shift, int bits, int width) {
  const int up = width - bits - shift;
  const Shorts moved = up >= 0 ? (Shorts)x << up : (Shorts)x >> -up;
  return (Bytes)moved & all(((1 << bits) - 1) << (width - bits));
}

// -1 where a bit of `mask` is set, else 0. The first of two ways is faster in q1_0, the second elsewhere.
inline Codes spread_bits(kv_u32 mask) {
  constexpr kv_u64 kEach = 0x0101010101010101u;
  const Longs bytes = {(mask & 0xFF) * kEach, (mask >> 8 & 0xFF) * kEach};
  const Bytes bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  return (Codes)(((Bytes)bytes & bit) == bit);
}
inline Codes bit_mask(kv_u32 mask) {
#if KV_GGML_BITS == 512
  return (Codes)_mm_movm_epi8((__mmask16)mask);
#else
  return spread_bits(mask);
#endif
}

// The magnitudes, negative where a bit is set.
inline Codes with_signs(Codes magnitudes, kv_u32 negative) {
  const Codes mask = bit_mask(negative);
  return (magnitudes ^ mask) - mask;
}

inline Codes iq4_values(Bytes codes) {
#if KV_GGML_BITS >= 256
  return (Codes)_mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)kIQ4Values), (__m128i)codes);
#else
  Codes values;
  for (int i = 0; i < 16; ++i) values[i] = kIQ4Values[codes[i]];
  return values;
#endif
}

inline float half_at(const kv_u8* at) {
#if KV_GGML_BITS >= 256
  return _cvtsh_ss(load<kv_u16>(at));
#else
  return from_float16(load<kv_u16>(at));
#endif
}

#if KV_GGML_BITS == 512
struct Wide {
  __m512 x;
  explicit Wide(Codes codes) : x(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)codes))) {}
  void scale(float d) { x = _mm512_mul_ps(x, _mm512_set1_ps(d)); }
  void scale(float d, float m) { x = _mm512_fmadd_ps(x, _mm512_set1_ps(d), _mm512_set1_ps(m)); }
  void store(float* out) const { _mm512_storeu_ps(out, x); }
  void store(kv_u16* out) const {
    _mm256_storeu_si256((__m256i*)out, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};
#elif KV_GGML_BITS == 256
struct Wide {
  __m256 x, y;
  explicit Wide(Codes codes)
      : x(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32((__m128i)codes))),
        y(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64((__m128i)codes, (__m128i)codes)))) {}
  void scale(float d) {
    x = _mm256_mul_ps(x, _mm256_set1_ps(d));
    y = _mm256_mul_ps(y, _mm256_set1_ps(d));
  }
  void scale(float d, float m) {
    scale(d);
    x = _mm256_add_ps(x, _mm256_set1_ps(m));
    y = _mm256_add_ps(y, _mm256_set1_ps(m));
  }
  void store(float* out) const {
    _mm256_storeu_ps(out, x);
    _mm256_storeu_ps(out + 8, y);
  }
  void store(kv_u16* out) const {
    _mm_storeu_si128((__m128i*)out, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i*)(out + 8), _mm256_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT));
  }
};
#else
struct Wide {
  float x[16];
  explicit Wide(Codes codes) {
    signed char bytes[16];
    std::memcpy(bytes, &codes, 16);
    for (int i = 0; i < 16; ++i) x[i] = (float)bytes[i];
  }
  void scale(float d) {
    for (int i = 0; i < 16; ++i) x[i] *= d;
  }
  void scale(float d, float m) {
    for (int i = 0; i < 16; ++i) x[i] = x[i] * d + m;
  }
  void store(float* out) const { std::memcpy(out, x, sizeof x); }
};
#endif

// Sixteen values: d * code, d * code + m.
template <class Out, class C>
inline void put(C codes, float d, Out* out) {
  Wide wide((Codes)codes);
  wide.scale(d);
  wide.store(out);
}
template <class Out, class C>
inline void put(C codes, float d, float m, Out* out) {
  Wide wide((Codes)codes);
  wide.scale(d, m);
  wide.store(out);
}
