// The CPU executor of a decode plan: lanes of any streams, on n threads, into the caller's outputs.
// The tables are those of kvcodecs/plan.py; the GPU executes the same ones.
#pragma once

#include <atomic>
#include <new>
#include <system_error>
#include <thread>

#include "encoder.hpp"
#include "half.hpp"

namespace kv {

// One lane to decode. plan.LANE_DTYPE is the same struct.
struct Lane {
  kv_u64 offset;        // of the substream in its payload, bytes
  kv_u64 n_bytes;
  kv_u64 first_token;   // absolute position of the block's first token
  kv_u64 sink;
  kv_u64 channels;      // first entry of the lane in the channel table
  kv_u64 classes;       // first entry of the lane in the class table
  kv_u32 payload;       // index of the payload
  kv_u32 output;        // index of the output
  kv_u32 head;          // of the output
  kv_u32 n_tokens;      // to decode, from the block's first
  kv_u32 skip;          // of these, not written
  kv_u32 row;           // output row of the first token written
  kv_u32 width;         // channels
  kv_u32 n_classes;     // classes present
  kv_u32 sink_div;
  float unit;
  kv_i32 rope;          // index of the cos/sin table, -1: no rotation
  kv_u32 rope_row;      // its row for the first token written
  kv_u32 first_pair;    // RoPE pair of the lane's first channel
  kv_u32 n_pairs;       // pairs of the lane that rotate; the others pass through
};
static_assert(sizeof(Lane) == 104, "plan.LANE_DTYPE");

struct Payload {
  const kv_u8* bytes;
  kv_u64 n_bytes;
};

enum OutputType : kv_u32 { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2 };

// A view [heads][rows][channels] of the caller's memory; strides in elements, the last is 1.
struct Output {
  void* data;
  kv_u64 heads, rows, channels;
  kv_i64 head_stride, row_stride;
  OutputType type;
};

struct RopeTable {
  const float* cos;  // [rows][pairs]
  const float* sin;
  kv_u64 rows, pairs;
};

struct PlanTables {
  const Lane* lanes;
  kv_u64 n_lanes;
  const Channel* channels;
  kv_u64 n_channels;
  const kv_u8* classes;
  kv_u64 n_classes;
  std::vector<Payload> payloads;
  std::vector<Output> outputs;
  std::vector<RopeTable> ropes;
  const kv_u32* prior;
};

// Everything that `run_lane` will index, so that no plan whatever reads or writes outside its tables.
inline const char* lane_fault(const PlanTables& p, const Lane& l) {
  if (l.width == 0 || l.width % 2) return "width";
  if (l.channels > p.n_channels || l.width > p.n_channels - l.channels) return "channels";
  if (l.n_classes == 0 || l.n_classes > kClasses) return "n_classes";
  if (l.classes > p.n_classes || l.n_classes > p.n_classes - l.classes) return "classes";
  for (kv_u32 i = 0; i < l.n_classes; ++i)
    if (p.classes[l.classes + i] >= kClasses) return "class";
  if (l.payload >= p.payloads.size()) return "payload";
  if (l.output >= p.outputs.size()) return "output";
  const Output& out = p.outputs[l.output];
  if (l.head >= out.heads) return "head";
  if (l.skip > l.n_tokens) return "skip";
  const kv_u64 written = l.n_tokens - l.skip;
  if (l.row > out.rows || written > out.rows - l.row) return "row";
  for (kv_u32 i = 0; i < l.width; ++i) {
    const Channel& c = p.channels[l.channels + i];
    if (c.output >= out.channels || c.models >= l.n_classes || c.rho > 15) return "channel";
    if (c.mean >= kValueLimit || c.mean <= -kValueLimit) return "mean";
  }
  if (l.rope >= 0) {
    if ((kv_u64)l.rope >= p.ropes.size() || l.n_pairs > l.width / 2) return "rope";
    const RopeTable& r = p.ropes[l.rope];
    if (l.rope_row > r.rows || written > r.rows - l.rope_row) return "rope_row";
    if (l.n_pairs > 0 && (l.first_pair > r.pairs || l.n_pairs > r.pairs - l.first_pair)) return "first_pair";
  }
  if (l.sink_div == 0 || l.sink_div >= 1u << 24) return "sink_div";
  return nullptr;
}

// Scratch memory of one thread, grown to the widest lane.
struct Scratch {
  std::vector<kv_u32> models;
  std::vector<ChannelState> states;
  std::vector<kv_i32> values;
  std::vector<float> row;
};

template <class Store>
inline Status decode_rows(LaneDecoder& decoder, const Lane& lane, const RopeTable* rope, Scratch& s, Store store) {
  const kv_u32 half = lane.width / 2;
  for (kv_u32 t = 0; t < lane.n_tokens; ++t) {
    const Status status = decoder.row(lane.first_token + t, s.values.data());
    if (status != kOk) return status;
    if (t < lane.skip) continue;
    const kv_u32 written = t - lane.skip;
    float* row = s.row.data();
    for (kv_u32 c = 0; c < lane.width; ++c) row[c] = (float)s.values[c] * lane.unit;
    if (rope != nullptr) {
      const kv_u64 entry = (lane.rope_row + written) * rope->pairs + lane.first_pair;
      const float* cos = rope->cos + entry;
      const float* sin = rope->sin + entry;
      for (kv_u32 i = 0; i < lane.n_pairs; ++i) {
        const float a = row[i], b = row[half + i];
        row[i] = a * cos[i] - b * sin[i];
        row[half + i] = b * cos[i] + a * sin[i];
      }
    }
    store(lane.row + written, row);
  }
  return kOk;
}

inline Status run_lane(const PlanTables& p, const Lane& lane, Scratch& s) {
  const Payload& payload = p.payloads[lane.payload];
  if (lane.offset > payload.n_bytes || lane.n_bytes > payload.n_bytes - lane.offset) return kTruncated;
  s.models.resize((std::size_t)lane.n_classes * kClassModels);
  s.states.resize(lane.width);
  s.values.resize(lane.width);
  s.row.resize(lane.width);
  for (kv_u32 i = 0; i < lane.n_classes; ++i)
    std::memcpy(s.models.data() + i * kClassModels, p.prior + p.classes[lane.classes + i] * kClassModels,
                kClassModels * sizeof(kv_u32));
  LaneDecoder decoder;
  decoder.channels = p.channels + lane.channels;
  decoder.states = s.states.data();
  decoder.models = s.models.data();
  decoder.width = lane.width;
  decoder.sink_div = lane.sink_div;
  decoder.sink = lane.sink;
  decoder.start(payload.bytes + lane.offset, lane.n_bytes);

  const Channel* channels = decoder.channels;
  const Output& out = p.outputs[lane.output];
  const RopeTable* rope = lane.rope < 0 ? nullptr : &p.ropes[lane.rope];
  const kv_i64 base = (kv_i64)lane.head * out.head_stride;
  bool overflow = false;
  Status status;
  if (out.type == kFloat32) {
    status = decode_rows(decoder, lane, rope, s, [&](kv_u64 r, const float* row) {
      float* target = (float*)out.data + base + (kv_i64)r * out.row_stride;
      for (kv_u32 c = 0; c < lane.width; ++c) target[channels[c].output] = row[c];
    });
  } else if (out.type == kFloat16) {
    status = decode_rows(decoder, lane, rope, s, [&](kv_u64 r, const float* row) {
      kv_u16* target = (kv_u16*)out.data + base + (kv_i64)r * out.row_stride;
      for (kv_u32 c = 0; c < lane.width; ++c) target[channels[c].output] = to_float16(row[c], overflow);
    });
  } else {
    status = decode_rows(decoder, lane, rope, s, [&](kv_u64 r, const float* row) {
      kv_u16* target = (kv_u16*)out.data + base + (kv_i64)r * out.row_stride;
      for (kv_u32 c = 0; c < lane.width; ++c) target[channels[c].output] = to_bfloat16(row[c], overflow);
    });
  }
  return status == kOk && overflow ? kOverflow : status;
}

// Lanes are handed out one by one: their sizes differ, and the output does not depend on who decodes what.
// False: memory ran out.
inline bool run_plan(const PlanTables& p, kv_u8* status, unsigned n_threads) {
  std::atomic<kv_u64> next{0};
  std::atomic<bool> out_of_memory{false};
  auto work = [&] {
    try {
      Scratch scratch;
      for (kv_u64 i = next++; i < p.n_lanes; i = next++) status[i] = run_lane(p, p.lanes[i], scratch);
    } catch (const std::bad_alloc&) {
      out_of_memory = true;
    }
  };
  if (n_threads > p.n_lanes) n_threads = (unsigned)p.n_lanes;
  std::vector<std::thread> threads;
  try {
    for (unsigned i = 1; i < n_threads; ++i) threads.emplace_back(work);
  } catch (const std::system_error&) {
    // The system gives no more threads: those that run do the work.
  }
  work();
  for (std::thread& thread : threads) thread.join();
  return !out_of_memory;
}

}  // namespace kv
