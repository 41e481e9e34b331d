// Where decoded rows go: rotation, narrowing, channel order, the caller's strides. Shared by all codecs with lanes.
#pragma once

#include <cmath>
#include <cstring>

#include "narrow.hpp"
#include "plan_tables.hpp"

namespace kv {

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

// The rows of some channels of one head.
struct RowPlace {
  const Output* out;
  const RopeTable* rope;    // null: no rotation
  const kv_u32* channels;   // channel of the output of each channel of the row
  kv_u32 channel_stride;    // of that table
  kv_u32 width;
  kv_u32 head;
  kv_u64 row;               // first row of the output
  kv_u64 rope_row;          // and of the RoPE table
  kv_u32 first_pair;        // RoPE pair of the row's first channel
  kv_u32 n_pairs;           // pairs of the row that rotate; the others pass through
  const Narrow* narrow;
};

class RowWriter {
 public:
  RowWriter() = default;
  explicit RowWriter(const RowPlace& place) : p_(place) {
    for (kv_u32 c = 0; c < p_.width; ++c) contiguous_ &= channel(c) == channel(0) + c;
  }

  bool overflow() const { return overflow_; }
  // Whether the output's channels are in the row's order, without gaps.
  bool contiguous() const { return contiguous_; }

  // The `i`th row: `width` integers, times `unit`. `row` is room for them.
  KV_HD void write(kv_u64 i, const kv_i32* __restrict values, float unit, float* __restrict row) {
    if (p_.rope == nullptr && contiguous_ && p_.out->type == kFloat16) {
      overflow_ |= p_.narrow->values(values, p_.width, unit, (kv_u16*)p_.out->data + at(i) + channel(0));
      return;
    }
    for (kv_u32 c = 0; c < p_.width; ++c) row[c] = (float)values[c] * unit;
    write(i, row);
  }

  // The `i`th row: `width` values in data units; rotated in place. Inlined, so that it vectorises as its caller does.
  KV_HD void write(kv_u64 i, float* row) {
    if (p_.rope != nullptr) rotate(i, row);
    if (p_.out->type == kFloat32) {
      float* target = (float*)p_.out->data + at(i);
      if (contiguous_) {
        std::memcpy(target + channel(0), row, p_.width * sizeof(float));
      } else {
        for (kv_u32 c = 0; c < p_.width; ++c) target[channel(c)] = row[c];
      }
    } else if (p_.out->type == kFloat16) {
      kv_u16* target = (kv_u16*)p_.out->data + at(i);
      if (contiguous_) {
        overflow_ |= p_.narrow->row(row, p_.width, target + channel(0));
      } else {
        for (kv_u32 c = 0; c < p_.width; ++c) target[channel(c)] = to_float16(row[c], overflow_);
      }
    } else {
      kv_u16* target = (kv_u16*)p_.out->data + at(i);
      if (contiguous_) {
        bool overflow = false;
        target += channel(0);
        for (kv_u32 c = 0; c < p_.width; ++c) target[c] = to_bfloat16(row[c], overflow);
        overflow_ |= overflow;
      } else {
        for (kv_u32 c = 0; c < p_.width; ++c) target[channel(c)] = to_bfloat16(row[c], overflow_);
      }
    }
  }

 private:
  KV_HD kv_i64 at(kv_u64 i) const {
    return (kv_i64)p_.head * p_.out->head_stride + (kv_i64)(p_.row + i) * p_.out->row_stride;
  }
  KV_HD kv_u32 channel(kv_u32 c) const { return p_.channels[(kv_u64)c * p_.channel_stride]; }

  KV_HD void rotate(kv_u64 i, float* __restrict row) {
    const kv_u32 half = p_.width / 2;
    const kv_u64 entry = (p_.rope_row + i) * p_.rope->pairs + p_.first_pair;
    const float* __restrict cos = p_.rope->cos + entry;
    const float* __restrict sin = p_.rope->sin + entry;
    float* __restrict other = row + half;
    for (kv_u32 c = 0; c < p_.n_pairs; ++c) {
      const float a = row[c], b = other[c];
      row[c] = a * cos[c] - b * sin[c];
      other[c] = b * cos[c] + a * sin[c];
    }
    // Before the rotation every value is finite; sums beyond float32 are the one way to leave that.
    kv_u32 beyond = 0;
    for (kv_u32 c = 0; c < p_.width; ++c) beyond |= (kv_u32)!(std::fabs(row[c]) <= 3.402823466e+38f);
    overflow_ |= beyond != 0;
  }

  RowPlace p_{};
  bool contiguous_ = true;
  bool overflow_ = false;
};

}  // namespace kv
