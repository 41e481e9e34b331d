// TKV1: a thread decodes a lane with the decoder of the CPU. FORMAT.md section 4.
#pragma once

#include "place.hpp"

namespace kv::gpu {

struct Pair {
  float first, second;
};

KV_DEVICE Pair rotated(Pair p, float cos, float sin) {
  return {subtract(multiply(p.first, cos), multiply(p.second, sin)),
          add(multiply(p.second, cos), multiply(p.first, sin))};
}

template <kv_u32 kType>
KV_DEVICE bool emit_lane(const Lane& lane, const Channel* channels, const kv_i32* values, kv_u64 row,
                         const RotationRow& rotation) {
  kv_u32 largest = 0;
  const bool rotates = rotation.cos != nullptr;
  const kv_u32 half = lane.width / 2;
  for (kv_u32 c = 0; c < half; ++c) {
    Pair pair{multiply((float)values[c], lane.unit), multiply((float)values[half + c], lane.unit)};
    if (rotates && c < lane.n_pairs) pair = rotated(pair, load(rotation.cos + c), load(rotation.sin + c));
    put<kType>(row, load(&channels[c].output), pair.first, rotates, largest);
    put<kType>(row, load(&channels[half + c].output), pair.second, rotates, largest);
  }
  return overflows<kType>(largest);
}

KV_DEVICE Status decode_lane(const LaneArguments& a, const Lane& lane, kv_u32* scratch) {
  const kv_u8* classes = at<const kv_u8>(a.classes) + lane.classes;
  kv_u32* models = scratch;
  for (kv_u32 i = 0; i < lane.n_classes; ++i) {
    const kv_u32* prior = at<const kv_u32>(a.prior) + load(classes + i) * kClassModels;
    KV_UNROLL_4
    for (kv_u32 m = 0; m < kClassModels; ++m) models[i * kClassModels + m] = load(prior + m);
  }
  kv_i32* values = (kv_i32*)(models + lane.n_classes * kClassModels);

  LaneDecoder decoder;
  decoder.channels = at<const Channel>(a.channels) + lane.channels;
  decoder.states = (ChannelState*)(values + lane.width);
  decoder.models = models;
  decoder.width = lane.width;
  decoder.sink_div = lane.sink_div;
  decoder.sink = lane.sink;
  decoder.start(at<const kv_u8>(at<const Source>(a.sources)[lane.payload].bytes) + lane.offset, lane.n_bytes);

  const Target& target = at<const Target>(a.targets)[lane.output];
  const Rotation* rotation = lane.rope < 0 ? nullptr : at<const Rotation>(a.rotations) + lane.rope;
  const kv_u64 head = (kv_u64)(lane.head * target.head_stride) * size_of(target.type);
  bool overflow = false;
  for (kv_u32 t = 0; t < lane.n_tokens; ++t) {
    const Status status = decoder.row(lane.first_token + t, values);
    if (status != kOk) return status;
    if (t < lane.skip) continue;
    const kv_u32 i = t - lane.skip;
    const kv_u64 row = row_address(target, lane.row + i) + head;
    const RotationRow angles = rotation_row(rotation, lane.rope_row + i, lane.first_pair);
    if (target.type == kFloat32)
      overflow |= emit_lane<kFloat32>(lane, decoder.channels, values, row, angles);
    else if (target.type == kFloat16)
      overflow |= emit_lane<kFloat16>(lane, decoder.channels, values, row, angles);
    else
      overflow |= emit_lane<kBfloat16>(lane, decoder.channels, values, row, angles);
  }
  return overflow ? kOverflow : kOk;
}

// All lanes that are thread `thread`'s, of however many threads.
KV_DEVICE void decode_lanes(const LaneArguments& a, kv_u64 thread) {
  if (thread >= a.n_threads) return;
  kv_u32* scratch = at<kv_u32>(a.scratch) + thread * a.scratch_words;
  for (kv_u64 i = thread; i < a.n_lanes; i += a.n_threads)
    at<kv_u8>(a.status)[i] = decode_lane(a, at<const Lane>(a.lanes)[i], scratch);
}

}  // namespace kv::gpu
