// Encoder of KVR1: quantises token by token as they come, codes the block backwards when the payload is asked for.
// FORMAT.md section 9. Host only.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "../aligned.hpp"
#include "../quantiser.hpp"
#include "../threads.hpp"
#include "coder.hpp"

namespace kv::kvr1 {

// One block under construction: tokens come in, the payload can be taken at any moment.
class BlockEncoder {
 public:
  struct Geometry {
    kv_u32 heads, head_dim;
    double unit;  // a float32 value
    kv_u64 sink;
    kv_u32 sink_div;
    kv_u32 sink_classes;
    kv_u64 first_token;
    bool wide;    // code with AVX-512, which gives the same
  };

  // mean, rho and class: one entry per channel, [heads][head_dim]. `tables` must outlive the encoder.
  BlockEncoder(const Geometry& geometry, const kv_i32* mean, const kv_u8* rho, const kv_u8* cls, const Tables& tables)
      : g_(geometry),
        tables_(&tables),
        steps_((g_.heads * g_.head_dim + kStates - 1) / kStates),
        last_lanes_(g_.heads * g_.head_dim - (steps_ - 1) * kStates) {
    const kv_u32 n = g_.heads * g_.head_dim;
    mean_.assign(mean, n);
    rho_.assign(rho, n);
    previous_.assign(mean, n);
    set_classes(body_, cls, 0);
    set_classes(sinks_, cls, g_.sink_classes);
  }

  kv_u64 n_tokens() const { return n_tokens_; }
  const Geometry& geometry() const { return g_; }

  // Errors in data units; set_error replaces those of what was pushed so far, for a tail read back from its frame.
  ErrorSums error() const { return to_data_units(error_, g_.unit); }
  void set_error(const ErrorSums& error) { error_ = from_data_units(error, g_.unit); }

  // Append n tokens, x: [heads][n][head_dim] float32, C-contiguous, heads side by side on n_threads threads. False: a
  // residual of 2^24 or a value of 2^24 units or more, or no memory; the encoder is then unusable. Callers check
  // values beforehand (codec.check).
  bool push(const float* x, kv_u64 n, unsigned n_threads) {
    const std::size_t stride = (std::size_t)steps_ * kStates;
    const std::size_t channels = (std::size_t)g_.heads * g_.head_dim;
    kv_i32* const residuals = residuals_.resize((n_tokens_ + n) * stride) + n_tokens_ * stride;
    for (kv_u64 t = 0; channels < stride && t < n; ++t) std::fill_n(residuals + t * stride + channels, stride - channels, 0);
    std::vector<ErrorSums> sums(g_.heads);
    std::atomic<bool> fine{true};
    struct Scratch {
      Aligned<double> max_error, sum_squares;
    };
    const bool in_memory = run_pieces<Scratch>(g_.heads, n_threads, [&](std::size_t h, Scratch& scratch) {
      scratch.max_error.assign(g_.head_dim, 0.0);
      scratch.sum_squares.assign(g_.head_dim, 0.0);
      const std::size_t at = h * g_.head_dim;
      const QuantiserRow row{&mean_[at], &rho_[at], &previous_[at], scratch.max_error.data(),
                             scratch.sum_squares.data()};
      if (!quantise_rows(n, g_.head_dim, x + at * n, g_.head_dim, row, g_.unit, g_.first_token + n_tokens_, g_.sink,
                         g_.sink_div, residuals + at, stride))
        fine = false;
      for (kv_u32 c = 0; c < g_.head_dim; ++c) sums[h].add({scratch.max_error[c], scratch.sum_squares[c], n});
    });
    for (const ErrorSums& head : sums) error_.add(head);
    n_tokens_ += n;
    return fine && in_memory;
  }

  std::vector<kv_u8> payload() const {
    const std::size_t stride = (std::size_t)steps_ * kStates;
    kv_u32 states[kStates] = {};
    BackwardWords words(n_tokens_ * stride / 4 + 1024);
    kv_u64 left = n_tokens_ * steps_;
    const kv_u32 bare = code_bare(states, left, words);
    left -= bare;
    for (kv_u32& x : states) x += kLeastState;
    const kv_u64 sinks = std::min(n_tokens_, n_sinks());
    while (left > 0) {
      // Up to this many rows at a time, so that the room reserved stays small.
      const kv_u64 row = (left - 1) / steps_;
      const bool sink = row < sinks;
      const kv_u64 first = std::max<kv_u64>(sink ? 0 : sinks, row - std::min<kv_u64>(row, kRowsAtOnce - 1));
      const kv_u64 rows = row + 1 - first;
      kv_u16* out = words.reserve(rows * stride * kMaxSymbolWords + 1);
      const CodedRows coded{residuals_.data() + first * stride, rows, steps_, last_lanes_,
                            (kv_u32)(left - row * steps_), sink ? &sinks_ : &body_};
      words.resume(code_rows(*tables_, states, coded, out, g_.wide));
      left = first * steps_;
    }
    std::vector<kv_u8> out(kHeadBytes + 2 * words.size());
    out[0] = (kv_u8)bare;
    std::memcpy(&out[1], states, sizeof states);
    std::memcpy(&out[kHeadBytes], words.begin(), 2 * words.size());
    return out;
  }

 private:
  static constexpr kv_u64 kRowsAtOnce = 8;
  static constexpr std::size_t kMaxSymbolWords = 4;  // one of the symbol, one of its low bits, two of an escape
  static constexpr kv_u32 kMaxBare = 255;

  // Tokens from the block's first that are sinks, however many it gets.
  kv_u64 n_sinks() const { return g_.first_token < g_.sink ? g_.sink - g_.first_token : 0; }

  void set_classes(CodedClasses& coded, const kv_u8* cls, kv_u32 more) const {
    const kv_u32 n = g_.heads * g_.head_dim;
    coded.tables.assign((std::size_t)steps_ * kStates, 0);
    coded.shifts.assign((std::size_t)steps_ * kStates, 0);
    coded.has_shift.assign(steps_, 0);
    for (kv_u32 i = 0; i < n; ++i) {
      const kv_u32 c = sink_class(cls[i], more);
      coded.tables[i] = table_of(c) * kSymbols;
      coded.shifts[i] = shift_of(c);
      coded.has_shift[i / kStates] |= coded.shifts[i] != 0;
    }
  }

  // Steps from the end of the block that need no renormalisation: all states still fit afterwards. What they hold then
  // fills the 16 bits that every state has to start with.
  kv_u32 code_bare(kv_u32* states, kv_u64 n_steps, BackwardWords& words) const {
    const kv_u64 sinks = n_sinks();
    Step step;
    kv_u32 bare = 0;
    for (; bare < kMaxBare && bare < n_steps; ++bare) {
      const kv_u64 at = n_steps - 1 - bare;
      const CodedClasses& classes = at / steps_ < sinks ? sinks_ : body_;
      const std::size_t component = at % steps_ * kStates;
      const kv_i32* q = residuals_.data() + at * kStates;
      const kv_u32* shifts = classes.shifts.data() + component;
      const kv_u32 lanes = at % steps_ + 1 < steps_ ? kStates : last_lanes_;
      const kv_u32 escapes = step.look_up(*tables_, lanes, q, classes.tables.data() + component, shifts);
      kv_u32 next[kStates];
      for (kv_u32 i = 0; i < kStates; ++i) {
        if (i >= lanes) {
          next[i] = states[i];
          continue;
        }
        const kv_u64 y = (kv_u64)states[i] << shifts[i] | ((kv_u32)q[i] & ((1u << shifts[i]) - 1));
        const kv_u64 after = (y / step.frequency[i] << kSlotBits) + step.start[i] + y % step.frequency[i];
        if (after >= (1ull << 32) - kLeastState) return bare;
        next[i] = (kv_u32)after;
      }
      std::memcpy(states, next, sizeof next);
      if (escapes) words.resume(put_escapes(escapes, q, shifts, words.reserve(2 * kStates)));
    }
    return bare;
  }

  Geometry g_;
  const Tables* tables_;
  kv_u32 steps_, last_lanes_;
  Aligned<kv_i32> mean_, rho_, previous_;  // of each channel, apart so that the quantiser vectorises
  Aligned<kv_i32> residuals_;              // of each token, padded to whole steps
  CodedClasses body_, sinks_;
  kv_u64 n_tokens_ = 0;
  ErrorSums error_;
};

}  // namespace kv::kvr1
