// Errors of decoded values, for the encoders of codecs without a step.
#pragma once

#include <cmath>

#include "simd.hpp"

namespace kv {

// Largest difference and sum of squared ones, in an order of adding that depends on nothing.
KV_CLONES static void measure(const float* __restrict x, const float* __restrict y, kv_u64 n, double& largest,
                              double& sum_squares) {
  double most[8] = {}, sums[8] = {};
  kv_u64 i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int j = 0; j < 8; ++j) {
      const double d = std::fabs((double)x[i + j] - (double)y[i + j]);
      most[j] = d > most[j] ? d : most[j];
      sums[j] += d * d;
    }
  }
  for (; i < n; ++i) {
    const double d = std::fabs((double)x[i] - (double)y[i]);
    most[i % 8] = d > most[i % 8] ? d : most[i % 8];
    sums[i % 8] += d * d;
  }
  largest = sum_squares = 0;
  for (int j = 0; j < 8; ++j) {
    largest = most[j] > largest ? most[j] : largest;
    sum_squares += sums[j];
  }
}

}  // namespace kv
