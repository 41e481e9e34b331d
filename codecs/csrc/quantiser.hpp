// The quantiser that TKV1's lane layout and KVR1 share: closed-loop integer prediction of every channel, and the
// errors measured on the way. FORMAT.md section 4.5. Host only.
#pragma once

#include <cmath>

#include "lane.hpp"
#include "simd.hpp"

namespace kv {

// Measured errors. Squares are summed as integers of (unit / 256)^2, exact in a double up to 2^53: the sum does not
// depend on the order of adding: not on chunks, nor threads, nor a restart in between.
struct ErrorSums {
  double max_error = 0;
  double sum_squares = 0;
  kv_u64 n_values = 0;

  void add(const ErrorSums& other) {
    max_error = other.max_error > max_error ? other.max_error : max_error;
    sum_squares += other.sum_squares;
    n_values += other.n_values;
  }
};
constexpr double kErrorScale = 256.0;
constexpr double kRounder = 6755399441055744.0;  // 1.5 * 2^52: adding and subtracting it rounds to an integer

// Between the sums of an encoder, in (unit / 256)^2, and those of a frame, in data units.
inline ErrorSums to_data_units(const ErrorSums& sums, double unit) {
  const double scale = unit / kErrorScale;
  return {sums.max_error, sums.sum_squares * (scale * scale), sums.n_values};
}
inline ErrorSums from_data_units(const ErrorSums& sums, double unit) {
  const double scale = unit / kErrorScale;
  return {sums.max_error, std::nearbyint(sums.sum_squares / (scale * scale)), sums.n_values};
}

// The number below 0.5. Added before truncating it rounds to nearest, halves away from zero, exactly; 0.5 does not.
constexpr double kBelowHalf = 0.5 - 1.0 / (1ull << 54);

// What quantising one row of channels reads and writes: one entry per channel.
struct QuantiserRow {
  const kv_i32* mean;
  const kv_i32* rho;
  kv_i32* previous;
  double* max_error;
  double* sum_squares;
};

// Residuals, reconstructions (into `previous`) and errors of one row. False: a residual of 2^24 or a value of 2^24 units
// or more. `scale` is an integer. A plain loop over arrays, so that compilers vectorise it.
template <bool kPowerOfTwo>
inline __attribute__((always_inline)) bool quantise_channels(kv_u32 n, const float* __restrict x,
                                                             const QuantiserRow& row, double unit, double scale,
                                                             kv_i32* __restrict residuals) {
  const kv_i32* __restrict mean = row.mean;
  const kv_i32* __restrict rho = row.rho;
  kv_i32* __restrict previous = row.previous;
  double* __restrict max_error = row.max_error;
  double* __restrict sum_squares = row.sum_squares;
  const float unit32 = (float)unit;
  const double error_scale = kErrorScale / unit;
  const double inverse = 1.0 / scale;  // exact for a power of two, and then as good as the division
  kv_i32 faults = 0;
  for (kv_u32 i = 0; i < n; ++i) {
    const double value = x[i];
    const kv_i32 prediction = mean[i] + ((rho[i] * (previous[i] - mean[i])) >> 4);
    const double distance = value / unit - (double)prediction;
    const double target = kPowerOfTwo ? distance * inverse : distance / scale;
    const bool in_range = std::fabs(target) < (double)kValueLimit - 0.5;  // false for NaN
    const double bounded = in_range ? target : 0.0;
    const kv_i32 q = (kv_i32)(bounded + std::copysign(kBelowHalf, bounded));
    const double exact = (double)prediction + (double)q * scale;
    const bool representable = std::fabs(exact) < (double)kValueLimit;
    faults |= (kv_i32)!(in_range & representable);
    const kv_i32 r = representable ? (kv_i32)exact : 0;
    residuals[i] = q;
    previous[i] = r;
    const double error = std::fabs(value - (double)((float)r * unit32));
    const double scaled = (error * error_scale + kRounder) - kRounder;
    max_error[i] = error > max_error[i] ? error : max_error[i];
    sum_squares[i] += scaled * scaled;
  }
  return faults == 0;
}

KV_CLONES static bool quantise_row_plain(kv_u32 n, const float* x, const QuantiserRow& row, double unit, double scale,
                                         bool power_of_two, kv_i32* residuals) {
  return power_of_two ? quantise_channels<true>(n, x, row, unit, scale, residuals)
                      : quantise_channels<false>(n, x, row, unit, scale, residuals);
}

#if KV_X86
// quantise_channels<true> of 16 channels at once; the same values bit for bit.
constexpr kv_u32 kMaxWideScale = 1u << 16;  // a distance below 2^26 is less than 2^31 after rounding it to steps

struct Quantiser512 {
  __m512d unit, inverse_unit, inverse_scale, error_scale;
  __m512 unit32;
  __m512i scale;

  // Residuals of eight channels. Multiplying by the inverse of the unit is off by less than 2^-28 units, which matters
  // next to a half only: there the division decides.
  KV_AVX512_INLINE __m256i residuals(__m512d x, __m512d predicted, __mmask8& fine) const {
    __m512d distance = _mm512_sub_pd(_mm512_mul_pd(x, inverse_unit), predicted);
    __m512d target = _mm512_mul_pd(distance, inverse_scale);
    __m256i q = nearest(target);
    const __m512d off = _mm512_abs_pd(_mm512_sub_pd(target, _mm512_cvtepi32_pd(q)));
    if (KV_UNLIKELY(_mm512_cmp_pd_mask(off, _mm512_set1_pd(0.5 - 1.0 / (1 << 20)), _CMP_NLE_UQ))) {
      distance = _mm512_sub_pd(_mm512_div_pd(x, unit), predicted);
      target = _mm512_mul_pd(distance, inverse_scale);
      q = nearest(target);
    }
    fine &= _mm512_cmp_pd_mask(_mm512_abs_pd(distance), _mm512_set1_pd(4.0 * kValueLimit), _CMP_LT_OQ);
    return q;
  }

  KV_AVX512_INLINE static __m256i nearest(__m512d target) {
    const __m512i sign = _mm512_set1_epi64((long long)(1ull << 63));
    const __m512i half = _mm512_castpd_si512(_mm512_set1_pd(kBelowHalf));
    const __m512i signed_half = _mm512_ternarylogic_epi64(half, _mm512_castpd_si512(target), sign, 0xF8);  // h | t & s
    return _mm512_cvttpd_epi32(_mm512_add_pd(target, _mm512_castsi512_pd(signed_half)));
  }

  KV_AVX512_INLINE void measure(__m512d x, __m256 decoded, double* max_error, double* sum_squares) const {
    const __m512d error = _mm512_abs_pd(_mm512_sub_pd(x, _mm512_cvtps_pd(decoded)));
    _mm512_storeu_pd(max_error, _mm512_max_pd(error, _mm512_loadu_pd(max_error)));
    const __m512d rounder = _mm512_set1_pd(kRounder);
    const __m512d scaled = _mm512_sub_pd(_mm512_add_pd(_mm512_mul_pd(error, error_scale), rounder), rounder);
    _mm512_storeu_pd(sum_squares, _mm512_add_pd(_mm512_loadu_pd(sum_squares), _mm512_mul_pd(scaled, scaled)));
  }
};

KV_AVX512 inline bool quantise_row_avx512(kv_u32 n, const float* x, const QuantiserRow& row, double unit, double scale,
                                          kv_i32* residuals) {
  const Quantiser512 k{_mm512_set1_pd(unit), _mm512_set1_pd(1.0 / unit), _mm512_set1_pd(1.0 / scale),
                       _mm512_set1_pd(kErrorScale / unit), _mm512_set1_ps((float)unit),
                       _mm512_set1_epi32((kv_i32)scale)};
  __mmask8 fine = 0xFF;
  __m512i bits = _mm512_setzero_si512();  // of all magnitudes: 2^24 is a power of two
  kv_u32 i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m512i mean = _mm512_loadu_si512(row.mean + i), before = _mm512_loadu_si512(row.previous + i);
    const __m512i pull = _mm512_mullo_epi32(_mm512_loadu_si512(row.rho + i), _mm512_sub_epi32(before, mean));
    const __m512i prediction = _mm512_add_epi32(mean, _mm512_srai_epi32(pull, 4));
    const __m512d x0 = _mm512_cvtps_pd(_mm256_loadu_ps(x + i)), x1 = _mm512_cvtps_pd(_mm256_loadu_ps(x + i + 8));
    const __m256i q0 = k.residuals(x0, _mm512_cvtepi32_pd(_mm512_castsi512_si256(prediction)), fine);
    const __m256i q1 = k.residuals(x1, _mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(prediction, 1)), fine);
    const __m512i q = _mm512_inserti64x4(_mm512_castsi256_si512(q0), q1, 1);
    const __m512i value = _mm512_add_epi32(prediction, _mm512_mullo_epi32(q, k.scale));
    bits = _mm512_or_si512(bits, _mm512_or_si512(_mm512_abs_epi32(q), _mm512_abs_epi32(value)));
    _mm512_storeu_si512(residuals + i, q);
    _mm512_storeu_si512(row.previous + i, value);
    const __m512 decoded = _mm512_mul_ps(_mm512_cvtepi32_ps(value), k.unit32);
    k.measure(x0, _mm512_castps512_ps256(decoded), row.max_error + i, row.sum_squares + i);
    k.measure(x1, _mm512_extractf32x8_ps(decoded, 1), row.max_error + i + 8, row.sum_squares + i + 8);
  }
  const bool within = fine == 0xFF && _mm512_test_epi32_mask(bits, _mm512_set1_epi32(-kValueLimit)) == 0;
  const QuantiserRow rest{row.mean + i, row.rho + i, row.previous + i, row.max_error + i, row.sum_squares + i};
  return quantise_channels<true>(n - i, x + i, rest, unit, scale, residuals + i) && within;
}
#endif

// `tokens` rows of x, `stride` values apart, into rows of residuals `residual_stride` apart. Positions below `sink` are
// quantised at the unit, the others sink_div times coarser.
inline bool quantise_rows(kv_u64 tokens, kv_u32 n, const float* x, kv_u64 stride, const QuantiserRow& row, double unit,
                          kv_u64 first_token, kv_u64 sink, kv_u32 sink_div, kv_i32* residuals,
                          kv_u64 residual_stride) {
  bool fine = true;
  const bool power_of_two = (sink_div & (sink_div - 1)) == 0;
#if KV_X86
  static const bool wide = avx512_supported();
#endif
  for (kv_u64 t = 0; t < tokens; ++t, x += stride, residuals += residual_stride) {
    const double scale = first_token + t < sink ? 1.0 : (double)sink_div;
#if KV_X86
    if (wide && power_of_two && sink_div <= kMaxWideScale) {
      fine &= quantise_row_avx512(n, x, row, unit, scale, residuals);
      continue;
    }
#endif
    fine &= quantise_row_plain(n, x, row, unit, scale, power_of_two, residuals);
  }
  return fine;
}

}  // namespace kv
