// Stream statistics: channel mean, AR(1) coefficient, spread class. FORMAT.md section 3.2.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "lane.hpp"
#include "simd.hpp"

namespace kv {

// Successive rows of each pass, channel by channel: plain loops over arrays, so that compilers vectorise them.
template <class T>
inline __attribute__((always_inline)) void mean_rows(kv_u64 tokens, kv_u32 n, const T* x, double* __restrict mean,
                                                     double* __restrict squares, double* __restrict largest) {
  for (kv_u64 t = 0; t < tokens; ++t, x += n) {
    for (kv_u32 c = 0; c < n; ++c) {
      const double value = (double)x[c], magnitude = std::fabs(value);
      mean[c] += value;
      squares[c] += value * value;
      largest[c] = magnitude > largest[c] ? magnitude : largest[c];
    }
  }
}

template <class T>
inline __attribute__((always_inline)) void moments_rows(kv_u64 tokens, kv_u32 n, const T* x,
                                                        const double* __restrict mean, double* __restrict variance,
                                                        double* __restrict covariance, double* __restrict previous) {
  for (kv_u64 t = 0; t < tokens; ++t, x += n) {
    for (kv_u32 c = 0; c < n; ++c) {
      const double r = (double)x[c] - mean[c];
      variance[c] += r * r;
      covariance[c] += r * previous[c];
      previous[c] = r;
    }
  }
}

KV_CLONES static void add_mean_rows(kv_u64 tokens, kv_u32 n, const float* x, double* mean, double* squares,
                                    double* largest) {
  mean_rows(tokens, n, x, mean, squares, largest);
}
static void add_mean_rows(kv_u64 tokens, kv_u32 n, const double* x, double* mean, double* squares, double* largest) {
  mean_rows(tokens, n, x, mean, squares, largest);
}
KV_CLONES static void add_moments_rows(kv_u64 tokens, kv_u32 n, const float* x, const double* mean, double* variance,
                                       double* covariance, double* previous) {
  moments_rows(tokens, n, x, mean, variance, covariance, previous);
}
static void add_moments_rows(kv_u64 tokens, kv_u32 n, const double* x, const double* mean, double* variance,
                             double* covariance, double* previous) {
  moments_rows(tokens, n, x, mean, variance, covariance, previous);
}

// Two passes over the same tokens: add_mean for every chunk, then add_moments for every chunk. Sums run token by
// token in order, so the result does not depend on the chunking.
class Statistics {
 public:
  // The first `left_out` tokens count for sum_squares and largest only.
  Statistics(kv_u32 heads, kv_u32 head_dim, kv_u64 left_out)
      : heads_(heads), head_dim_(head_dim), left_out_(left_out), unused_(head_dim) {
    for (auto* table : {&mean_, &squares_, &largest_}) table->resize((std::size_t)heads * head_dim);
  }

  // x: [heads][n][head_dim]
  template <class T>
  void add_mean(const T* x, kv_u64 n) {
    const kv_u64 skip = skipped(n_tokens_, n);
    for (kv_u32 h = 0; h < heads_; ++h) {
      const std::size_t base = (std::size_t)h * head_dim_;
      const T* rows = x + h * n * head_dim_;
      add_mean_rows(skip, head_dim_, rows, unused_.data(), &squares_[base], &largest_[base]);
      add_mean_rows(n - skip, head_dim_, rows + skip * head_dim_, &mean_[base], &squares_[base], &largest_[base]);
    }
    n_tokens_ += n;
  }

  void finish_mean() {
    for (double& m : mean_) m /= n_counted();
    variance_.assign(mean_.size(), 0.0);
    covariance_.assign(mean_.size(), 0.0);
    previous_.assign(mean_.size(), 0.0);  // of the first token: its product then adds nothing
  }

  template <class T>
  void add_moments(const T* x, kv_u64 n) {
    const kv_u64 skip = skipped(n_moments_, n);
    for (kv_u32 h = 0; h < heads_; ++h) {
      const std::size_t base = (std::size_t)h * head_dim_;
      add_moments_rows(n - skip, head_dim_, x + (h * n + skip) * head_dim_, &mean_[base], &variance_[base],
                       &covariance_[base], &previous_[base]);
    }
    n_moments_ += n;
  }

  double sum_squares() const {
    double sum = 0;
    for (double s : squares_) sum += s;
    return sum;
  }
  kv_u64 n_tokens() const { return n_tokens_; }
  double largest() const { return *std::max_element(largest_.begin(), largest_.end()); }
  kv_u32 heads() const { return heads_; }
  kv_u32 head_dim() const { return head_dim_; }
  // Which of the two passes may come next.
  bool has_mean() const { return !variance_.empty(); }

  // mean in multiples of `mean_unit`, AR coefficient in sixteenths, class of the residual's spread in steps: quarters of
  // an octave from `class_of_one`, below n_classes.
  // `pairs`: channels (c, c + head_dim/2) share their class, as the two halves of a RoPE pair do.
  void finish(double step, double mean_unit, bool ar, bool pairs, int class_of_one, int n_classes, kv_i64* mean,
              kv_u8* rho, kv_u8* cls) const {
    const std::size_t n_channels = mean_.size();
    const double n = n_counted();
    std::vector<double> residual(n_channels);
    for (std::size_t j = 0; j < n_channels; ++j) {
      const double a = ar && variance_[j] > 0.0 ? covariance_[j] / variance_[j] : 0.0;
      const double sixteenths = std::min(std::max(std::round(a * 16.0), 0.0), 15.0);
      rho[j] = (kv_u8)sixteenths;
      const double used = sixteenths / 16.0;
      residual[j] = variance_[j] / n * std::max(1.0 - used * used, 0.05);
      mean[j] = (kv_i64)std::round(mean_[j] / mean_unit);
    }
    for (std::size_t j = 0; j < n_channels; ++j) {
      const std::size_t c = j % head_dim_;
      const std::size_t pair = j - c + (c + head_dim_ / 2) % head_dim_;
      const double v = pairs ? 0.5 * (residual[j] + residual[pair]) : residual[j];
      const double spread = std::max(std::sqrt(v) / step, 1e-9);
      const double k = std::round(4.0 * std::log2(spread)) + (double)class_of_one;
      cls[j] = (kv_u8)std::min(std::max(k, 0.0), (double)(n_classes - 1));
    }
  }

 private:
  // Of n tokens after `before` others, how many are left out.
  kv_u64 skipped(kv_u64 before, kv_u64 n) const { return before >= left_out_ ? 0 : std::min(left_out_ - before, n); }
  double n_counted() const { return (double)std::max<kv_u64>(n_tokens_ - std::min(n_tokens_, left_out_), 1); }

  kv_u32 heads_, head_dim_;
  kv_u64 left_out_;
  kv_u64 n_tokens_ = 0, n_moments_ = 0;
  std::vector<double> unused_;
  std::vector<double> mean_, squares_, largest_, variance_, covariance_, previous_;  // of each channel
};

}  // namespace kv
