// The quantiser that TKV1's lane layout and KVR1 share: closed-loop integer prediction of every channel, and the
// errors measured on the way. FORMAT.md section 4.5. Host only.
#pragma once

#include <cmath>

#include "error_sums.hpp"
#include "lane.hpp"
#include "simd.hpp"

namespace kv {

// Squares are summed as integers of (unit / 256)^2, exact in a double up to 2^53: the sum does not depend on the order
// of adding: not on chunks, nor threads, nor a restart in between.
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

// `tokens` rows of x, `stride` values apart, into rows of residuals `residual_stride` apart. Positions below `sink` are
// quantised at the unit, the others sink_div times coarser.
KV_CLONES static bool quantise_rows(kv_u64 tokens, kv_u32 n, const float* x, kv_u64 stride, const QuantiserRow& row,
                                    double unit, kv_u64 first_token, kv_u64 sink, kv_u32 sink_div,
                                    kv_i32* residuals, kv_u64 residual_stride) {
  bool fine = true;
  const bool power_of_two = (sink_div & (sink_div - 1)) == 0;
  for (kv_u64 t = 0; t < tokens; ++t, x += stride, residuals += residual_stride) {
    const double scale = first_token + t < sink ? 1.0 : (double)sink_div;
    fine &= power_of_two ? quantise_channels<true>(n, x, row, unit, scale, residuals)
                         : quantise_channels<false>(n, x, row, unit, scale, residuals);
  }
  return fine;
}

}  // namespace kv
