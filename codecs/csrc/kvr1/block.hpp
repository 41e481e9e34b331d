// One block under decoding: the plan's tables for it, its components laid out for vectors, where its rows go.
// The instruction-set headers beside this one bring the loop over its steps. FORMAT.md section 9.
#pragma once

#include <vector>

#include "../aligned.hpp"
#include "../payload.hpp"
#include "../plan_tables.hpp"
#include "../rows.hpp"
#include "rans.hpp"

namespace kv::kvr1 {

struct PlanTables {
  const Tables* tables;
  const Block* blocks;
  kv_u64 n_blocks;
  const Stream* streams;
  kv_u64 n_streams;
  const kv_i32* mean;
  const kv_u8* rho;
  const kv_u8* classes;
  kv_u64 n_components;
  const kv_u32* order;
  kv_u64 n_order;
  std::vector<Payload> payloads;
  std::vector<Output> outputs;
  std::vector<RopeTable> ropes;
};

// The components of a block: arrays padded to whole steps.
struct Components {
  kv_i32 *mean, *rho, *previous;
  kv_i32 *tables, *shifts;  // first slot of each component's table, low bits of its class
  kv_u8* special;           // of each step: why its residuals are more than values of slots, or 0
  kv_i32 scale;
  kv_u32 scale_shift;       // log2 of the scale, where no step is kOddScale
};
enum Special : kv_u8 { kHasShift = 1, kOddScale = 2 };

// How rows go to the output: the common ways from vector to vector, all others through RowWriter.
enum Emission : kv_u8 { kGeneral, kPlain16, kPlain32, kRotated16, kRotated32 };

class BlockRun {
 public:
  // What the loop over steps works on.
  Components components;
  Words words;
  kv_u32 states[kStates];
  kv_u32 steps;                 // of a token
  kv_u32 last_lanes;            // of its last step
  kv_u64 token;                 // the next one
  kv_u64 bare_from;             // the step from which nothing renormalises
  bool bare;                    // whether that step was passed
  bool fault;
  Emission emission;
  kv_i32 large;                 // a power of two: rows with smaller magnitudes overflow in no way

  // False: the payload is too short or its states are none.
  bool start(const PlanTables& plan, const Block& block, const Narrow& narrow) {
    block_ = &block;
    stream_ = &plan.streams[block.stream];
    classes_ = plan.classes + stream_->components;
    const kv_u32 n = stream_->heads * stream_->head_dim;
    steps = (n + kStates - 1) / kStates;
    last_lanes = n - (steps - 1) * kStates;
    const Payload& payload = plan.payloads[block.payload];
    if (payload.n_bytes < kHeadBytes || payload.n_bytes % 2 == 0) return false;
    std::memcpy(states, payload.bytes + 1, sizeof states);
    for (kv_u32 x : states)
      if (x < kLeastState) return false;
    const kv_u64 all_steps = (kv_u64)block.n_tokens * steps;
    if (payload.bytes[0] > all_steps) return false;
    bare_from = all_steps - payload.bytes[0];
    words.start(payload.bytes + kHeadBytes, payload.n_bytes - kHeadBytes);
    token = 0;
    bare = fault = false;

    Components& c = components;
    const std::size_t padded = (std::size_t)steps * kStates;
    c.mean = arrays_.resize(5 * padded);
    c.rho = c.mean + padded;
    c.previous = c.rho + padded;
    c.tables = c.previous + padded;
    c.shifts = c.tables + padded;
    std::memset(c.mean, 0, 5 * padded * sizeof(kv_i32));
    for (kv_u32 i = 0; i < n; ++i) {
      c.mean[i] = c.previous[i] = plan.mean[stream_->components + i];
      c.rho[i] = plan.rho[stream_->components + i];
    }
    c.special = special_.resize(steps);
    row_.resize(stream_->head_dim);
    writers_.clear();
    for (kv_u32 head = 0; head < stream_->heads; ++head)
      writers_.emplace_back(RowPlace{&plan.outputs[block.output], block.rope < 0 ? nullptr : &plan.ropes[block.rope],
                                     plan.order + stream_->order, 1, stream_->head_dim, head, block.row,
                                     block.rope_row, 0, stream_->n_pairs, &narrow});
    choose_emission(plan);
    return true;
  }

  // Tokens to decode, and those of them that are sinks.
  kv_u64 stop() const { return block_->stop; }
  kv_u64 sinks() const {
    if (block_->first_token >= stream_->sink) return 0;
    const kv_u64 n = stream_->sink - block_->first_token;
    return n < block_->stop ? n : block_->stop;
  }

  // From here on tokens are sinks, or are not.
  void enter(bool sink) {
    Components& c = components;
    c.scale = sink ? 1 : (kv_i32)stream_->sink_div;
    c.scale_shift = (kv_u32)__builtin_ctz((kv_u32)c.scale);
    const bool shifts = c.scale == 1 << c.scale_shift && c.scale_shift <= kMaxScaleShift;
    std::memset(c.special, shifts ? 0 : kOddScale, steps);
    for (kv_u32 i = 0; i < stream_->heads * stream_->head_dim; ++i) {
      const kv_u32 cls = sink ? sink_class(classes_[i], stream_->sink_classes) : classes_[i];
      c.tables[i] = (kv_i32)(table_of(cls) * kSlots);
      c.shifts[i] = (kv_i32)shift_of(cls);
      if (c.shifts[i] != 0) c.special[i / kStates] |= kHasShift;
    }
  }

  // Rows from here that renormalise in every step, of those before `until`.
  kv_u64 plain_rows(kv_u64 until) const {
    const kv_u64 end = std::min(until, bare_from / steps);
    return end > token ? end - token : 0;
  }

  // Words near their end, or beyond it. After a fault the loop goes on over zeros to the end of its row.
  __attribute__((noinline)) void go_on() {
    if (!words.go_on()) park();
  }

  // Replace the residuals of the lanes in `mask`, which hold escapes and low bits, by the values that words tell.
  __attribute__((noinline)) void patch(kv_u32 mask, kv_u32 step, kv_i32* q) {
    const kv_i32* shift = components.shifts + (std::size_t)step * kStates;
    for (kv_u32 i = 0; i < kStates; ++i) {
      if (!(mask >> i & 1)) continue;
      kv_i32 value;
      if (!read_escape(words, value)) return park();
      const kv_i64 low = q[i] & ((1 << shift[i]) - 1);
      const kv_i64 residual = (kv_i64)value * ((kv_i64)1 << shift[i]) + low;
      const kv_u64 distance = (kv_u64)(residual < 0 ? -residual : residual) * (kv_u64)components.scale;
      if (distance >= kMaxDistance) return park();
      q[i] = (kv_i32)residual;
    }
  }

  // Whether the token is wanted, and where its rows go when emission is not general.
  bool emits() const { return token >= block_->skip; }
  const Stream& stream() const { return *stream_; }
  float* scratch() { return row_.data(); }
  template <class T>
  T* target(kv_u32 head) const {
    const kv_u64 row = block_->row + token - block_->skip;
    return (T*)output_->data + (kv_i64)head * output_->head_stride + (kv_i64)row * output_->row_stride + first_channel_;
  }
  const float* cos() const { return rope_->cos + rope_entry(); }
  const float* sin() const { return rope_->sin + rope_entry(); }

  // The token's values to the output, whatever they are.
  KV_HD void emit_general() {
    const kv_i32* values = components.previous;
    for (RowWriter& writer : writers_) {
      writer.write(token - block_->skip, values, stream_->unit, row_.data());
      values += stream_->head_dim;
    }
  }
  void overflowed() { overflow_ = true; }

  void make_bare() {
    for (kv_u32& x : states) x -= kLeastState;
    bare = true;
  }

  // After the last step wanted.
  Status status() {
    if (fault || words.overrun()) return kBadBlock;
    if (block_->stop == block_->n_tokens) {
      if (!bare) make_bare();
      kv_u32 left = 0;
      for (kv_u32 x : states) left |= x;
      if (left != 0 || !words.at_end()) return kBadBlock;
    }
    bool overflow = overflow_;
    for (const RowWriter& writer : writers_) overflow |= writer.overflow();
    return overflow ? kOverflow : kOk;
  }

 private:
  void park() {
    fault = true;
    words.park();
  }

  kv_u64 rope_entry() const { return (block_->rope_row + token - block_->skip) * rope_->pairs; }

  void choose_emission(const PlanTables& plan) {
    output_ = &plan.outputs[block_->output];
    rope_ = block_->rope < 0 ? nullptr : &plan.ropes[block_->rope];
    const kv_u32 n = stream_->head_dim;
    first_channel_ = plan.order[stream_->order];
    overflow_ = false;
    const bool direct = output_->type != kBfloat16 && n % 32 == 0 && writers_.front().contiguous() &&
                        (rope_ == nullptr || stream_->n_pairs == n / 2);
    const bool half = output_->type == kFloat16;
    emission = !direct ? kGeneral : rope_ == nullptr ? half ? kPlain16 : kPlain32 : half ? kRotated16 : kRotated32;
    // Plain rows do not look for overflow: from here on they go the general way, which does.
    large = kValueLimit;
    while (emission == kPlain16 && large > 1 && (float)large * stream_->unit >= 65504.0f) large /= 2;
  }

  const Block* block_;
  const Stream* stream_;
  const kv_u8* classes_;
  const Output* output_;
  const RopeTable* rope_;
  kv_u32 first_channel_;
  bool overflow_;
  Aligned<kv_i32> arrays_;
  Aligned<float> row_;
  Aligned<kv_u8> special_;
  std::vector<RowWriter> writers_;
};

}  // namespace kv::kvr1
