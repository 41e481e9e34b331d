// The CPU executor of a decode plan: lanes of any streams, on n threads, into the caller's outputs.
// The tables are those of kvcodecs/plan.py; the GPU executes the same ones.
#pragma once

#include <algorithm>
#include <cstring>

#include "lane.hpp"
#include "lanes_avx512.hpp"
#include "payload.hpp"
#include "plan_tables.hpp"
#include "rows.hpp"
#include "threads.hpp"

namespace kv {

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

// Everything that decoding will index, so that no plan whatever reads or writes outside its tables.
inline const char* lane_fault(const PlanTables& p, const Lane& l) {
  if (l.width == 0 || l.width % 2) return "width";
  if (l.channels > p.n_channels || l.width > p.n_channels - l.channels) return "channels";
  if (l.n_classes == 0 || l.n_classes > kClasses) return "n_classes";
  if (l.classes > p.n_classes || l.n_classes > p.n_classes - l.classes) return "classes";
  for (kv_u32 i = 0; i < l.n_classes; ++i)
    if (p.classes[l.classes + i] >= kClasses) return "class";
  if (l.payload >= p.payloads.size()) return "payload";
  const kv_u64 payload_bytes = p.payloads[l.payload].n_bytes;
  if (l.offset > payload_bytes || l.n_bytes > payload_bytes - l.offset) return "offset";
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

inline const kv_u8* lane_bytes(const PlanTables& p, const Lane& l) { return p.payloads[l.payload].bytes + l.offset; }

inline RowPlace place_of(const PlanTables& p, const Lane& lane, const Narrow& narrow) {
  return {&p.outputs[lane.output],
          lane.rope < 0 ? nullptr : &p.ropes[lane.rope],
          &p.channels[lane.channels].output,
          sizeof(Channel) / sizeof(kv_u32),
          lane.width, lane.head, lane.row, lane.rope_row, lane.first_pair, lane.n_pairs, &narrow};
}

// Memory of one thread, grown to the widest lane.
struct Scratch {
  std::vector<kv_u32> models;
  std::vector<ChannelState> states;
  std::vector<kv_i32> values;
  std::vector<float> row;
#if KV_X86
  WideLanes wide;
#endif
};

inline Status run_lane(const PlanTables& p, const Lane& lane, Scratch& s) {
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
  decoder.start(lane_bytes(p, lane), lane.n_bytes);
  RowWriter writer(place_of(p, lane, kNarrow));
  for (kv_u32 t = 0; t < lane.n_tokens; ++t) {
    const Status status = decoder.row(lane.first_token + t, s.values.data());
    if (status != kOk) return status;
    if (t < lane.skip) continue;
    for (kv_u32 c = 0; c < lane.width; ++c) s.row[c] = (float)s.values[c] * lane.unit;
    writer.write(t - lane.skip, s.row.data());
  }
  return writer.overflow() ? kOverflow : kOk;
}

#if KV_X86
// Up to sixteen lanes of one width and sink_div.
inline void run_wide(const PlanTables& p, const Lane* lanes, kv_u32 n, kv_u8* status, Scratch& s) {
  RowWriter writers[kWide];
  kv_u32 n_tokens = 0, bad_residual = 0, bad_value = 0;
  s.row.resize(lanes[0].width);
  s.wide.start(lanes[0].width, lanes[0].sink_div);
  for (kv_u32 i = 0; i < n; ++i) {
    const Lane& lane = lanes[i];
    s.wide.add(i, lane_bytes(p, lane), lane.n_bytes, p.channels + lane.channels, p.classes + lane.classes,
               lane.first_token, lane.sink);
    writers[i] = RowWriter(place_of(p, lane, kNarrowAvx512));
    n_tokens = std::max(n_tokens, lane.n_tokens);
  }
  s.wide.begin(p.prior);
  for (kv_u32 t = 0; t < n_tokens; ++t) {
    kv_u32 active = 0;
    for (kv_u32 i = 0; i < n; ++i) active |= (kv_u32)(t < lanes[i].n_tokens) << i;
    active &= ~(bad_residual | bad_value);
    s.wide.row(t, active, bad_residual, bad_value);
    active &= ~(bad_residual | bad_value);
    for (kv_u32 i = 0; i < n; ++i) {
      if (!(active >> i & 1) || t < lanes[i].skip) continue;
      s.wide.take(i, lanes[i].unit, s.row.data());
      writers[i].write(t - lanes[i].skip, s.row.data());
    }
  }
  for (kv_u32 i = 0; i < n; ++i)
    status[i] = bad_residual >> i & 1 ? kBadResidual : bad_value >> i & 1 ? kBadValue : writers[i].overflow() ? kOverflow : kOk;
}
#endif

// A run of lanes that one thread decodes together.
struct Unit {
  kv_u64 first;
  kv_u32 n;
};

// Lanes go alone, or in groups of up to sixteen where the CPU decodes those at once. A group costs as much as six
// lanes alone whatever its size, so fewer stay alone. The lanes are first cut into one share for each thread, and
// groups end there: what is left over of a share is then small pieces, which even out among the threads.
inline std::vector<Unit> plan_units(const PlanTables& p, unsigned n_threads, bool wide) {
  constexpr kv_u64 kSmallestGroup = 6;
  std::vector<Unit> units;
  const kv_u64 share = (p.n_lanes + n_threads - 1) / n_threads;
  for (kv_u64 i = 0; i < p.n_lanes;) {
    const Lane& first = p.lanes[i];
    const kv_u64 stop = std::min({p.n_lanes, (i / share + 1) * share, i + kWide});
    kv_u64 n = 1, bytes = first.n_bytes;
    if (wide && first.sink_div <= kWideMaxSinkDiv) {
      for (; i + n < stop; ++n) {
        const Lane& lane = p.lanes[i + n];
        bytes += lane.n_bytes;
        if (lane.width != first.width || lane.sink_div != first.sink_div || bytes > kWideMaxBytes) break;
      }
    }
    if (n < kSmallestGroup) n = 1;
    units.push_back({i, (kv_u32)n});
    i += n;
  }
  return units;
}

// The output does not depend on who decodes what. False: memory ran out.
inline bool run_plan(const PlanTables& p, kv_u8* status, unsigned n_threads, bool wide) {
  n_threads = std::max(n_threads, 1u);
  const std::vector<Unit> units = plan_units(p, n_threads, wide);
  return run_pieces<Scratch>(units.size(), n_threads, [&](std::size_t i, Scratch& scratch) {
    const Unit& unit = units[i];
#if KV_X86
    if (unit.n > 1) {
      run_wide(p, p.lanes + unit.first, unit.n, status + unit.first, scratch);
      return;
    }
#endif
    status[unit.first] = run_lane(p, p.lanes[unit.first], scratch);
  });
}

}  // namespace kv
