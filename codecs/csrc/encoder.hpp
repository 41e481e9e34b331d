// Encoder side of TKV1: range encoder, symbol coding, incremental block encoder of the lane layout.
// FORMAT.md section 4. Host only.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "cursor.hpp"
#include "lane.hpp"
#include "quantiser.hpp"
#include "threads.hpp"

namespace kv {

// The coder's state while it runs: `low` and `range` in registers, bytes straight into reserved memory.
struct RangeCursor {
  kv_u32 low;
  kv_u32 range;
  kv_u8* next;

  void encode(bool one, kv_u32& model) {
    const kv_u32 m = model;
    split(one, model_probability(m));
    model = one ? model_after_one(m) : model_after_zero(m);
  }
  void encode_raw(bool one) { split(one, kOne / 2); }

 private:
  void split(bool one, kv_u32 probability) {
    const kv_u32 bound = (range >> 16) * probability;
    if (one) {
      range = bound;
    } else {
      range -= bound;
      low += bound;
      if (KV_UNLIKELY(low < bound)) carry();
    }
    while (KV_UNLIKELY(range < kTop)) {
      *next++ = (kv_u8)(low >> 24);
      low <<= 8;
      range <<= 8;
    }
  }
  // The code value stays below 1, so a byte below 0xFF always stands before the ones it turns over.
  void carry() {
    kv_u8* byte = next;
    while (++*--byte == 0) {
    }
  }
};

// Range encoder of one substream. It writes what an encoder with a cached byte (as in LZMA) writes, without that
// encoder's constant first byte: carries go into the bytes already written instead of waiting for them.
class RangeEncoder {
 public:
  // Run with room for `n_bytes` more; `resume` keeps the result.
  RangeCursor run(std::size_t n_bytes) {
    if (bytes_.size() - size_ < n_bytes) bytes_.resize(size_ + std::max(n_bytes, bytes_.size() / 2));
    return {low_, range_, bytes_.data() + size_};
  }
  void resume(const RangeCursor& cursor) {
    low_ = cursor.low;
    range_ = cursor.range;
    size_ = (std::size_t)(cursor.next - bytes_.data());
  }

  // The substream as if coding ended here, trailing zeros trimmed. The encoder itself can go on.
  std::vector<kv_u8> finished() const {
    std::vector<kv_u8> bytes(bytes_.begin(), bytes_.begin() + (std::ptrdiff_t)size_);
    for (int shift = 24; shift >= 0; shift -= 8) bytes.push_back((kv_u8)(low_ >> shift));
    while (!bytes.empty() && bytes.back() == 0) bytes.pop_back();
    return bytes;
  }

 private:
  kv_u32 low_ = 0;
  kv_u32 range_ = 0xFFFFFFFFu;
  std::vector<kv_u8> bytes_;
  std::size_t size_ = 0;
};

// No residual takes more: 26 modelled bits of 11 each (the least probability is above 2^-11) and 23 raw ones.
constexpr std::size_t kMaxResidualBytes = 48;

inline kv_u32 floor_log2(kv_u32 w) { return 31u - (kv_u32)__builtin_clz(w); }

// |q| < 2^24; the callers check.
inline void encode_residual(RangeCursor& e, kv_u32* models, kv_i32 q) {
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
      for (auto* table : {&lane.mean, &lane.rho, &lane.previous}) table->resize(g_.width);
      lane.context.resize(g_.width);
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
        lane.mean[i] = lane.previous[i] = mean[j];
        lane.rho[i] = rho[j];
        lane.context[i] = (kv_u32)dense[cls[j]] * kClassModels;
      }
    }
  }

  kv_u64 n_tokens() const { return n_tokens_; }
  const Geometry& geometry() const { return g_; }

  // Errors in data units; set_error replaces those of what was pushed so far, for a tail read back from its frame.
  ErrorSums error() const { return to_data_units(error_, g_.unit); }
  void set_error(const ErrorSums& error) { error_ = from_data_units(error, g_.unit); }

  // Append n tokens, x: [heads][n][head_dim] float32, C-contiguous, lanes side by side on n_threads threads. False: a
  // residual of 2^24 or a value of 2^24 units or more, or no memory; the encoder is then unusable. Callers check
  // values beforehand (codec.check).
  bool push(const float* x, kv_u64 n, unsigned n_threads) {
    std::vector<ErrorSums> sums(lanes_.size());
    std::atomic<bool> fine{true};
    const bool in_memory = run_pieces<Row>(lanes_.size(), n_threads, [&](std::size_t l, Row& row) {
      if (!push_lane(lanes_[l], x + l / groups_ * n * g_.head_dim, n, row, sums[l])) fine = false;
    });
    for (const ErrorSums& lane : sums) error_.add(lane);
    n_tokens_ += n;
    return fine && in_memory;
  }

  // Lane entries as FORMAT.md section 4.7 stores them: varint length and bytes of each lane.
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
    std::vector<kv_i32> mean, rho, previous;  // of each channel, apart so that the quantiser vectorises
    std::vector<kv_u32> context;
    std::vector<kv_u32> models;
  };

  struct Row {
    std::vector<float> values;
    std::vector<kv_i32> residuals;
    std::vector<double> max_error, sum_squares;
  };

  // Row by row: first every prediction, residual and reconstruction, then the coding. The two loops have nothing in
  // common but the row's residuals, and the first runs at the speed of its divisions.
  bool push_lane(Lane& lane, const float* x, kv_u64 n, Row& row, ErrorSums& sums) {
    const std::size_t row_bytes = (std::size_t)g_.width * kMaxResidualBytes;
    row.values.resize(g_.width);
    row.residuals.resize(g_.width);
    row.max_error.assign(g_.width, 0.0);
    row.sum_squares.assign(g_.width, 0.0);
    for (kv_u64 t = 0; t < n; ++t, x += g_.head_dim) {
      if (!quantise(lane, x, g_.first_token + n_tokens_ + t, row)) return false;
      RangeCursor coder = lane.coder.run(row_bytes);
      kv_u32* models = lane.models.data();
      for (kv_u32 i = 0; i < g_.width; ++i) {
        encode_residual(coder, models + lane.context[i], row.residuals[i]);
        lane.context[i] = context_of(lane.channels[i], row.residuals[i]);
      }
      lane.coder.resume(coder);
    }
    for (kv_u32 i = 0; i < g_.width; ++i) sums.add({row.max_error[i], row.sum_squares[i], n});
    return true;
  }

  bool quantise(Lane& lane, const float* x, kv_u64 position, Row& row) const {
    for (kv_u32 i = 0; i < g_.width; ++i) row.values[i] = x[lane.channels[i].output];
    const QuantiserRow channels{lane.mean.data(), lane.rho.data(), lane.previous.data(), row.max_error.data(),
                                row.sum_squares.data()};
    return quantise_rows(1, g_.width, row.values.data(), 0, channels, g_.unit, position, g_.sink, g_.sink_div,
                         row.residuals.data(), 0);
  }

  Geometry g_;
  kv_u32 groups_;
  std::vector<Lane> lanes_;
  kv_u64 n_tokens_ = 0;
  ErrorSums error_;
};

}  // namespace kv
