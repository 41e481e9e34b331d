// To float16 with AVX-512, where a group has few codes: a table of what each stands for is made and narrowed once, and
// 32 values at a time come out of it. Part of decode.inl; the other schemes use the common templates.

struct HalfTable {
  __m512i halves;  // of codes 0 to 31

  static __m256i narrowed(__m512 values) {
    return _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  // Of codes 0 to 15, with any bit above.
  explicit HalfTable(__m512 values) : halves(_mm512_broadcast_i64x4(narrowed(values))) {}
  HalfTable(__m512 low, __m512 high)
      : halves(_mm512_inserti64x4(_mm512_castsi256_si512(narrowed(low)), narrowed(high), 1)) {}

  // The lowest five bits of each word count.
  void look_up(__m512i codes, kv_u16* out) const { _mm512_storeu_si512(out, _mm512_permutexvar_epi16(codes, halves)); }
};

// Whole numbers from 0, again from 0 after `period` of them, less `zero`.
inline __m512 code_numbers(float zero = 0, int period = 16) {
  float x[16];
  for (int i = 0; i < 16; ++i) x[i] = (float)(i % period) - zero;
  return load<__m512>(x);
}

// d * code, d * code + m.
inline __m512 values_of(__m512 codes, float d) { return _mm512_mul_ps(codes, _mm512_set1_ps(d)); }
inline __m512 values_of(__m512 codes, float d, float m) {
  return _mm512_fmadd_ps(codes, _mm512_set1_ps(d), _mm512_set1_ps(m));
}

// Bytes as words.
inline __m512i words_at(const kv_u8* at) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)at)); }

// Sixteen bytes, then the same ones shifted: nibbles, with other bits above.
inline __m512i nibbles_at(const kv_u8* at) {
  const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)at));
  return _mm512_inserti64x4(_mm512_castsi256_si512(words), _mm256_srli_epi16(words, 4), 1);
}

inline __m512i shifted(__m512i words, int right) {
  return right >= 0 ? _mm512_srli_epi16(words, (kv_u32)right) : _mm512_slli_epi16(words, (kv_u32)-right);
}

// (words & mask) | base.
inline __m512i masked_onto(__m512i words, int mask, __m512i base) {
  return _mm512_ternarylogic_epi32(words, _mm512_set1_epi16((short)mask), base, 0xEA);
}

// The first sixteen words, and the others.
inline __m512i halves_of(int low, int high) {
  return _mm512_inserti64x4(_mm512_set1_epi16((short)low), _mm256_set1_epi16((short)high), 1);
}

inline void decode_q4_0(const kv_u8* in, kv_u64 n_blocks, kv_u16* out) {
  for (; n_blocks > 0; --n_blocks, in += 18, out += 32)
    HalfTable(values_of(code_numbers(8), half_at(in))).look_up(nibbles_at(in + 2), out);
}

inline __m512i fifth_bits(const kv_u8* low, const kv_u8* high) {
  const __m512i nibbles = _mm512_and_si512(nibbles_at(low), _mm512_set1_epi16(15));
  return _mm512_mask_add_epi16(nibbles, load<kv_u32>(high), nibbles, _mm512_set1_epi16(16));
}

inline void decode_q5_0(const kv_u8* in, kv_u64 n_blocks, kv_u16* out) {
  for (; n_blocks > 0; --n_blocks, in += 22, out += 32) {
    const float d = half_at(in);
    HalfTable(values_of(code_numbers(16), d), values_of(code_numbers(), d)).look_up(fifth_bits(in + 6, in + 2), out);
  }
}

inline void decode_q5_1(const kv_u8* in, kv_u64 n_blocks, kv_u16* out) {
  for (; n_blocks > 0; --n_blocks, in += 24, out += 32) {
    const float d = half_at(in), m = half_at(in + 2);
    const HalfTable table(values_of(code_numbers(), d, m), values_of(code_numbers(-16), d, m));
    table.look_up(fifth_bits(in + 8, in + 4), out);
  }
}

inline void decode_q1_0(const kv_u8* in, kv_u64 n_blocks, kv_u16* out) {
  for (; n_blocks > 0; --n_blocks, in += 18, out += 128) {
    const __m512i d = _mm512_set1_epi16(load<short>(in)), minus_d = _mm512_xor_si512(d, _mm512_set1_epi16(-0x8000));
    for (int i = 0; i < 4; ++i)
      _mm512_storeu_si512(out + 32 * i, _mm512_mask_blend_epi16(load<kv_u32>(in + 2 + 4 * i), minus_d, d));
  }
}

inline __m512 iq4_numbers() {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)kIQ4Values)));
}

inline void decode_iq4_nl(const kv_u8* in, kv_u64 n_blocks, kv_u16* out) {
  const __m512 numbers = iq4_numbers();
  for (; n_blocks > 0; --n_blocks, in += 18, out += 32)
    HalfTable(values_of(numbers, half_at(in))).look_up(nibbles_at(in + 2), out);
}

inline void decode_iq4_xs(const kv_u8* in, kv_u64 n_blocks, kv_u16* out) {
  const __m512 numbers = iq4_numbers();
  for (; n_blocks > 0; --n_blocks, in += 136, out += 256) {
    float scale[8];
    iq4_xs_scales(in, scale);
    for (int g = 0; g < 8; ++g)
      HalfTable(values_of(numbers, scale[g])).look_up(nibbles_at(in + 8 + 16 * g), out + 32 * g);
  }
}

// Element i of the result is element `first + i / repeat`.
inline __m512 repeated(const float (&x)[16], int first, int repeat) {
  int index[16];
  for (int i = 0; i < 16; ++i) index[i] = first + i / repeat;
  return _mm512_permutexvar_ps(load<__m512i>(index), _mm512_loadu_ps(x));
}

// Two bits and 16 groups: four groups in each vector of floats, eight in each table.
inline void decode_q2_k(const kv_u8* in, kv_u64 n_blocks, kv_u16* out) {
  const __m512 codes = code_numbers(0, 4);
  for (; n_blocks > 0; --n_blocks, in += 84, out += 256) {
    float scale[16], offset[16];
    q2_k_scales(in, scale, offset);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m512i q = words_at(in + 16 + 32 * half);
      const int g = 8 * half;
      const HalfTable table(_mm512_fmadd_ps(codes, repeated(scale, g, 4), repeated(offset, g, 4)),
                            _mm512_fmadd_ps(codes, repeated(scale, g + 4, 4), repeated(offset, g + 4, 4)));
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j)
        table.look_up(masked_onto(shifted(q, 2 * j), 3, halves_of(8 * j, 8 * j + 4)), out + 128 * half + 32 * j);
    }
  }
}

// Three bits and 16 groups: two groups in each vector of floats, four in each table.
inline void decode_q3_k(const kv_u8* in, kv_u64 n_blocks, kv_u16* out) {
  const __m512 codes = code_numbers(4, 8);
  for (; n_blocks > 0; --n_blocks, in += 110, out += 256) {
    float scale[16];
    put(q3_k_scales(in + 96) - all(32), half_at(in + 108), scale);
    const __m512i high = words_at(in);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512i q = words_at(in + 32 + i / 2 * 32);
      const HalfTable table(_mm512_mul_ps(codes, repeated(scale, 4 * i, 8)),
                            _mm512_mul_ps(codes, repeated(scale, 4 * i + 2, 8)));
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        const int plane = 2 * i + j;
        const __m512i low = masked_onto(shifted(q, plane % 4 * 2), 3, halves_of(16 * j, 16 * j + 8));
        table.look_up(masked_onto(shifted(high, plane - 2), 4, low), out + 32 * plane);
      }
    }
  }
}

inline void decode_q4_k(const kv_u8* in, kv_u64 n_blocks, kv_u16* out) {
  const __m512 codes = code_numbers();
  for (; n_blocks > 0; --n_blocks, in += 144, out += 256) {
    float scale[16], offset[16];
    q4_k_scales(in, scale, offset);
    for (int g = 0; g < 8; g += 2) {
      const __m512i q = words_at(in + 16 + 16 * g);
      HalfTable(values_of(codes, scale[g], offset[8 + g])).look_up(q, out + 32 * g);
      HalfTable(values_of(codes, scale[g + 1], offset[9 + g])).look_up(shifted(q, 4), out + 32 * g + 32);
    }
  }
}

inline void decode_tq2_0(const kv_u8* in, kv_u64 n_blocks, kv_u16* out) {
  for (; n_blocks > 0; --n_blocks, in += 66, out += 256) {
    const HalfTable table(values_of(code_numbers(1, 4), half_at(in + 64)));
    for (int half = 0; half < 2; ++half) {
      const __m512i q = words_at(in + 32 * half);
      for (int j = 0; j < 4; ++j) table.look_up(shifted(q, 2 * j), out + 128 * half + 32 * j);
    }
  }
}
