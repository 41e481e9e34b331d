// Stream layout of TKV1: float64 closed loop, one substream per block, RoPE undone from a theta.
// FORMAT.md section 5. It lives in `.tkv` files only; archives use the lane layout.
#pragma once

#include "encoder.hpp"

namespace kv {

// Nearest integer, halves away from zero, exact for |x| < 2^52 (adding 0.5 first is not).
inline kv_i64 round_half_away(double x) {
  const kv_i64 whole = (kv_i64)x;
  const double rest = x - (double)whole;
  return whole + (rest >= 0.5) - (rest <= -0.5);
}

struct StreamParams {
  kv_u32 heads, head_dim;
  double step;
  kv_u64 sink;
  kv_u32 sink_div;
  const kv_i64* mean;  // in steps
  const kv_u8* rho;
  const kv_u8* cls;

  kv_u64 channels() const { return (kv_u64)heads * head_dim; }
  double scale(kv_u64 position) const { return position < sink ? 1.0 / (double)sink_div : 1.0; }
};

// Rotate (sign = 1) or un-rotate (sign = -1) pairs (i, i + head_dim/2) of y: [heads][n][head_dim], in place.
inline void rotate_theta(double* y, kv_u32 heads, kv_u64 n, kv_u32 head_dim, double theta, kv_u64 first_token,
                         double sign) {
  const kv_u32 half = head_dim / 2;
  for (kv_u32 i = 0; i < half; ++i) {
    const double divisor = std::pow(theta, 2.0 * (double)i / (double)head_dim);
    for (kv_u64 t = 0; t < n; ++t) {
      const double angle = (double)(first_token + t) / divisor;
      const double s = sign * std::sin(angle), c = std::cos(angle);
      for (kv_u32 h = 0; h < heads; ++h) {
        double* row = y + ((kv_u64)h * n + t) * head_dim;
        const double a = row[i], b = row[half + i];
        row[i] = a * c - b * s;
        row[half + i] = b * c + a * s;
      }
    }
  }
}

// Prediction state of one block: encoder and decoder run the same arithmetic.
class StreamBlock {
 public:
  StreamBlock(const StreamParams& p, const kv_u32* prior) : p_(p) {
    previous_.resize(p.channels());
    context_.resize(p.channels());
    models_.reserve((std::size_t)p.heads * kPriorWords);
    for (kv_u32 h = 0; h < p.heads; ++h) models_.insert(models_.end(), prior, prior + kPriorWords);
    for (kv_u64 j = 0; j < p.channels(); ++j) {
      previous_[j] = mean(j);
      context_[j] = context(j, 0);
    }
  }

  double predict(kv_u64 j, bool first) const {
    const double m = mean(j);
    return first ? m : m + p_.rho[j] / 16.0 * (previous_[j] - m);
  }
  kv_u32* models(kv_u64 j) { return models_.data() + context_[j]; }
  void update(kv_u64 j, double value, kv_i32 q) {
    previous_[j] = value;
    context_[j] = context(j, q);
  }

 private:
  double mean(kv_u64 j) const { return (double)p_.mean[j] * p_.step; }
  std::size_t context(kv_u64 j, kv_i32 q) const {
    const kv_u32 magnitude = (kv_u32)(q < 0 ? -q : q);
    return (j / p_.head_dim) * kPriorWords + (std::size_t)p_.cls[j] * kClassModels +
           (magnitude < 2 ? magnitude : 2) * kContextModels;
  }

  StreamParams p_;
  std::vector<double> previous_;
  std::vector<std::size_t> context_;
  std::vector<kv_u32> models_;
};

// Encode y: [heads][n][head_dim] of the coded domain, rows `stride` tokens long per head. False: a residual of
// 2^24 or more, or one that is not a number.
inline bool encode_stream_block(const StreamParams& p, const kv_u32* prior, const double* y, kv_u64 stride,
                                kv_u64 first_token, kv_u64 n, std::vector<kv_u8>& out) {
  StreamBlock block(p, prior);
  RangeEncoder coder;
  for (kv_u64 t = 0; t < n; ++t) {
    const double step = p.step * p.scale(first_token + t);
    RangeCursor cursor = coder.run(p.channels() * kMaxResidualBytes);
    for (kv_u64 j = 0; j < p.channels(); ++j) {
      const double value = y[(j / p.head_dim * stride + t) * p.head_dim + j % p.head_dim];
      const double prediction = block.predict(j, t == 0);
      const double target = (value - prediction) / step;
      if (!(std::fabs(target) < (double)(1 << kBits) - 0.5)) return false;
      const kv_i32 q = (kv_i32)round_half_away(target);
      encode_residual(cursor, block.models(j), q);
      block.update(j, prediction + (double)q * step, q);
    }
    coder.resume(cursor);
  }
  out = coder.finished();
  return true;
}

// Decode into y: [heads][n][head_dim], rows `stride` tokens long per head.
inline Status decode_stream_block(const StreamParams& p, const kv_u32* prior, const kv_u8* bytes,
                                  kv_u64 n_bytes, kv_u64 first_token, kv_u64 n, kv_u64 stride, double* y) {
  StreamBlock block(p, prior);
  RangeDecoder coder;
  coder.start(bytes, n_bytes);
  for (kv_u64 t = 0; t < n; ++t) {
    const double step = p.step * p.scale(first_token + t);
    for (kv_u64 j = 0; j < p.channels(); ++j) {
      kv_i32 q;
      const double prediction = block.predict(j, t == 0);
      if (!decode_residual(coder, block.models(j), q)) return kBadResidual;
      const double value = prediction + (double)q * step;
      y[(j / p.head_dim * stride + t) * p.head_dim + j % p.head_dim] = value;
      block.update(j, value, q);
    }
  }
  return kOk;
}

}  // namespace kv
