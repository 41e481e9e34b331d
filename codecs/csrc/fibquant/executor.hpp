// Frames of FibQuant: the CPU executor of a plan's blocks, and coded vectors alone.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "../payload.hpp"
#include "../row_blocks.hpp"
#include "../rows.hpp"
#include "../widen.hpp"
#include "encoder.hpp"
#include "payload.hpp"
#include "tables.hpp"

namespace kv::fib {

struct Tables {
  std::vector<const Book*> books;
  const RowBlock* blocks;
  kv_u64 n_blocks;
  const Stream* streams;
  kv_u64 n_streams;
  const kv_u32* order;
  kv_u64 n_order;
  const float* channels;
  kv_u64 n_channels;
  std::vector<Payload> payloads;
  std::vector<Output> outputs;
  std::vector<RopeTable> ropes;
};

// Everything that decoding will index, but for the payload.
inline const char* block_fault(const Tables& p, const RowBlock& b) {
  if (b.stream >= p.n_streams) return "stream";
  const Stream& s = p.streams[b.stream];
  if (s.book >= p.books.size()) return "book";
  if (s.head_dim != p.books[s.book]->d) return "head_dim of the book";
  if (s.heads == 0 || s.heads > kMostValues / s.head_dim) return "heads";
  const kv_u64 n = (kv_u64)s.heads * s.head_dim;
  if (s.channels != kNoChannels && (s.channels > p.n_channels || 2 * n > p.n_channels - s.channels)) return "channels";
  if (b.payload >= p.payloads.size()) return "payload";
  return row_place_fault(p, b, s);
}

// A norm that encoders write: finite and above zero.
inline bool good_norm(kv_u16 norm) { return norm > 0 && norm < 0x7C00; }

inline kv_u16 load16(const kv_u8* at) { return (kv_u16)(at[0] | at[1] << 8); }

// Decodes one frame, or a piece of it.
class FrameDecoder {
 public:
  FrameDecoder(const Tables& p, const RowBlock& b, int level, Batch& batch)
      : p_(p), b_(b), s_(p.streams[b.stream]), book_(*p.books[s_.book]), out_(p.outputs[b.output]),
        bytes_(p.payloads[b.payload].bytes), kernels_(kernels_of(level)), narrow_(narrow_of(level)), batch_(batch) {
    batch_.fit(book_);
  }

  // Vectors [first, last) of those that the block wants, head after head.
  Status run(kv_u64 first, kv_u64 last) {
    const kv_u64 n_vectors = (kv_u64)s_.heads * b_.n_tokens, wanted = b_.stop - b_.skip;
    const Payload& payload = p_.payloads[b_.payload];
    if (check_payload(payload.bytes, payload.n_bytes, n_vectors, book_.index_bytes, book_.d, parts_) != kWhole)
      return kBadBlock;
    Runs runs;
    runs.start(payload.bytes, payload.n_bytes, parts_, n_vectors);
    Place place{(kv_u32)(first / wanted), first % wanted};
    for (kv_u64 v = first; v < last; ++v, place.next(wanted)) {
      const kv_u64 vector = place.head * (kv_u64)b_.n_tokens + b_.skip + place.row;
      runs.seek(vector);
      const kv_u64 number = runs.number(vector);
      if (runs.raw(vector)) {
        if (!write_raw(number, place)) return kBadBlock;
        continue;
      }
      const kv_u8* const indices = bytes_ + parts_.indices + number * book_.index_bytes;
      batch_.norms[n_] = load16(bytes_ + parts_.norms + 2 * number);
      if (!good_norm(batch_.norms[n_]) || !unpack_indices(book_, indices, n_, batch_.index)) return kBadBlock;
      places_[n_] = place;
      if (++n_ == kLanes && !flush()) return kBadBlock;
    }
    if (!flush()) return kBadBlock;
    return overflow_ || writer_.overflow() ? kOverflow : kOk;
  }

 private:
  struct Place {
    kv_u32 head;
    kv_u64 row;

    void next(kv_u64 wanted) {
      if (++row == wanted) row = 0, ++head;
    }
  };

  bool flush() {
    if (n_ == 0) return true;
    const kv_u32 d = book_.d;
    for (kv_u32 l = n_; l < kLanes; ++l) {
      batch_.norms[l] = 0;
      for (kv_u32 b = 0; b < book_.blocks; ++b) batch_.index[b * kLanes + l] = 0;
    }
    kernels_.decode(book_, batch_);
    if (s_.channels != kNoChannels) {
      const float* const mean = p_.channels + s_.channels;
      const float* const scale = mean + (kv_u64)s_.heads * d;
      for (kv_u32 l = 0; l < n_; ++l)
        together(mean + (kv_u64)places_[l].head * d, scale + (kv_u64)places_[l].head * d, d, row(l));
    }
    if (!all_finite(batch_.rows, (kv_u64)n_ * d)) return false;
    for (kv_u32 l = 0; l < n_; ++l) write(places_[l], row(l));
    n_ = 0;
    return true;
  }

  bool write_raw(kv_u64 number, const Place& place) {
    const kv_u32 d = book_.d;
    const kv_u8* const from = bytes_ + parts_.raw + number * d * (parts_.raw_type == kFloat32 ? 4 : 2);
    raw_.resize(2 * (kv_u64)d);
    float* const values = raw_.data();
    if (parts_.raw_type == kFloat32) {
      std::memcpy(values, from, 4 * (std::size_t)d);
    } else {
      kv_u16* const halves = (kv_u16*)(values + d);
      std::memcpy(halves, from, 2 * (std::size_t)d);
      (parts_.raw_type == kFloat16 ? widen_half : widen_bfloat16)(halves, d, values);
    }
    if (!all_finite(values, d)) return false;
    write(place, values);
    return true;
  }

  void write(const Place& place, float* values) {
    if (writer_head_ != (kv_i64)place.head) {
      overflow_ |= writer_.overflow();
      writer_ = RowWriter(RowPlace{&out_, b_.rope < 0 ? nullptr : &p_.ropes[b_.rope], p_.order + s_.order, 1,
                                   s_.head_dim, place.head, b_.row, b_.rope_row, 0, s_.n_pairs, &narrow_});
      writer_head_ = place.head;
    }
    writer_.write(place.row, values);
  }

  float* row(kv_u32 lane) { return batch_.rows + (kv_u64)lane * book_.d; }

  const Tables& p_;
  const RowBlock& b_;
  const Stream& s_;
  const Book& book_;
  const Output& out_;
  const kv_u8* bytes_;
  const Kernels& kernels_;
  const Narrow& narrow_;
  Batch& batch_;
  Parts parts_{};
  Place places_[kLanes]{};
  kv_u32 n_ = 0;  // vectors in the batch
  Aligned<float> raw_;
  RowWriter writer_;
  kv_i64 writer_head_ = -1;
  bool overflow_ = false;
};

// The output does not depend on who decodes what. False: memory ran out.
inline bool run_blocks(const Tables& p, kv_u8* status, unsigned n_threads, int level) {
  constexpr kv_u64 kValuesAtOnce = 1 << 16;
  struct Piece {
    kv_u64 block, first, last;
    Status status;
  };
  std::vector<Piece> pieces;
  for (kv_u64 i = 0; i < p.n_blocks; ++i) {
    const RowBlock& b = p.blocks[i];
    const Stream& s = p.streams[b.stream];
    const kv_u64 wanted = (kv_u64)s.heads * (b.stop - b.skip), step = std::max<kv_u64>(1, kValuesAtOnce / s.head_dim);
    status[i] = kOk;
    for (kv_u64 v = 0; v < wanted; v += step) pieces.push_back({i, v, std::min(v + step, wanted), kOk});
  }
  const bool ok = run_pieces<Batch>(pieces.size(), n_threads, [&](std::size_t i, Batch& batch) {
    Piece& piece = pieces[i];
    piece.status = FrameDecoder(p, p.blocks[piece.block], level, batch).run(piece.first, piece.last);
  });
  for (const Piece& piece : pieces)
    if (piece.status != kOk && status[piece.block] != kBadBlock) status[piece.block] = (kv_u8)piece.status;
  return ok;
}

// Coded vectors one after the other. `bad`: the first that is none, or -1; its values are zeros. False: memory ran out.
inline bool decode_vectors(const Book& book, const kv_u16* norms, const kv_u8* indices, kv_u64 n, float* out,
                           unsigned n_threads, int level, kv_i64& bad) {
  const Kernels& kernels = kernels_of(level);
  const kv_u64 n_pieces = (n + kVectorsAtOnce - 1) / kVectorsAtOnce;
  std::vector<kv_i64> first_bad(n_pieces, -1);
  const bool ok = run_pieces<Batch>(n_pieces, n_threads, [&](std::size_t piece, Batch& batch) {
    batch.fit(book);
    const kv_u64 stop = std::min(n, (piece + 1) * kVectorsAtOnce);
    for (kv_u64 v = piece * kVectorsAtOnce; v < stop; v += kLanes) {
      const kv_u64 many = std::min<kv_u64>(kLanes, stop - v);
      for (kv_u32 l = 0; l < kLanes; ++l) {
        const kv_u64 at = v + (l < many ? l : 0);
        const bool good = unpack_indices(book, indices + at * book.index_bytes, l, batch.index) && good_norm(norms[at]);
        batch.norms[l] = good ? norms[at] : 0;
        if (!good && first_bad[piece] < 0) first_bad[piece] = (kv_i64)at;
      }
      kernels.decode(book, batch);
      std::memcpy(out + v * book.d, batch.rows, many * book.d * sizeof(float));
    }
  });
  bad = -1;
  for (kv_u64 i = n_pieces; i-- > 0;)
    if (first_bad[i] >= 0) bad = first_bad[i];
  return ok;
}

}  // namespace kv::fib
