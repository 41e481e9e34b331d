// Stream statistics of TKV1: channel mean, AR(1) coefficient, spread class. FORMAT.md section 3.2.
#pragma once

#include <algorithm>

#include "encoder.hpp"

namespace kv {

// Two passes over the same tokens: add_mean for every chunk, then add_moments for every chunk. Sums run token by
// token in order, so the result does not depend on the chunking.
class Statistics {
 public:
  Statistics(kv_u32 heads, kv_u32 head_dim)
      : heads_(heads), head_dim_(head_dim), mean_((std::size_t)heads * head_dim), sum_squares_(heads) {}

  // x: [heads][n][head_dim]
  template <class T>
  void add_mean(const T* x, kv_u64 n) {
    for (kv_u32 h = 0; h < heads_; ++h) {
      double* mean = mean_.data() + (std::size_t)h * head_dim_;
      for (kv_u64 t = 0; t < n; ++t, x += head_dim_) {
        double squares = 0;
        for (kv_u32 c = 0; c < head_dim_; ++c) {
          mean[c] += (double)x[c];
          squares += (double)x[c] * (double)x[c];
          largest_ = std::max(largest_, std::fabs((double)x[c]));
        }
        sum_squares_[h] += squares;
      }
    }
    n_tokens_ += n;
  }

  void finish_mean() {
    for (double& m : mean_) m /= (double)std::max<kv_u64>(n_tokens_, 1);
    variance_.assign(mean_.size(), 0.0);
    covariance_.assign(mean_.size(), 0.0);
    previous_.assign(mean_.size(), 0.0);
    started_ = false;
  }

  template <class T>
  void add_moments(const T* x, kv_u64 n) {
    if (n == 0) return;
    for (kv_u32 h = 0; h < heads_; ++h) {
      const std::size_t base = (std::size_t)h * head_dim_;
      for (kv_u64 t = 0; t < n; ++t, x += head_dim_) {
        const bool first = !started_ && t == 0;
        for (kv_u32 c = 0; c < head_dim_; ++c) {
          const double r = (double)x[c] - mean_[base + c];
          variance_[base + c] += r * r;
          if (!first) covariance_[base + c] += r * previous_[base + c];
          previous_[base + c] = r;
        }
      }
    }
    started_ = true;
  }

  double sum_squares() const {
    double sum = 0;
    for (double s : sum_squares_) sum += s;
    return sum;
  }
  kv_u64 n_tokens() const { return n_tokens_; }
  double largest() const { return largest_; }
  kv_u32 heads() const { return heads_; }
  kv_u32 head_dim() const { return head_dim_; }
  // Which of the two passes may come next.
  bool has_mean() const { return !variance_.empty(); }

  // mean in multiples of `mean_unit`, AR coefficient in sixteenths, class of the residual's spread in steps.
  // `pairs`: channels (c, c + head_dim/2) share their class, as the two halves of a RoPE pair do.
  void finish(double step, double mean_unit, bool ar, bool pairs, kv_i64* mean, kv_u8* rho, kv_u8* cls) const {
    const std::size_t n_channels = mean_.size();
    const double n = (double)std::max<kv_u64>(n_tokens_, 1);
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
      const double k = std::round(4.0 * std::log2(spread)) + 8.0;
      cls[j] = (kv_u8)std::min(std::max(k, 0.0), (double)kClasses - 1.0);
    }
  }

 private:
  kv_u32 heads_, head_dim_;
  kv_u64 n_tokens_ = 0;
  double largest_ = 0;
  bool started_ = false;
  std::vector<double> mean_, sum_squares_, variance_, covariance_, previous_;
};

}  // namespace kv
