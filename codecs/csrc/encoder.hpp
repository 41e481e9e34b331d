// Encoder side of TKV1: range encoder, symbol coding, incremental block encoder of the lane layout.
// FORMAT.md section 4. Host only.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "lane.hpp"

namespace kv {

// Range encoder with carry propagation: `low` keeps the carry in bit 32, bytes that a carry may still change
// wait as one cached byte and a count of 0xFF bytes behind it.
class RangeEncoder {
 public:
  void encode(bool one, kv_u32& model) {
    const kv_u32 m = model;
    split(one, model_probability(m));
    model = one ? model_after_one(m) : model_after_zero(m);
  }
  void encode_raw(bool one) { split(one, kOne / 2); }

  // The substream as if coding ended here. The encoder itself can go on.
  std::vector<kv_u8> finished() const {
    RangeEncoder copy = *this;
    for (int i = 0; i < 5; ++i) copy.shift_low();
    std::vector<kv_u8> bytes(copy.bytes_.begin() + 1, copy.bytes_.end());  // the first byte is always 0
    while (!bytes.empty() && bytes.back() == 0) bytes.pop_back();
    return bytes;
  }

 private:
  void split(bool one, kv_u32 probability) {
    const kv_u32 bound = (range_ >> 16) * probability;
    if (one) {
      range_ = bound;
    } else {
      low_ += bound;
      range_ -= bound;
    }
    while (range_ < kTop) {
      range_ <<= 8;
      shift_low();
    }
  }

  void shift_low() {
    if (low_ < 0xFF000000u || low_ > 0xFFFFFFFFu) {
      const kv_u8 carry = (kv_u8)(low_ >> 32);
      bytes_.push_back((kv_u8)(cache_ + carry));
      for (; pending_ > 0; --pending_) bytes_.push_back((kv_u8)(0xFF + carry));
      cache_ = (kv_u8)(low_ >> 24);
    } else {
      ++pending_;
    }
    low_ = (low_ & 0x00FFFFFFu) << 8;
  }

  kv_u64 low_ = 0;
  kv_u32 range_ = 0xFFFFFFFFu;
  kv_u8 cache_ = 0;
  kv_u64 pending_ = 0;
  std::vector<kv_u8> bytes_;
};

inline kv_u32 floor_log2(kv_u32 w) { return 31u - (kv_u32)__builtin_clz(w); }

// |q| < 2^24; the callers check.
inline void encode_residual(RangeEncoder& e, kv_u32* models, kv_i32 q) {
  e.encode(q == 0, models[0]);
  if (q == 0) return;
  e.encode_raw(q < 0);
  const kv_u32 w = (kv_u32)(q < 0 ? -q : q);
  const kv_u32 k = floor_log2(w);
  for (kv_u32 i = 0; i < k; ++i) e.encode(true, models[kUnary + i]);
  e.encode(false, models[kUnary + k]);
  if (k == 0) return;
  e.encode((w >> (k - 1)) & 1, models[kMantissa + k]);
  for (kv_u32 i = k - 1; i-- > 0;) e.encode_raw((w >> i) & 1);
}

// Nearest integer, halves away from zero, exact for |x| < 2^52 (adding 0.5 first is not).
inline kv_i64 round_half_away(double x) {
  const kv_i64 whole = (kv_i64)x;
  const double rest = x - (double)whole;
  return whole + (rest >= 0.5) - (rest <= -0.5);
}

inline void append_varint(std::vector<kv_u8>& out, kv_u64 value) {
  for (; value >= 0x80; value >>= 7) out.push_back((kv_u8)(value | 0x80));
  out.push_back((kv_u8)value);
}

// Measured errors. Squares are summed as integers of (unit / 256)^2, exact in a double up to 2^53: the sum does not
// depend on how tokens were chunked, nor on a restart in between.
struct ErrorSums {
  double max_error = 0;
  double sum_squares = 0;
  kv_u64 n_values = 0;
};
constexpr double kErrorScale = 256.0;

// One block of the lane layout under construction: tokens come in, the payload can be taken at any moment.
class BlockEncoder {
 public:
  struct Geometry {
    kv_u32 heads, head_dim, width;  // width: channels of a lane
    double unit;                    // a float32 value
    kv_u64 sink;
    kv_u32 sink_div;
    kv_u64 first_token;
  };

  // mean, rho and class: one entry per channel, [heads][head_dim].
  BlockEncoder(const Geometry& geometry, const kv_i32* mean, const kv_u8* rho, const kv_u8* cls,
               const kv_u32* prior)
      : g_(geometry), groups_(geometry.head_dim / geometry.width) {
    lanes_.resize((std::size_t)g_.heads * groups_);
    for (kv_u32 l = 0; l < lanes_.size(); ++l) {
      Lane& lane = lanes_[l];
      lane.channels.resize(g_.width);
      lane.states.resize(g_.width);
      int dense[kClasses];
      std::fill(dense, dense + kClasses, -1);
      for (kv_u32 i = 0; i < g_.width; ++i) {
        const kv_u32 in_head = lane_channel(g_.head_dim, g_.width, l % groups_, i);
        const std::size_t j = (std::size_t)(l / groups_) * g_.head_dim + in_head;
        if (dense[cls[j]] < 0) {
          dense[cls[j]] = (int)(lane.models.size() / kClassModels);
          const kv_u32* first = prior + cls[j] * kClassModels;
          lane.models.insert(lane.models.end(), first, first + kClassModels);
        }
        lane.channels[i] = {mean[j], rho[j], (kv_u32)dense[cls[j]], in_head};
        lane.states[i] = {mean[j], (kv_u32)dense[cls[j]] * kClassModels};
      }
    }
  }

  kv_u64 n_tokens() const { return n_tokens_; }
  const Geometry& geometry() const { return g_; }

  // Errors in data units; set_error replaces those of what was pushed so far, for a tail read back from its frame.
  ErrorSums error() const {
    const double scale = g_.unit / kErrorScale;
    return {error_.max_error, error_.sum_squares * (scale * scale), error_.n_values};
  }
  void set_error(const ErrorSums& error) {
    const double scale = g_.unit / kErrorScale;
    error_ = {error.max_error, std::nearbyint(error.sum_squares / (scale * scale)), error.n_values};
  }

  // Append n tokens, x: [heads][n][head_dim] float32, C-contiguous. False: a residual of 2^24 or a value of
  // 2^24 units or more; the encoder is then unusable. Callers check values beforehand (codec.check).
  bool push(const float* x, kv_u64 n) {
    for (kv_u32 l = 0; l < lanes_.size(); ++l) {
      if (!push_lane(lanes_[l], x + (std::size_t)(l / groups_) * n * g_.head_dim, n)) return false;
    }
    n_tokens_ += n;
    return true;
  }

  // Lane entries as FORMAT.md section 4 stores them: varint length and bytes of each lane.
  std::vector<kv_u8> payload() const {
    std::vector<kv_u8> out;
    for (const Lane& lane : lanes_) {
      const std::vector<kv_u8> bytes = lane.coder.finished();
      append_varint(out, bytes.size());
      out.insert(out.end(), bytes.begin(), bytes.end());
    }
    return out;
  }

 private:
  struct Lane {
    RangeEncoder coder;
    std::vector<Channel> channels;
    std::vector<ChannelState> states;
    std::vector<kv_u32> models;
  };

  bool push_lane(Lane& lane, const float* x, kv_u64 n) {
    const float unit = (float)g_.unit;
    const double error_scale = kErrorScale / g_.unit;
    double max_error = error_.max_error, sum_squares = 0;
    for (kv_u64 t = 0; t < n; ++t, x += g_.head_dim) {
      const kv_u64 position = g_.first_token + n_tokens_ + t;
      const kv_i32 scale = position < g_.sink ? 1 : (kv_i32)g_.sink_div;
      for (kv_u32 i = 0; i < g_.width; ++i) {
        const Channel& channel = lane.channels[i];
        ChannelState& state = lane.states[i];
        const kv_i32 prediction = predict(channel, state.previous);
        const double value = x[channel.output];
        const double target = (value / g_.unit - (double)prediction) / (double)scale;
        if (!(std::fabs(target) < (double)(1 << kBits) - 0.5)) return false;
        const kv_i32 q = (kv_i32)round_half_away(target);
        const kv_i64 r = prediction + (kv_i64)q * scale;
        if (r >= kValueLimit || r <= -kValueLimit) return false;
        encode_residual(lane.coder, lane.models.data() + state.context, q);
        state.previous = (kv_i32)r;
        state.context = context_of(channel, q);
        const double e = std::fabs(value - (double)((float)r * unit));
        max_error = e > max_error ? e : max_error;
        const double scaled = (double)(kv_i64)(e * error_scale + 0.5);
        sum_squares += scaled * scaled;
      }
    }
    error_.max_error = max_error;
    error_.sum_squares += sum_squares;
    error_.n_values += n * g_.width;
    return true;
  }

  Geometry g_;
  kv_u32 groups_;
  std::vector<Lane> lanes_;
  kv_u64 n_tokens_ = 0;
  ErrorSums error_;
};

}  // namespace kv
