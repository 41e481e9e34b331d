// Runs of blocks to and from contiguous values of any float type, piece by piece through a scratch that stays in the
// first cache.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "../narrow.hpp"
#include "../rows.hpp"
#include "../threads.hpp"
#include "../widen.hpp"
#include "decode.hpp"
#include "encode.hpp"

namespace kv::ggml {

// Values of a piece: 8 KB of floats. A multiple of every block size.
inline constexpr kv_u64 kPieceValues = 2048;
// Pieces that one thread takes at a time.
inline constexpr kv_u64 kPiecesAtOnce = 16;

KV_CLONES static bool narrow_bfloat16(const float* __restrict x, kv_u64 n, kv_u16* __restrict out) {
  bool overflow = false;
  for (kv_u64 i = 0; i < n; ++i) out[i] = to_bfloat16(x[i], overflow);
  return overflow;
}

// What turns blocks of a scheme into values of an output type.
struct Decoding {
  Format format;
  Decode decode;
  DecodeHalf half;  // null: through floats
  const Narrow* narrow;
  OutputType type;

  Decoding(kv_u32 scheme, OutputType output, int level)
      : format(format_of(scheme)), decode(decoder(scheme, level)), half(half_decoder(scheme, level)),
        narrow(&narrow_of(level)), type(output) {}

  // At most kPieceValues values. Whether one of them overflows; `scratch` is room for kPieceValues.
  bool piece(const kv_u8* blocks, kv_u64 n_blocks, void* out, float* scratch) const {
    if (type == kFloat32) {
      decode(blocks, n_blocks, (float*)out);
      return false;
    }
    if (type == kFloat16 && half != nullptr) return !half(blocks, n_blocks, (kv_u16*)out);
    const kv_u64 n = n_blocks * format.values;
    decode(blocks, n_blocks, scratch);
    if (type == kFloat16) return narrow->row(scratch, (kv_u32)n, (kv_u16*)out);
    return narrow_bfloat16(scratch, n, (kv_u16*)out);
  }
};

// Decodes blocks to contiguous values. Sets `overflow` if a value does not fit. False: memory ran out.
inline bool decode_values(const Decoding& decoding, const kv_u8* blocks, kv_u64 n_blocks, void* out, unsigned n_threads,
                          bool& overflow) {
  const kv_u64 share = kPieceValues / decoding.format.values, job = share * kPiecesAtOnce;
  const kv_u64 itemsize = decoding.type == kFloat32 ? 4 : 2;
  struct Scratch {
    alignas(64) float values[kPieceValues];
  };
  std::atomic<bool> beyond{false};
  const bool ok = run_pieces<Scratch>((n_blocks + job - 1) / job, n_threads, [&](std::size_t j, Scratch& scratch) {
    const kv_u64 stop = std::min(n_blocks, (j + 1) * job);
    bool any = false;
    for (kv_u64 b = j * job; b < stop; b += share)
      any |= decoding.piece(blocks + b * decoding.format.bytes, std::min(share, stop - b),
                            (kv_u8*)out + b * decoding.format.values * itemsize, scratch.values);
    if (any) beyond = true;
  });
  overflow = beyond;
  return ok;
}

// Where encoding met what cannot be coded: the first value that is not finite, or the first block whose scale leaves
// float16; -1 each where there is none.
struct Refused {
  kv_i64 value = -1, block = -1;
};

// Encodes contiguous values of any float type. False: memory ran out.
inline bool encode_values(Format format, Encode encode, OutputType type, const void* x, kv_u64 n_blocks, kv_u8* out,
                          unsigned n_threads, Refused& refused) {
  const kv_u64 share = kPieceValues / format.values, job = share * kPiecesAtOnce;
  struct Scratch {
    alignas(64) float values[kPieceValues];
  };
  constexpr kv_i64 kNone = 0x7FFFFFFFFFFFFFFF;
  std::atomic<kv_i64> bad_value{kNone}, bad_block{kNone};
  auto lower = [](std::atomic<kv_i64>& least, kv_i64 at) {
    for (kv_i64 now = least; at < now && !least.compare_exchange_weak(now, at);) {
    }
  };
  const bool ok = run_pieces<Scratch>((n_blocks + job - 1) / job, n_threads, [&](std::size_t j, Scratch& scratch) {
    const kv_u64 stop = std::min(n_blocks, (j + 1) * job);
    for (kv_u64 b = j * job; b < stop; b += share) {
      const kv_u64 many = std::min(share, stop - b), n = many * format.values, first = b * format.values;
      const float* values = (const float*)x + first;
      if (type != kFloat32) {
        (type == kFloat16 ? widen_half : widen_bfloat16)((const kv_u16*)x + first, n, scratch.values);
        values = scratch.values;
      }
      if (!all_finite(values, n)) {
        for (kv_u64 i = 0; i < n; ++i)
          if (!std::isfinite(values[i])) return lower(bad_value, (kv_i64)(first + i));
      }
      kv_u8* blocks = out + b * format.bytes;
      if (encode(values, many, blocks)) continue;
      for (kv_u64 i = 0; i < many; ++i)
        if (!encode(values + i * format.values, 1, blocks)) return lower(bad_block, (kv_i64)(b + i));
    }
  });
  if (bad_value != kNone) refused.value = bad_value;
  if (bad_block != kNone) refused.block = bad_block;
  return ok;
}

}  // namespace kv::ggml
