// FibQuant: a warp decodes a few vectors of a block at once. FORMAT.md section 11.
//
// A thread first looks through each payload: where its parts are, and which vectors are raw. Then warps take pieces: some
// wanted rows of one head of one block each.
#pragma once

#include "fibquant/payload.hpp"
#include "rotations.hpp"

namespace kv::gpu {

KV_DEVICE kv_u32 load16(const kv_u8* bytes) { return load(bytes) | (kv_u32)load(bytes + 1) << 8; }

// Which of 32 vectors are raw, and how many are before them.
struct RawVectors {
  kv_u32 mask, before;
};

// Marks raw vectors, in ascending order.
struct RawMarks {
  RawVectors* words;
  kv_u64 word;
  RawVectors present;

  KV_DEVICE void go_to(kv_u64 next) {
    for (; word < next; ++word) {
      words[word] = present;
      present = {0, present.before + count(present.mask)};
    }
  }
  KV_DEVICE void mark(kv_u64 first, kv_u64 stop) {
    while (first < stop) {
      go_to(first / 32);
      const kv_u64 until = 32 * (word + 1) < stop ? 32 * (word + 1) : stop;
      present.mask |= (0xFFFFFFFFu >> (32 - (kv_u32)(until - first))) << (first % 32);
      first = until;
    }
  }
};

// What is found in a payload.
struct Contents {
  fib::Parts parts;
  kv_u64 is_whole;  // if not, nothing else is known
};

KV_DEVICE bool look_through(const VectorArguments& a, kv_u64 i, fib::Parts& parts) {
  const RowBlock& b = at<const RowBlock>(a.blocks)[i];
  const fib::Stream& s = at<const fib::Stream>(a.streams)[b.stream];
  const Source& source = at<const Source>(a.sources)[b.payload];
  const kv_u8* bytes = at<const kv_u8>(source.bytes);
  const kv_u64 n = (kv_u64)s.heads * b.n_tokens;
  const kv_u32 index_bytes = at<const Book>(a.books)[s.book].index_bytes;
  if (fib::check_payload(bytes, source.n_bytes, n, index_bytes, s.head_dim, parts) != fib::kWhole) return false;
  if (parts.form != fib::kMixed) return true;
  RawMarks marks{at<RawVectors>(a.marks) + at<const Span>(a.spans)[i].first_mark, 0, {0, 0}};
  fib::Runs runs;
  runs.start(bytes, source.n_bytes, parts, n);
  for (runs.seek(0); runs.begin < n; runs.seek(runs.end)) marks.mark(runs.begin, runs.end);
  marks.go_to((n + 31) / 32);
  return true;
}

// All blocks that are thread `thread`'s, of however many threads.
KV_DEVICE void look_through_payloads(const VectorArguments& a, kv_u64 thread, kv_u64 n_threads) {
  for (kv_u64 i = thread; i < a.n_blocks; i += n_threads) {
    Contents& contents = at<Contents>(a.contents)[i];
    contents.is_whole = look_through(a, i, contents.parts);
  }
}

// What a warp decodes at once: successive rows [row, row + n) of those that a block wants, of one head.
struct Group {
  const VectorArguments* arguments;
  kv_u32 block, head, row, n;

  // The same, but nothing of it known yet: the device would rather keep all that it has once read of a block than read it
  // again, and runs out of registers.
  KV_DEVICE Group afresh() const {
    const VectorArguments* a = arguments;
#if defined(__CUDACC_RTC__)
    asm volatile("" : "+l"(a));
#endif
    return {a, block, head, row, n};
  }
  KV_DEVICE const RowBlock& rows() const { return at<const RowBlock>(arguments->blocks)[block]; }
  KV_DEVICE const fib::Stream& stream() const { return at<const fib::Stream>(arguments->streams)[rows().stream]; }
  KV_DEVICE const fib::Parts& parts() const { return at<const Contents>(arguments->contents)[block].parts; }
  KV_DEVICE const kv_u8* payload() const { return at<const kv_u8>(at<const Source>(arguments->sources)[rows().payload].bytes); }
};

// Where its vectors are: their numbers among the raw or the coded ones.
struct Numbers {
  kv_u32 raw;  // which are raw, as bits
  kv_u32 of[kTogether];

  KV_DEVICE bool is_raw(kv_u32 t) const { return (raw >> t & 1) != 0; }
};

// Vectors that there are not are those before them.
KV_DEVICE Numbers numbers_of(const Group& group) {
  const fib::Parts& parts = group.parts();
  const RowBlock& b = group.rows();
  const RawVectors* marks = at<const RawVectors>(group.arguments->marks);
  marks += at<const Span>(group.arguments->spans)[group.block].first_mark;
  const kv_u32 first = group.head * b.n_tokens + b.skip + group.row;
  Numbers numbers{0, {}};
  KV_UNROLL
  for (kv_u32 t = 0; t < kTogether; ++t) {
    const kv_u32 vector = first + (t < group.n ? t : group.n - 1);
    bool raw = parts.form == fib::kRaw;
    numbers.of[t] = vector;
    if (parts.form == fib::kMixed) {
      const RawVectors word = marks[vector / 32];
      const kv_u32 before = word.before + count(word.mask & lanes_below(vector % 32));
      raw = word.mask >> (vector % 32) & 1;
      numbers.of[t] = raw ? before : vector - before;
    }
    numbers.raw |= (kv_u32)raw << t;
  }
  return numbers;
}

// An index of a vector, which begins at `bytes`.
KV_DEVICE kv_u32 index_at(const kv_u8* bytes, kv_u32 i, kv_u32 bits) {
  const kv_u32 first = i * bits, last = first + bits - 1;
  kv_u32 word = 0;
  KV_ROLLED
  for (kv_u32 n = first / 8; n <= last / 8; ++n) word |= (kv_u32)load(bytes + n) << 8 * (n - first / 8);
  return word >> first % 8 & ((1u << bits) - 1);
}

// Codewords of the coded vectors; zeros for raw ones. Lanes take the vectors by turns.
KV_DEVICE void gather(const Book& book, const kv_u8* indices, const Numbers& numbers, Together* g, PerLane<bool>& bad) {
  const kv_u32 n_indices = book.d / book.k, bits = book.index_bits, unused = 8 * book.index_bytes - n_indices * bits;
  KV_EACH_LANE(i) {
    const kv_u32 t = i % kTogether;
    kv_u32 number = numbers.of[0];
    KV_UNROLL
    for (kv_u32 other = 1; other < kTogether; ++other) number = t == other ? numbers.of[other] : number;
    const bool coded = !numbers.is_raw(t);
    const kv_u8* bytes = indices + (kv_u64)number * book.index_bytes;
    // Bits that belong to no index are zeros.
    if (coded && i < kTogether && unused != 0 && load(bytes + (book.index_bytes - 1)) >> (8 - unused) != 0) bad[i] = true;
    float* channel = &g[i / kTogether * book.k].of[t];
    KV_ROLLED
    for (kv_u32 b = i / kTogether; b < n_indices; b += 32 / kTogether) {
      kv_u32 index = coded ? index_at(bytes, b, bits) : 0;
      if (index >= book.n_codewords) {
        bad[i] = true;
        index = 0;
      }
      const float* codeword = at<const float>(book.codewords) + (kv_u64)index * book.k;
      KV_ROLLED
      for (kv_u32 c = 0; c < book.k; ++c, channel += kTogether) *channel = coded ? load(codeword + c) : 0.0f;
      channel += (32 / kTogether - 1) * kTogether * book.k;
    }
  }
}

// Rotated codewords. They are left in the first or the second half of `room`, which is returned.
KV_DEVICE Together* rotate(const Group& group, Together* room, PerLane<bool>& bad) {
  const Numbers numbers = numbers_of(group);
  if (numbers.raw == (1u << kTogether) - 1) return room;
  const Book& book = at<const Book>(group.arguments->books)[group.stream().book];
  gather(book, group.payload() + group.parts().indices, numbers, room, bad);
  sync_warp();
  const float* rotation = at<const float>(book.rotation);
  if (book.rotation_kind != 0) {
    hadamard_inverse(rotation, book.d, book.power, book.factor, room);
    return room;
  }
  Together* rotated = room + book.d;
  haar_inverse(rotation, book.d, book.k, room, rotated);
  sync_warp();
  return rotated;
}

KV_DEVICE kv_u32 magnitude_of(float value) {
  FloatBits f;
  f.value = value;
  return f.bits & 0x7FFFFFFFu;
}

KV_DEVICE float raw_value(const kv_u8* values, kv_u64 i, OutputType type) {
  FloatBits f;
  if (type == kFloat32) {
    f.bits = load16(values + 4 * i) | load16(values + 4 * i + 2) << 16;
    return f.value;
  }
  const kv_u32 half = load16(values + 2 * i);
  f.bits = half << 16;
  return type == kFloat16 ? widen16((kv_u16)half) : f.value;
}

// From rotated codewords to values: norms, then scales and means of channels where the stream has them.
KV_DEVICE void scale_vectors(const Group& group, Together* x, PerLane<bool>& bad) {
  const Numbers numbers = numbers_of(group);
  const fib::Stream& s = group.stream();
  const fib::Parts& parts = group.parts();
  const kv_u8* payload = group.payload();
  const kv_u32 d = s.head_dim;
  if (numbers.raw != (1u << kTogether) - 1) {
    Together norm;
    bool bad_norm = false;
    KV_UNROLL
    for (kv_u32 t = 0; t < kTogether; ++t) {
      kv_u32 bits = 0x3C00;
      if (!numbers.is_raw(t)) bits = load16(payload + parts.norms + 2 * (kv_u64)numbers.of[t]);
      norm.of[t] = widen16((kv_u16)bits);
      bad_norm |= bits - 1 >= 0x7C00 - 1;  // encoders leave finite ones, above zero
    }
    const bool has_channels = s.channels != fib::kNoChannels;
    const float* mean = at<const float>(group.arguments->channels);
    if (has_channels) mean += s.channels + (kv_u64)group.head * d;
    const float* scale = mean + (has_channels ? (kv_u64)s.heads * d : 0);
    KV_EACH_LANE(i) {
      kv_u32 largest = bad_norm ? ~0u : 0;
      KV_ROLLED
      for (kv_u32 c = i; c < d; c += 32) {
        Together value = x[c];
        KV_UNROLL
        for (kv_u32 t = 0; t < kTogether; ++t) value.of[t] = multiply(value.of[t], norm.of[t]);
        if (has_channels) {
          const float factor = load(scale + c), offset = load(mean + c);
          KV_UNROLL
          for (kv_u32 t = 0; t < kTogether; ++t) value.of[t] = add(multiply(value.of[t], factor), offset);
        }
        KV_UNROLL
        for (kv_u32 t = 0; t < kTogether; ++t) keep_largest(largest, magnitude_of(value.of[t]));
        x[c] = value;
      }
      if (overflows<kFloat32>(largest)) bad[i] = true;
    }
  }
  if (numbers.raw == 0) return;
  KV_UNROLL
  for (kv_u32 t = 0; t < kTogether; ++t) {
    if (!numbers.is_raw(t)) continue;
    KV_EACH_LANE(i) {
      kv_u32 largest = 0;
      KV_ROLLED
      for (kv_u32 c = i; c < d; c += 32) {
        const float value = raw_value(payload + parts.raw, (kv_u64)numbers.of[t] * d + c, parts.raw_type);
        keep_largest(largest, magnitude_of(value));
        x[c].of[t] = value;
      }
      if (overflows<kFloat32>(largest)) bad[i] = true;
    }
  }
}

// A row of each vector to the output, a channel to each lane.
template <kv_u32 kType, bool kRotated>
KV_DEVICE void emit_rows(const Group& group, const Together* values, PerLane<bool>& overflow) {
  const VectorArguments& a = *group.arguments;
  const RowBlock& b = group.rows();
  const fib::Stream& s = group.stream();
  const Target& target = at<const Target>(a.targets)[b.output];
  const kv_u64 head_bytes = (kv_u64)(group.head * target.head_stride) * size_of(kType);
  const kv_u32 n = group.n, d = s.head_dim, half = d / 2;
  kv_u64 rows[kTogether];
  KV_UNROLL
  for (kv_u32 t = 0; t < kTogether; ++t) rows[t] = row_address(target, b.row + group.row + (t < n ? t : 0)) + head_bytes;
  const kv_u32* order = fixed(at<const kv_u32>(a.order) + s.order);
  RotationRow rotation{nullptr, nullptr};
  kv_u32 n_pairs = 0;
  kv_u64 pairs = 0;
  if (kRotated) {
    const Rotation& table = at<const Rotation>(a.rotations)[b.rope];
    rotation = rotation_row(&table, b.rope_row + group.row, 0);
    n_pairs = s.n_pairs;
    pairs = table.pairs;
  }
  KV_EACH_LANE(i) {
    kv_u32 largest = 0;
    KV_ROLLED
    for (kv_u32 c = i; c < d; c += 32) {
      const kv_u32 channel = load(order + c), pair = c < half ? c : c - half;
      const bool turns = kRotated && pair < n_pairs;
      const Together own = values[c], other = values[!turns ? c : c < half ? c + half : pair];
      KV_UNROLL
      for (kv_u32 t = 0; t < kTogether; ++t) {
        if (t >= n) continue;
        float value = own.of[t];
        if (turns) {
          const kv_u64 entry = t * pairs + pair;
          const float near = multiply(value, load(rotation.cos + entry));
          const float far = multiply(other.of[t], load(rotation.sin + entry));
          value = c < half ? subtract(near, far) : add(near, far);
        }
        put<kType>(rows[t], channel, value, kRotated, largest);
      }
    }
    if (overflows<kType>(largest)) overflow[i] = true;
  }
}

template <kv_u32 kType>
KV_DEVICE void emit(const Group& group, const Together* values, PerLane<bool>& overflow) {
  if (group.rows().rope < 0)
    emit_rows<kType, false>(group, values, overflow);
  else
    emit_rows<kType, true>(group, values, overflow);
}

// Room of a warp: what is gathered, and what is rotated.
KV_HD kv_u64 vector_words(kv_u64 head_dim) { return 2 * kTogether * head_dim; }

KV_DEVICE Status decode_piece(const VectorArguments& a, kv_u32 block, kv_u32 piece, Together* room) {
  if (!at<const Contents>(a.contents)[block].is_whole) return kBadBlock;
  const RowBlock& b = at<const RowBlock>(a.blocks)[block];
  const kv_u32 wanted = b.stop - b.skip, pieces = (wanted + kPieceRows - 1) / kPieceRows;
  Group group{&a, block, piece / pieces, piece % pieces * kPieceRows, 0};
  const kv_u32 stop = wanted - group.row < kPieceRows ? wanted : group.row + kPieceRows;
  PerLane<bool> bad, overflow;
  KV_EACH_LANE(i) { bad[i] = overflow[i] = false; }
  for (; group.row < stop; group.row += kTogether) {
    group.n = stop - group.row < kTogether ? stop - group.row : kTogether;
    Together* values = rotate(group.afresh(), room, bad);
    scale_vectors(group.afresh(), values, bad);
    sync_warp();
    if (any(bad)) return kBadBlock;
    const Group last = group.afresh();
    const kv_u32 type = at<const Target>(last.arguments->targets)[last.rows().output].type;
    if (type == kFloat32)
      emit<kFloat32>(last, values, overflow);
    else if (type == kFloat16)
      emit<kFloat16>(last, values, overflow);
    else
      emit<kBfloat16>(last, values, overflow);
    sync_warp();
  }
  return any(overflow) ? kOverflow : kOk;
}

// All pieces that are warp `warp`'s, of however many warps. In `shared` each warp of a thread block has its own words.
KV_DEVICE void decode_vectors(const VectorArguments& a, kv_u32 warp, kv_u32 warp_of_thread_block, Together* shared) {
  if (warp >= a.n_warps) return;
  const Span* spans = at<const Span>(a.spans);
  for (kv_u32 i = warp; i < (kv_u32)a.n_pieces; i += (kv_u32)a.n_warps) {
    kv_u32 block = 0;  // the last that begins at piece i or before
    for (kv_u32 stop = (kv_u32)a.n_blocks; stop - block > 1;) {
      const kv_u32 middle = block + (stop - block) / 2;
      (spans[middle].first_piece <= i ? block : stop) = middle;
    }
    const kv_u32 stream = at<const RowBlock>(a.blocks)[block].stream;
    const bool fits = vector_words(at<const fib::Stream>(a.streams)[stream].head_dim) <= a.shared_words;
    Together* room = fits ? shared + warp_of_thread_block * ((kv_u32)a.shared_words / kTogether)
                          : at<Together>(a.scratch) + warp * (a.scratch_words / kTogether);
    const Status status = decode_piece(a, block, i - (kv_u32)spans[block].first_piece, room);
    KV_EACH_LANE(lane) {
      if (lane == 0) at<kv_u8>(a.status)[i] = status;
    }
  }
}

}  // namespace kv::gpu
