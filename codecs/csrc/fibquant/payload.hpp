// Payload of a FibQuant frame: which vectors are coded, which raw, and where their bytes are. No STL, for NVRTC. The
// layout: FORMAT.md, the section of FibQuant.
#pragma once

#include "../plan_tables.hpp"

namespace kv::fib {

enum Form : kv_u8 { kCoded = 0, kRaw = 1, kMixed = 2 };

// Reasons why a vector is raw. Encoders find two of them; 1 protected region, 2 raw axis policy, 5 quality budget come
// from outside.
enum Reason : kv_u8 { kZeroNorm = 3, kNormBeyondFloat16 = 4 };
constexpr kv_u32 kReasons = 5;

enum Check : kv_u8 { kWhole = 0, kTruncated = 1, kCorrupt = 2, kUnknown = 3 };

// Where the parts of a checked payload are: offsets in bytes.
struct Parts {
  kv_u64 n_coded, n_raw;
  kv_u64 runs, n_runs;  // of raw vectors; written only in form 2
  kv_u64 norms, indices, raw;
  OutputType raw_type;
  Form form;
  kv_u8 reason;  // of form 1
};

KV_HD Check take_varint(const kv_u8* bytes, kv_u64 n_bytes, kv_u64& at, kv_u64& value) {
  value = 0;
  for (kv_u32 shift = 0; shift < 64; shift += 7) {
    if (at >= n_bytes) return kTruncated;
    const kv_u8 b = bytes[at++];
    if (shift == 63 && b > 1) return kCorrupt;
    value |= (kv_u64)(b & 0x7F) << shift;
    if (b < 0x80) return kWhole;
  }
  return kCorrupt;
}

// Everything but indices and values: after this nothing of the payload is read out of bounds. n_vectors < 2^40.
KV_HD Check check_payload(const kv_u8* bytes, kv_u64 n_bytes, kv_u64 n_vectors, kv_u32 index_bytes, kv_u32 head_dim,
                          Parts& parts) {
  if (n_bytes == 0) return kTruncated;
  if (bytes[0] > kMixed) return kUnknown;
  kv_u64 at = 1;
  parts.form = (Form)bytes[0];
  parts.n_raw = parts.n_runs = parts.runs = 0;
  parts.reason = 0;
  parts.raw_type = kFloat32;
  if (parts.form == kRaw) {
    if (at >= n_bytes) return kTruncated;
    parts.reason = bytes[at++];
    if (parts.reason == 0 || parts.reason > kReasons) return kUnknown;
    parts.n_raw = n_vectors;
  } else if (parts.form == kMixed) {
    Check check = take_varint(bytes, n_bytes, at, parts.n_runs);
    if (check != kWhole) return check;
    if (parts.n_runs == 0 || parts.n_runs > n_vectors) return kCorrupt;
    parts.runs = at;
    kv_u64 seen = 0;
    for (kv_u64 i = 0; i < parts.n_runs; ++i) {
      kv_u64 gap, length;
      check = take_varint(bytes, n_bytes, at, gap);
      if (check == kWhole) check = take_varint(bytes, n_bytes, at, length);
      if (check != kWhole) return check;
      if (gap > n_vectors - seen || length == 0 || length > n_vectors - seen - gap) return kCorrupt;
      if (at >= n_bytes) return kTruncated;
      const kv_u8 reason = bytes[at++];
      if (reason == 0 || reason > kReasons) return kUnknown;
      seen += gap + length;
      parts.n_raw += length;
    }
  }
  kv_u64 itemsize = 0;
  if (parts.form != kCoded) {
    if (at >= n_bytes) return kTruncated;
    const kv_u8 type = bytes[at++];
    if (type > kBfloat16) return kUnknown;
    parts.raw_type = (OutputType)type;
    itemsize = type == kFloat32 ? 4 : 2;
  }
  parts.n_coded = n_vectors - parts.n_raw;
  parts.norms = at;
  parts.indices = parts.norms + 2 * parts.n_coded;
  parts.raw = parts.indices + parts.n_coded * index_bytes;
  const kv_u64 end = parts.raw + parts.n_raw * head_dim * itemsize;
  return n_bytes < end ? kTruncated : n_bytes > end ? kCorrupt : kWhole;
}

// Walks over the vectors of a checked payload, in ascending order.
struct Runs {
  const kv_u8* bytes;
  kv_u64 n_bytes, at, left;  // runs that are still to be read
  kv_u64 begin, end;         // the present run of raw vectors
  kv_u64 raw_before;         // raw vectors before it

  KV_HD void start(const kv_u8* payload, kv_u64 size, const Parts& parts, kv_u64 n_vectors) {
    bytes = payload;
    n_bytes = size;
    at = parts.runs;
    left = parts.n_runs;
    begin = end = raw_before = 0;
    if (parts.form == kRaw) end = n_vectors;
  }

  // Goes on to the first run that ends after the vector; where there is none, to an empty one behind all vectors.
  KV_HD void seek(kv_u64 vector) {
    while (vector >= end) {
      raw_before += end - begin;
      if (left == 0) {
        begin = end = ~(kv_u64)0;
        return;
      }
      --left;
      kv_u64 gap = 0, length = 0;
      take_varint(bytes, n_bytes, at, gap);
      take_varint(bytes, n_bytes, at, length);
      ++at;  // the reason
      begin = end + gap;
      end = begin + length;
    }
  }

  // After `seek(vector)`: whether the vector is raw, and its number among the raw or the coded ones.
  KV_HD bool raw(kv_u64 vector) const { return vector >= begin; }
  KV_HD kv_u64 number(kv_u64 vector) const {
    return vector >= begin ? raw_before + (vector - begin) : vector - raw_before;
  }
};

}  // namespace kv::fib
