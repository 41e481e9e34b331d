// Rows to float16.
#pragma once

#include "half.hpp"
#include "simd.hpp"

namespace kv {

// Conversions of contiguous rows. Each instruction set has its own; all of them give the same bits. They return whether
// a value overflows; NaN does.
struct Narrow {
  bool (*row)(const float* row, kv_u32 n, kv_u16* out);
  bool (*values)(const kv_i32* values, kv_u32 n, float unit, kv_u16* out);  // integers times a unit
};

inline bool narrow_row(const float* __restrict row, kv_u32 n, kv_u16* __restrict out) {
  bool overflow = false;
  for (kv_u32 i = 0; i < n; ++i) out[i] = to_float16(row[i], overflow);
  return overflow;
}

inline bool narrow_values(const kv_i32* __restrict values, kv_u32 n, float unit, kv_u16* __restrict out) {
  bool overflow = false;
  for (kv_u32 i = 0; i < n; ++i) out[i] = to_float16((float)values[i] * unit, overflow);
  return overflow;
}

#if KV_X86
// to_float16_bits of half.hpp in the SSE2 that every x86-64 CPU has: compilers make three times as much of it.
struct Narrow128 {
  __m128 beyond = _mm_setzero_ps();

  static __m128i bits(__m128 x) {
    const __m128 magnitude = _mm_andnot_ps(_mm_set1_ps(-0.0f), x);
    const __m128 exponent = _mm_and_ps(magnitude, _mm_castsi128_ps(_mm_set1_epi32(0x7F800000)));
    const __m128 power = _mm_max_ps(exponent, _mm_set1_ps(6.103515625e-05f));
    const __m128 shifted = _mm_mul_ps(power, _mm_set1_ps(8192.0f));
    const __m128i mantissa = _mm_sub_epi32(_mm_castps_si128(_mm_add_ps(magnitude, shifted)), _mm_castps_si128(shifted));
    const __m128i biased = _mm_sub_epi32(_mm_castps_si128(power), _mm_set1_epi32(0x38800000));
    const __m128i half = _mm_add_epi32(mantissa, _mm_srli_epi32(biased, 13));
    // The sign comes down with zeros or ones above it, which packing drops.
    const __m128i sign = _mm_and_si128(_mm_srai_epi32(_mm_castps_si128(x), 16), _mm_set1_epi32(~0x7FFF));
    return _mm_or_si128(half, sign);
  }
  template <bool kChecked>
  void put(__m128 low, __m128 high, kv_u16* out) {
    if (kChecked) {
      beyond = _mm_or_ps(beyond, _mm_cmpnlt_ps(_mm_andnot_ps(_mm_set1_ps(-0.0f), low), _mm_set1_ps(65520.0f)));
      beyond = _mm_or_ps(beyond, _mm_cmpnlt_ps(_mm_andnot_ps(_mm_set1_ps(-0.0f), high), _mm_set1_ps(65520.0f)));
    }
    _mm_storeu_si128((__m128i*)out, _mm_packs_epi32(bits(low), bits(high)));
  }
  bool overflow() const { return _mm_movemask_ps(beyond) != 0; }
};

inline bool narrow_row_sse2(const float* row, kv_u32 n, kv_u16* out) {
  Narrow128 narrow;
  kv_u32 c = 0;
  for (; c + 8 <= n; c += 8) narrow.put<true>(_mm_loadu_ps(row + c), _mm_loadu_ps(row + c + 4), out + c);
  return narrow_row(row + c, n - c, out + c) || narrow.overflow();
}

// Without kChecked, no value may overflow.
template <bool kChecked>
inline bool narrow_values_sse2(const kv_i32* values, kv_u32 n, float unit, kv_u16* out) {
  Narrow128 narrow;
  const __m128 factor = _mm_set1_ps(unit);
  kv_u32 c = 0;
  for (; c + 8 <= n; c += 8) {
    const __m128 low = _mm_cvtepi32_ps(_mm_loadu_si128((const __m128i*)(values + c)));
    const __m128 high = _mm_cvtepi32_ps(_mm_loadu_si128((const __m128i*)(values + c + 4)));
    narrow.put<kChecked>(_mm_mul_ps(low, factor), _mm_mul_ps(high, factor), out + c);
  }
  return narrow_values(values + c, n - c, unit, out + c) || narrow.overflow();
}

inline void narrow_small_values(const kv_i32* values, kv_u32 n, float unit, kv_u16* out) {
  narrow_values_sse2<false>(values, n, unit, out);
}

inline constexpr Narrow kNarrow{narrow_row_sse2, narrow_values_sse2<true>};

struct Narrow256 {
  __m128i largest;

  KV_AVX2_INLINE void put(__m256 x, kv_u16* out) {
    const __m128i h = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
    largest = _mm_max_epi16(largest, _mm_and_si128(h, _mm_set1_epi16(0x7FFF)));
    _mm_storeu_si128((__m128i*)out, h);
  }
  KV_AVX2_INLINE bool overflow() const {
    return _mm_movemask_epi8(_mm_cmpgt_epi16(largest, _mm_set1_epi16(0x7BFF))) != 0;
  }
};

KV_AVX2 inline bool narrow_row_avx2(const float* row, kv_u32 n, kv_u16* out) {
  Narrow256 narrow{_mm_setzero_si128()};
  kv_u32 c = 0;
  for (; c + 8 <= n; c += 8) narrow.put(_mm256_loadu_ps(row + c), out + c);
  return narrow_row(row + c, n - c, out + c) || narrow.overflow();
}

KV_AVX2 inline bool narrow_values_avx2(const kv_i32* values, kv_u32 n, float unit, kv_u16* out) {
  Narrow256 narrow{_mm_setzero_si128()};
  const __m256 factor = _mm256_set1_ps(unit);
  kv_u32 c = 0;
  for (; c + 8 <= n; c += 8) {
    const __m256 x = _mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i*)(values + c)));
    narrow.put(_mm256_mul_ps(x, factor), out + c);
  }
  return narrow_values(values + c, n - c, unit, out + c) || narrow.overflow();
}

inline constexpr Narrow kNarrowAvx2{narrow_row_avx2, narrow_values_avx2};

struct Narrow512 {
  __m256i largest;

  KV_AVX512_INLINE void put(__m512 x, kv_u16* out) {
    const __m256i h = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    largest = _mm256_max_epi16(largest, _mm256_and_si256(h, _mm256_set1_epi16(0x7FFF)));
    _mm256_storeu_si256((__m256i*)out, h);
  }
  KV_AVX512_INLINE bool overflow() const {
    return _mm256_cmpgt_epi16_mask(largest, _mm256_set1_epi16(0x7BFF)) != 0;
  }
};

KV_AVX512 inline bool narrow_row_avx512(const float* row, kv_u32 n, kv_u16* out) {
  Narrow512 narrow{_mm256_setzero_si256()};
  kv_u32 c = 0;
  for (; c + 16 <= n; c += 16) narrow.put(_mm512_loadu_ps(row + c), out + c);
  return narrow_row(row + c, n - c, out + c) || narrow.overflow();
}

KV_AVX512 inline bool narrow_values_avx512(const kv_i32* values, kv_u32 n, float unit, kv_u16* out) {
  Narrow512 narrow{_mm256_setzero_si256()};
  const __m512 factor = _mm512_set1_ps(unit);
  kv_u32 c = 0;
  for (; c + 16 <= n; c += 16)
    narrow.put(_mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(values + c)), factor), out + c);
  return narrow_values(values + c, n - c, unit, out + c) || narrow.overflow();
}

inline constexpr Narrow kNarrowAvx512{narrow_row_avx512, narrow_values_avx512};
#else
inline void narrow_small_values(const kv_i32* values, kv_u32 n, float unit, kv_u16* out) {
  narrow_values(values, n, unit, out);
}
inline constexpr Narrow kNarrow{narrow_row, narrow_values};
#endif

inline const Narrow& narrow_of(int level) {
#if KV_X86
  if (level == kAvx512) return kNarrowAvx512;
  if (level == kAvx2) return kNarrowAvx2;
#endif
  (void)level;
  return kNarrow;
}

}  // namespace kv
