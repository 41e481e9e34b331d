// Encoder of KVR1: quantises token by token as they come, codes the block backwards when the payload is asked for.
// FORMAT.md, KVR1. Host only.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "../quantiser.hpp"
#include "../threads.hpp"
#include "rans.hpp"

namespace kv::kvr1 {

// Words, filled from the back: rANS encodes in the reverse of the order in which it decodes.
class BackwardWords {
 public:
  explicit BackwardWords(std::size_t n) : words_(n), next_(n) {}

  // Room for n more words before the first one.
  kv_u16* reserve(std::size_t n) {
    if (next_ < n) {
      std::vector<kv_u16> larger(words_.size() * 2 + n);
      const std::size_t used = words_.size() - next_, at = larger.size() - used;
      std::copy(words_.begin() + (std::ptrdiff_t)next_, words_.end(), larger.begin() + (std::ptrdiff_t)at);
      words_.swap(larger);
      next_ = at;
    }
    return words_.data() + next_;
  }
  void resume(const kv_u16* next) { next_ = (std::size_t)(next - words_.data()); }
  const kv_u16* begin() const { return words_.data() + next_; }
  std::size_t size() const { return words_.size() - next_; }

 private:
  std::vector<kv_u16> words_;
  std::size_t next_;
};

// What a class says to the encoder, of every component; padded to whole steps.
struct CodedClasses {
  std::vector<kv_u32> tables;  // first entry of the table in Tables::symbols
  std::vector<kv_u32> shifts;
  std::vector<kv_u8> has_shift;  // of each step
};

// What one step codes, by lane. Plain arrays, so that compilers vectorise the loops over them.
struct Step {
  alignas(64) kv_u32 frequency[kStates];
  alignas(64) kv_u32 start[kStates];
  alignas(64) float inverse[kStates];
  alignas(64) kv_u32 escape[kStates];

  // False: no lane escapes.
  inline __attribute__((always_inline)) bool look_up(const Tables& t, const kv_i32* __restrict q,
                                                     const kv_u32* __restrict tables,
                                                     const kv_u32* __restrict shifts) {
    kv_u32 any = 0;
    for (kv_u32 i = 0; i < kStates; ++i) {
      const kv_u32 symbol = (kv_u32)((q[i] >> shifts[i]) + kZeroSymbol);
      const kv_u32 first = tables[i];
      kv_u32 at = first + (symbol < kSymbols ? symbol : 0);
      at = (t.symbols[at] & 0xFFFF) != 0 ? at : first;
      const kv_u32 word = t.symbols[at];
      frequency[i] = word & 0xFFFF;
      start[i] = word >> 16;
      inverse[i] = t.inverse[at];
      escape[i] = at == first;
      any |= escape[i];
    }
    return any != 0;
  }
};

inline kv_u32 zigzag(kv_i32 value) { return ((kv_u32)value << 1) ^ (kv_u32)(value >> 31); }

// Words of the lanes that escape, the last lane first.
inline kv_u16* put_escapes(const Step& step, const kv_i32* q, const kv_u32* shifts, kv_u32 lanes, kv_u16* out) {
  for (kv_u32 i = lanes; i-- > 0;) {
    if (!step.escape[i]) continue;
    const kv_u32 z = zigzag(q[i] >> shifts[i]);
    if (z > 0x7FFF) *--out = (kv_u16)(z >> 15);
    *--out = (kv_u16)((z & 0x7FFF) | (z > 0x7FFF) << 15);
  }
  return out;
}

// Codes `rows` rows of residuals, the last one first, renormalising. `out` has room for all of it.
KV_CLONES static kv_u16* code_rows(const Tables& t, kv_u32* states, const kv_i32* residuals, kv_u64 rows,
                                   kv_u32 steps, kv_u32 last_lanes, const CodedClasses& classes, kv_u32 from_step,
                                   kv_u16* out) {
  Step step;
  kv_u32 x[kStates];
  std::memcpy(x, states, sizeof x);
  for (kv_u64 row = rows; row-- > 0; from_step = steps) {
    for (kv_u32 s = from_step; s-- > 0;) {
      const std::size_t at = (std::size_t)s * kStates;
      const kv_i32* q = residuals + row * steps * kStates + at;
      const kv_u32* shifts = classes.shifts.data() + at;
      const kv_u32 lanes = s + 1 < steps ? kStates : last_lanes;
      if (KV_UNLIKELY(step.look_up(t, q, classes.tables.data() + at, shifts)))
        out = put_escapes(step, q, shifts, lanes, out);
      if (classes.has_shift[s]) {
        for (kv_u32 i = lanes; i-- > 0;) {
          const kv_u32 full = shifts[i] != 0 && x[i] >> (32 - shifts[i]) != 0;
          out[-1] = (kv_u16)x[i];
          out -= full;
          x[i] = full ? x[i] >> 16 : x[i];
          x[i] = x[i] << shifts[i] | ((kv_u32)q[i] & ((1u << shifts[i]) - 1));
        }
      }
      for (kv_u32 i = lanes; i-- > 0;) {
        const kv_u32 full = x[i] >= step.frequency[i] << 21;
        out[-1] = (kv_u16)x[i];
        out -= full;
        x[i] = full ? x[i] >> 16 : x[i];
      }
      for (kv_u32 i = 0; i < kStates; ++i) {
        const kv_u32 f = step.frequency[i];
        kv_u32 quotient = (kv_u32)(kv_i32)((float)x[i] * step.inverse[i]);
        quotient += (kv_u32)(x[i] - quotient * f >= f);
        const kv_u32 next = x[i] + quotient * (kSlots - f) + step.start[i];
        x[i] = i < lanes ? next : x[i];
      }
    }
  }
  std::memcpy(states, x, sizeof x);
  return out;
}

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
  };

  // mean, rho and class: one entry per channel, [heads][head_dim]. `tables` must outlive the encoder.
  BlockEncoder(const Geometry& geometry, const kv_i32* mean, const kv_u8* rho, const kv_u8* cls, const Tables& tables)
      : g_(geometry), tables_(&tables) {
    const kv_u32 n = g_.heads * g_.head_dim;
    steps_ = (n + kStates - 1) / kStates;
    last_lanes_ = n - (steps_ - 1) * kStates;
    mean_.assign(mean, mean + n);
    rho_.assign(rho, rho + n);
    previous_ = mean_;
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
    residuals_.resize((n_tokens_ + n) * stride);
    std::vector<ErrorSums> sums(g_.heads);
    std::atomic<bool> fine{true};
    struct Scratch {
      std::vector<double> errors;
    };
    const bool in_memory = run_pieces<Scratch>(g_.heads, n_threads, [&](std::size_t h, Scratch& scratch) {
      scratch.errors.assign(2 * (std::size_t)g_.head_dim, 0.0);
      double* max_error = scratch.errors.data();
      double* sum_squares = max_error + g_.head_dim;
      const std::size_t at = h * g_.head_dim;
      const QuantiserRow row{&mean_[at], &rho_[at], &previous_[at], max_error, sum_squares};
      if (!quantise_rows(n, g_.head_dim, x + at * n, g_.head_dim, row, g_.unit, g_.first_token + n_tokens_, g_.sink,
                         g_.sink_div, residuals_.data() + n_tokens_ * stride + at, stride))
        fine = false;
      for (kv_u32 c = 0; c < g_.head_dim; ++c) sums[h].add({max_error[c], sum_squares[c], n});
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
    const kv_u64 sinks = g_.first_token < g_.sink ? std::min(n_tokens_, g_.sink - g_.first_token) : 0;
    while (left > 0) {
      // Up to this many rows at a time, so that the room reserved stays small.
      const kv_u64 row = (left - 1) / steps_;
      const bool sink = row < sinks;
      const kv_u64 first = std::max<kv_u64>(sink ? 0 : sinks, row - std::min<kv_u64>(row, kRowsAtOnce - 1));
      const kv_u64 rows = row + 1 - first;
      kv_u16* out = words.reserve(rows * stride * kMaxSymbolWords + 1);
      words.resume(code_rows(*tables_, states, residuals_.data() + first * stride, rows, steps_, last_lanes_,
                             sink ? sinks_ : body_, (kv_u32)(left - row * steps_), out));
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
    const kv_u64 sinks = g_.first_token < g_.sink ? g_.sink - g_.first_token : 0;
    Step step;
    kv_u32 bare = 0;
    for (; bare < kMaxBare && bare < n_steps; ++bare) {
      const kv_u64 at = n_steps - 1 - bare;
      const CodedClasses& classes = at / steps_ < sinks ? sinks_ : body_;
      const std::size_t component = at % steps_ * kStates;
      const kv_i32* q = residuals_.data() + at * kStates;
      const kv_u32* shifts = classes.shifts.data() + component;
      const kv_u32 lanes = at % steps_ + 1 < steps_ ? kStates : last_lanes_;
      const bool escapes = step.look_up(*tables_, q, classes.tables.data() + component, shifts);
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
      if (escapes) words.resume(put_escapes(step, q, shifts, lanes, words.reserve(2 * kStates)));
    }
    return bare;
  }

  Geometry g_;
  const Tables* tables_;
  kv_u32 steps_, last_lanes_;
  std::vector<kv_i32> mean_, rho_, previous_;  // of each channel, apart so that the quantiser vectorises
  std::vector<kv_i32> residuals_;              // of each token, padded to whole steps
  CodedClasses body_, sinks_;
  kv_u64 n_tokens_ = 0;
  ErrorSums error_;
};

}  // namespace kv::kvr1
