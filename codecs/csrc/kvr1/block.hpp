// One block under decoding: the plan's tables for it, its components laid out for vectors, where its rows go.
// The instruction-set headers beside this one bring the loop over its steps. FORMAT.md section 9.
#pragma once

#include <vector>

#include "../aligned.hpp"
#include "../payload.hpp"
#include "../rows.hpp"
#include "rans.hpp"

namespace kv::kvr1 {

// What the blocks of one stream share. plan.STREAM_DTYPE is the same struct.
struct Stream {
  kv_u64 components;    // first entry of the stream in mean, rho and classes
  kv_u64 order;         // first entry in the order table: output channel of each coded channel of a head
  kv_u64 sink;
  kv_u32 heads;
  kv_u32 head_dim;
  kv_u32 n_pairs;       // RoPE pairs of a head
  kv_u32 sink_div;
  kv_u32 sink_classes;  // added to a class at sinks
  float unit;
};
static_assert(sizeof(Stream) == 48, "plan.STREAM_DTYPE");

// One block to decode. plan.BLOCK_DTYPE is the same struct.
struct Block {
  kv_u64 first_token;   // absolute position
  kv_u32 stream;
  kv_u32 payload;
  kv_u32 output;
  kv_u32 n_tokens;      // of the block
  kv_u32 stop;          // tokens to decode, from the block's first
  kv_u32 skip;          // of these, not written
  kv_u32 row;           // output row of the first token written
  kv_u32 rope_row;      // and its row of the cos/sin table
  kv_i32 rope;          // index of that table, -1: no rotation
  kv_u32 reserved;
};
static_assert(sizeof(Block) == 48, "plan.BLOCK_DTYPE");

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
  kv_u8* has_shift;         // of each step
  kv_i32 scale;
};

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
    c.has_shift = has_shift_.resize(steps);
    row_.resize(stream_->head_dim);
    writers_.clear();
    for (kv_u32 head = 0; head < stream_->heads; ++head)
      writers_.emplace_back(RowPlace{&plan.outputs[block.output], block.rope < 0 ? nullptr : &plan.ropes[block.rope],
                                     plan.order + stream_->order, 1, stream_->head_dim, head, block.row,
                                     block.rope_row, 0, stream_->n_pairs, &narrow});
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
    std::memset(c.has_shift, 0, steps);
    for (kv_u32 i = 0; i < stream_->heads * stream_->head_dim; ++i) {
      const kv_u32 cls = sink ? sink_class(classes_[i], stream_->sink_classes) : classes_[i];
      c.tables[i] = (kv_i32)(table_of(cls) * kSlots);
      c.shifts[i] = (kv_i32)shift_of(cls);
      c.has_shift[i / kStates] |= c.shifts[i] != 0;
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

  // Values of token `token` to the output.
  KV_HD void emit() {
    if (token < block_->skip) return;
    const kv_i32* values = components.previous;
    const kv_u32 width = stream_->head_dim;
    const float unit = stream_->unit;
    float* row = row_.data();
    for (RowWriter& writer : writers_) {
      writer.write(token - block_->skip, values, unit, row);
      values += width;
    }
  }

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
    for (const RowWriter& writer : writers_)
      if (writer.overflow()) return kOverflow;
    return kOk;
  }

 private:
  void park() {
    fault = true;
    words.park();
  }

  const Block* block_;
  const Stream* stream_;
  const kv_u8* classes_;
  Aligned<kv_i32> arrays_;
  Aligned<float> row_;
  Aligned<kv_u8> has_shift_;
  std::vector<RowWriter> writers_;
};

}  // namespace kv::kvr1
