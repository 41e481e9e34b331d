// Frames of rows of blocks: the CPU executor of a plan's row blocks, and their encoder. A row is one token of a stream,
// all heads; a payload is rows and nothing else. FORMAT.md section 10.
#pragma once

#include <vector>

#include "../aligned.hpp"
#include "../error_sums.hpp"
#include "../measure.hpp"
#include "../payload.hpp"
#include "../row_blocks.hpp"
#include "pieces.hpp"

namespace kv::ggml {

// What the blocks of one stream share. rows.STREAM_DTYPE is the same struct.
struct RowStream {
  kv_u64 order;  // first entry in the order table: output channel of each coded channel of a head
  kv_u32 scheme;
  kv_u32 heads;
  kv_u32 head_dim;
  kv_u32 n_pairs;  // RoPE pairs of a head
};
static_assert(sizeof(RowStream) == 24, "rows.STREAM_DTYPE");

struct RowTables {
  const RowBlock* blocks;
  kv_u64 n_blocks;
  const RowStream* streams;
  kv_u64 n_streams;
  const kv_u32* order;
  kv_u64 n_order;
  std::vector<Payload> payloads;
  std::vector<Output> outputs;
  std::vector<RopeTable> ropes;
};

inline constexpr kv_u32 kMostRowValues = 1u << 20;  // as in kvcodecs/spec.py

// Everything that decoding will index, so that no plan whatever reads or writes outside its tables.
inline const char* row_block_fault(const RowTables& p, const RowBlock& b) {
  if (b.stream >= p.n_streams) return "stream";
  const RowStream& s = p.streams[b.stream];
  if (s.heads == 0 || s.head_dim == 0 || s.head_dim > kMostRowValues || s.heads > kMostRowValues / s.head_dim)
    return "heads";
  const Format format = format_of(s.scheme);
  if (format.values == 0 || decoder(s.scheme, kPortable) == nullptr) return "scheme";
  const kv_u64 n = (kv_u64)s.heads * s.head_dim;
  if (n % format.values) return "blocks of a row";
  if (b.payload >= p.payloads.size()) return "payload";
  if (p.payloads[b.payload].n_bytes != n / format.values * format.bytes * b.n_tokens) return "bytes of the payload";
  return row_place_fault(p, b, s);
}

// Values of rows that are decoded or encoded together.
class RowScratch {
 public:
  // Rows of `n` values: room for as many as fit a piece, at least one.
  kv_u64 rows_of(kv_u64 n) {
    const kv_u64 rows = std::max<kv_u64>(1, kPieceValues / n);
    values_.resize(rows * n);
    return rows;
  }
  float* values() { return values_.data(); }
  // Instead of them.
  kv_u16* halves() { return (kv_u16*)values_.data(); }
  std::vector<RowWriter> writers;

 private:
  Aligned<float> values_;
};

// Rows [first, last) of those that a block wants.
inline Status run_rows(const RowTables& p, const RowBlock& b, kv_u32 first, kv_u32 last, int level, RowScratch& scratch) {
  const RowStream& s = p.streams[b.stream];
  const Output& out = p.outputs[b.output];
  const Decoding decoding(s.scheme, out.type, level);
  const Format format = decoding.format;
  const Decode decode = decoding.decode;
  const kv_u64 n = (kv_u64)s.heads * s.head_dim, row_blocks = n / format.values, at_once = scratch.rows_of(n);
  const kv_u8* const rows = p.payloads[b.payload].bytes + b.skip * row_blocks * format.bytes;
  scratch.writers.clear();
  for (kv_u32 head = 0; head < s.heads; ++head)
    scratch.writers.emplace_back(RowPlace{&out, b.rope < 0 ? nullptr : &p.ropes[b.rope], p.order + s.order, 1,
                                          s.head_dim, head, b.row, b.rope_row, 0, s.n_pairs, decoding.narrow});
  const bool plain = out.type == kFloat16 && b.rope < 0 && scratch.writers.front().contiguous();
  bool overflow = false;
  for (kv_u64 r = first; r < last; r += at_once) {
    const kv_u64 many = std::min<kv_u64>(at_once, last - r);
    if (plain && decoding.half != nullptr) {
      const kv_u16* halves = scratch.halves();
      overflow |= !decoding.half(rows + r * row_blocks * format.bytes, many * row_blocks, scratch.halves());
      kv_u16* const target = (kv_u16*)out.data + (kv_i64)(b.row + r) * out.row_stride + p.order[s.order];
      for (kv_u64 i = 0; i < many; ++i)
        for (kv_u32 head = 0; head < s.heads; ++head, halves += s.head_dim)
          std::memcpy(target + (kv_i64)head * out.head_stride + (kv_i64)i * out.row_stride, halves, 2 * s.head_dim);
      continue;
    }
    float* const values = scratch.values();
    decode(rows + r * row_blocks * format.bytes, many * row_blocks, values);
    // A scale that is no number is never written; in half rows it shows as an overflow below.
    if (out.type != kFloat16 || b.rope >= 0)
      if (!all_finite(values, many * n)) return kBadBlock;
    for (kv_u32 head = 0; head < s.heads; ++head)
      for (kv_u64 i = 0; i < many; ++i)
        scratch.writers[head].write(r + i, values + i * n + (kv_u64)head * s.head_dim);
  }
  for (const RowWriter& writer : scratch.writers) overflow |= writer.overflow();
  if (!overflow) return kOk;
  for (kv_u64 r = first; r < last; ++r) {
    decode(rows + r * row_blocks * format.bytes, row_blocks, scratch.values());
    if (!all_finite(scratch.values(), n)) return kBadBlock;
  }
  return kOverflow;
}

// The output does not depend on who decodes what. False: memory ran out.
inline bool run_row_blocks(const RowTables& p, kv_u8* status, unsigned n_threads, int level) {
  constexpr kv_u64 kValuesAtOnce = 1 << 16;
  struct Piece {
    kv_u64 block;
    kv_u32 first, last;
    Status status;
  };
  std::vector<Piece> pieces;
  for (kv_u64 i = 0; i < p.n_blocks; ++i) {
    const RowBlock& b = p.blocks[i];
    const RowStream& s = p.streams[b.stream];
    const kv_u32 wanted = b.stop - b.skip;
    const kv_u32 step = (kv_u32)std::max<kv_u64>(1, kValuesAtOnce / ((kv_u64)s.heads * s.head_dim));
    status[i] = kOk;
    for (kv_u32 r = 0; r < wanted; r += step) pieces.push_back({i, r, r + std::min(step, wanted - r), kOk});
  }
  const bool ok = run_pieces<RowScratch>(pieces.size(), n_threads, [&](std::size_t i, RowScratch& scratch) {
    Piece& piece = pieces[i];
    piece.status = run_rows(p, p.blocks[piece.block], piece.first, piece.last, level, scratch);
  });
  for (const Piece& piece : pieces)
    if (piece.status != kOk && status[piece.block] != kBadBlock) status[piece.block] = (kv_u8)piece.status;
  return ok;
}

// One frame under construction. Errors are measured by decoding what was written.
class RowEncoder {
 public:
  struct Geometry {
    kv_u32 heads, head_dim, scheme;
  };

  explicit RowEncoder(const Geometry& geometry)
      : geometry_(geometry), format_(format_of(geometry.scheme)), encode_(encoder(geometry.scheme, best_level())),
        decode_(decoder(geometry.scheme, best_level())) {}

  const Geometry& geometry() const { return geometry_; }
  kv_u64 row_bytes() const { return row_values() / format_.values * format_.bytes; }
  kv_u64 n_tokens() const { return payload_.size() / row_bytes(); }
  const std::vector<kv_u8>& payload() const { return payload_; }
  const ErrorSums& error() const { return error_; }

  // Goes on after rows that were coded before. They are whole rows.
  void resume(const kv_u8* rows, kv_u64 n_bytes, const ErrorSums& error) {
    payload_.assign(rows, rows + n_bytes);
    error_ = error;
  }

  // Appends tokens [heads][n][head_dim]. False, and nothing is appended: a scale leaves float16.
  bool push(const float* x, kv_u64 n, unsigned n_threads) {
    const kv_u64 width = row_values(), bytes = row_bytes(), blocks = width / format_.values, before = payload_.size();
    std::vector<double> largest(n), sums(n);
    payload_.resize(before + n * bytes);
    const kv_u64 job = std::max<kv_u64>(1, kPieceValues * kPiecesAtOnce / width);
    std::atomic<bool> fits{true};
    struct Scratch {
      Aligned<float> rows, decoded;
    };
    const bool ok = run_pieces<Scratch>((n + job - 1) / job, n_threads, [&](std::size_t j, Scratch& scratch) {
      const kv_u64 at_once = std::max<kv_u64>(1, kPieceValues / width), stop = std::min(n, (j + 1) * job);
      float* const rows = scratch.rows.resize(at_once * width);
      float* const decoded = scratch.decoded.resize(at_once * width);
      for (kv_u64 t = j * job; t < stop; t += at_once) {
        const kv_u64 many = std::min(at_once, stop - t);
        for (kv_u64 head = 0; head < geometry_.heads; ++head)
          for (kv_u64 i = 0; i < many; ++i)
            std::memcpy(rows + i * width + head * geometry_.head_dim, x + (head * n + t + i) * geometry_.head_dim,
                        geometry_.head_dim * sizeof(float));
        kv_u8* const out = payload_.data() + before + t * bytes;
        if (!encode_(rows, many * blocks, out)) fits = false;
        decode_(out, many * blocks, decoded);
        for (kv_u64 i = 0; i < many; ++i)
          measure(rows + i * width, decoded + i * width, width, largest[t + i], sums[t + i]);
      }
    });
    if (!ok || !fits) payload_.resize(before);
    if (!ok) throw std::bad_alloc();
    if (!fits) return false;
    // Token after token, however many come at a time.
    for (kv_u64 t = 0; t < n; ++t) error_.add({largest[t], sums[t], width});
    return true;
  }

 private:
  kv_u64 row_values() const { return (kv_u64)geometry_.heads * geometry_.head_dim; }

  Geometry geometry_;
  Format format_;
  Encode encode_;
  Decode decode_;
  std::vector<kv_u8> payload_;
  ErrorSums error_;
};

}  // namespace kv::ggml
