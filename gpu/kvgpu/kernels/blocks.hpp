// KVR1: a warp decodes a block, each lane one of its 32 states. FORMAT.md section 9; kvr1/portable.hpp is the CPU's.
#pragma once

#include "place.hpp"

namespace kv::gpu {

using namespace kvr1;

KV_DEVICE kv_u32 absolute(kv_i32 value) { return value < 0 ? 0u - (kv_u32)value : (kv_u32)value; }

// What a slot of a table means: `offset` is its place among the slots of its symbol.
struct Symbol {
  kv_u32 symbol, frequency, offset;
};

// Symbols looked up in RansTables.slots, 288 KB of memory.
struct SlotTables {
  const kv_u32* slots;
  KV_DEVICE Symbol find(kv_u32 table, kv_u32 slot) const {
    const kv_u32 word = load(slots + table * kSlots + slot);
    return {(kv_u32)(slot_value(word) + kZeroSymbol), slot_frequency(word), slot_offset(word)};
  }
};

// Symbols looked up in RansTables.compact, 81 KB of shared memory: two look-ups, whose lanes mostly meet different banks.
struct CompactTables {
  SharedWords words;
  KV_DEVICE Symbol find(kv_u32 table, kv_u32 slot) const {
    const kv_u32 symbol = words.byte(table * kSlots + slot);
    const kv_u32 word = words.word(kCompactSymbols + table * kCompactRow + symbol);
    return {symbol, word & (kSlots - 1), slot - (word >> 16)};
  }
};

KV_DEVICE Component load(const Component* from) {
#if defined(__CUDACC_RTC__)
  const int2 both = __ldg((const int2*)from);
  return {both.x, (kv_u32)both.y};
#else
  return *from;
#endif
}

// The words of a payload. Past their end zeros are read, and `next` tells afterwards.
struct BlockWords {
  const kv_u8* bytes;
  kv_u32 n, next;

  // The `i`th from here. As bytes, so that payloads may lie anywhere.
  KV_DEVICE kv_u32 at(kv_u32 i, bool wanted) const {
    i += next;
    const kv_u8* word = bytes + 2 * (kv_u64)i;
    return wanted && i < n ? load(word) | (kv_u32)load(word + 1) << 8 : 0;
  }
  KV_DEVICE kv_u32 take() {
    const kv_u32 word = at(0, true);
    ++next;
    return word;
  }
};

// An output overflowed: a bit above those of magnitudes, as a prediction plus a distance is below 2^31.
constexpr kv_u32 kOverflowed = 1u << 31;

template <class SymbolTables>
struct BlockDecoder {
  SymbolTables tables;
  const Component* components;
  kv_i32* previous;         // values of each component, of the token before or already of this one
  BlockWords words;
  kv_u32 least;             // states below it take a word: kLeastState, 0 where nothing renormalises
  kv_u32 sink_classes;      // added to classes
  kv_i32 scale;             // of residuals
  PerLane<kv_u32> x;
  PerLane<kv_u32> magnitude;  // the bits of those of all values, and kOverflowed

  // False: the payload is too short or its states are none.
  KV_DEVICE bool start(const Source& source) {
    if (source.n_bytes < kHeadBytes || source.n_bytes % 2 == 0) return false;
    const kv_u8* bytes = gpu::at<const kv_u8>(source.bytes);
    PerLane<bool> bad;
    KV_EACH_LANE(i) {
      const kv_u8* state = bytes + 1 + 4 * i;
      x[i] = state[0] | (kv_u32)state[1] << 8 | (kv_u32)state[2] << 16 | (kv_u32)state[3] << 24;
      bad[i] = x[i] < kLeastState;
      magnitude[i] = 0;
    }
    words = {bytes + kHeadBytes, (kv_u32)((source.n_bytes - kHeadBytes) / 2), 0};
    least = kLeastState;
    return !any(bad);
  }

  // States below the least one take the next words, in the order of the lanes.
  KV_DEVICE void renormalise(kv_u32 lanes) {
    PerLane<bool> takes;
    KV_EACH_LANE(i) { takes[i] = i < lanes && x[i] < least; }
    const kv_u32 mask = ballot(takes);
    KV_EACH_LANE(i) {
      const kv_u32 word = words.at(count(mask & lanes_below(i)), takes[i]);
      x[i] = takes[i] ? x[i] << 16 | word : x[i];
    }
    words.next += count(mask);
  }

  // One step: the components from `first` on, as many as lanes.
  KV_DEVICE void decode(kv_u32 first, kv_u32 lanes) {
    PerLane<kv_i32> q;
    PerLane<Component> component;
    PerLane<kv_u32> cls;
    PerLane<bool> more;  // than the value of its slot
    KV_EACH_LANE(i) {
      more[i] = false;
      if (i < lanes) {
        component[i] = load(components + (first + i));
        cls[i] = sink_class(component[i].cls(), sink_classes);
        const Symbol found = tables.find(table_of(cls[i]), x[i] & (kSlots - 1));
        x[i] = found.frequency * (x[i] >> kSlotBits) + found.offset;
        q[i] = (kv_i32)found.symbol - kZeroSymbol;
        more[i] = found.symbol == 0 || cls[i] >= kLowBitsFrom;
      }
    }
    renormalise(lanes);
    if (any(more)) low_bits_and_escapes(lanes, cls, q);
    KV_EACH_LANE(i) {
      if (i < lanes) {
        const kv_u32 c = first + i;
        const kv_i32 mean = component[i].mean, rho = component[i].rho();
        const kv_i32 value = mean + ((rho * (previous[c] - mean)) >> 4) + q[i] * scale;
        previous[c] = value;
        magnitude[i] |= absolute(value);
      }
    }
  }

  KV_DEVICE void low_bits_and_escapes(kv_u32 lanes, const PerLane<kv_u32>& cls, PerLane<kv_i32>& q) {
    PerLane<bool> escapes;
    KV_EACH_LANE(i) {
      escapes[i] = false;
      if (i < lanes) {
        escapes[i] = q[i] == -kZeroSymbol;
        const kv_u32 shift = shift_of(cls[i]);
        q[i] = (kv_i32)((kv_u32)q[i] << shift | (x[i] & ((1u << shift) - 1)));
        x[i] >>= shift;
      }
    }
    renormalise(lanes);
    for (kv_u32 mask = ballot(escapes); mask != 0; mask &= mask - 1) {
      const kv_u32 low = words.take(), high = low & 0x8000 ? words.take() : 0;
      const kv_u32 z = (low & 0x7FFF) | high << 15;
      const kv_i32 value = (kv_i32)(z >> 1) ^ -(kv_i32)(z & 1);
      KV_EACH_LANE(i) {
        if (i == lowest(mask)) {
          const kv_u32 shift = shift_of(cls[i]);
          const kv_i32 residual = (kv_i32)((kv_u32)value << shift | ((kv_u32)q[i] & ((1u << shift) - 1)));
          // So far that the residual is not even right, or its distance: fails the block, as values too large do.
          const bool far = absolute(value) > kMaxDistance >> shift || absolute(residual) * (kv_u64)scale >= kMaxDistance;
          if (far) magnitude[i] |= kValueLimit;
          q[i] = far ? 0 : residual;
        }
      }
    }
  }

  // From here on nothing renormalises: states lose the least value, which encoding began with.
  KV_DEVICE void make_bare() {
    KV_EACH_LANE(i) { x[i] -= kLeastState; }
    least = 0;
  }

  // After a token: whether a value is too large or the words have ended.
  KV_DEVICE bool fails() const {
    PerLane<bool> beyond;
    KV_EACH_LANE(i) { beyond[i] = (magnitude[i] & ~kOverflowed) >= (kv_u32)kValueLimit; }
    return any(beyond) || words.next > words.n;
  }

  KV_DEVICE bool overflowed() const {
    PerLane<bool> overflow;
    KV_EACH_LANE(i) { overflow[i] = magnitude[i] >= kOverflowed; }
    return any(overflow);
  }

  // Whether a block ends as encoders leave it.
  KV_DEVICE bool at_end() {
    if (least != 0) make_bare();
    PerLane<bool> left;
    KV_EACH_LANE(i) { left[i] = x[i] != 0; }
    return !any(left) && words.next == words.n;
  }
};

// A row of each head to the output, a channel to each lane.
template <kv_u32 kType, bool kRotated>
KV_DEVICE void emit_rows(const Stream& s, const kv_u32* order, const kv_i32* values, kv_u64 row, kv_u64 head_bytes,
                         const RotationRow& rotation, PerLane<kv_u32>& magnitude) {
  const kv_u32 n = s.head_dim, half = n / 2, n_pairs = s.n_pairs;
  const float unit = s.unit;
  for (kv_u32 head = 0; head < s.heads; ++head, values += n, row += head_bytes) {
    KV_EACH_LANE(i) {
      kv_u32 largest = 0;
      for (kv_u32 c = i; c < n; c += 32) {
        float value = multiply((float)values[c], unit);
        const kv_u32 pair = c < half ? c : c - half;
        if (kRotated && pair < n_pairs) {
          const float other = multiply((float)values[c < half ? c + half : pair], unit);
          const float own = multiply(value, load(rotation.cos + pair));
          const float turned = multiply(other, load(rotation.sin + pair));
          value = c < half ? subtract(own, turned) : add(own, turned);
        }
        put<kType>(row, load(order + c), value, kRotated, largest);
      }
      if (overflows<kType>(largest)) magnitude[i] |= kOverflowed;
    }
  }
}

template <kv_u32 kType>
KV_DEVICE void emit_token(const BlockArguments& a, const Block& b, const Stream& s, const Target& target,
                          const kv_i32* values, kv_u32 i, PerLane<kv_u32>& magnitude) {
  const kv_u32* order = fixed(at<const kv_u32>(a.order) + s.order);
  const kv_u64 row = row_address(target, b.row + i);
  const kv_u64 head_bytes = (kv_u64)target.head_stride * size_of(kType);
  if (b.rope < 0) {
    emit_rows<kType, false>(s, order, values, row, head_bytes, {nullptr, nullptr}, magnitude);
  } else {
    const RotationRow angles = rotation_row(at<const Rotation>(a.rotations) + b.rope, b.rope_row + i, 0);
    emit_rows<kType, true>(s, order, values, row, head_bytes, angles, magnitude);
  }
}

KV_DEVICE void emit_block(const BlockArguments& a, const Block& b, const Stream& s, const kv_i32* values, kv_u32 token,
                          PerLane<kv_u32>& magnitude) {
  const Target& target = at<const Target>(a.targets)[b.output];
  const kv_u32 i = token - b.skip;
  if (target.type == kFloat32)
    emit_token<kFloat32>(a, b, s, target, values, i, magnitude);
  else if (target.type == kFloat16)
    emit_token<kFloat16>(a, b, s, target, values, i, magnitude);
  else
    emit_token<kBfloat16>(a, b, s, target, values, i, magnitude);
}

template <class SymbolTables>
KV_DEVICE Status decode_block(const BlockArguments& a, const SymbolTables& tables, const Block& b, kv_i32* previous) {
  const Stream& s = at<const Stream>(a.streams)[b.stream];
  BlockDecoder<SymbolTables> decoder;
  decoder.tables = tables;
  decoder.components = fixed(at<const Component>(a.components) + s.components);
  decoder.previous = previous;
  const Source& source = at<const Source>(a.sources)[b.payload];
  if (!decoder.start(source)) return kBadBlock;

  const kv_u32 n = s.heads * s.head_dim, full = n / 32 * 32, steps = (n + 31) / 32;
  // The last steps, so many, are bare: those of this token from this component on, and all of later tokens.
  const kv_u32 bare_steps = *at<const kv_u8>(source.bytes), bare_tokens = (bare_steps + steps - 1) / steps;
  if (bare_tokens > b.n_tokens) return kBadBlock;
  const kv_u32 bare_token = b.n_tokens - bare_tokens, bare_first = 32 * (bare_tokens * steps - bare_steps);

  KV_EACH_LANE(i) {
    for (kv_u32 c = i; c < n; c += 32) previous[c] = decoder.components[c].mean;
  }
  for (kv_u32 token = 0; token < b.stop; ++token) {
    const bool sink = b.first_token + token < s.sink;
    decoder.sink_classes = sink ? s.sink_classes : 0;
    decoder.scale = sink ? 1 : (kv_i32)s.sink_div;
    kv_u32 first = 0, until = token == bare_token ? bare_first : full;
    for (;;) {
      for (; first < until; first += 32) decoder.decode(first, 32);
      if (token != bare_token || decoder.least == 0) break;
      decoder.make_bare();
      until = full;
    }
    if (n % 32 != 0) decoder.decode(first, n % 32);
    if (decoder.fails()) return kBadBlock;
    if (token < b.skip) continue;
    sync_warp();
    emit_block(a, b, s, previous, token, decoder.magnitude);
    sync_warp();
  }
  if (b.stop == b.n_tokens && !decoder.at_end()) return kBadBlock;
  return decoder.overflowed() ? kOverflow : kOk;
}

// All blocks that are warp `warp`'s, of however many warps. In `shared` each warp of a thread block has its own words.
template <class SymbolTables>
KV_DEVICE void decode_blocks(const BlockArguments& a, const SymbolTables& tables, kv_u32 warp, kv_u32 warp_of_thread_block,
                             kv_u32* shared) {
  if (warp >= a.n_warps) return;
  for (kv_u32 i = warp; i < (kv_u32)a.n_blocks; i += (kv_u32)a.n_warps) {
    const Block& block = at<const Block>(a.blocks)[i];
    const Stream& stream = at<const Stream>(a.streams)[block.stream];
    const bool fits = stream.heads * stream.head_dim <= a.shared_words;
    kv_u32* previous = fits ? shared + warp_of_thread_block * (kv_u32)a.shared_words
                            : at<kv_u32>(a.scratch) + warp * a.scratch_words;
    const Status status = decode_block(a, tables, block, (kv_i32*)previous);
    sync_warp();
    KV_EACH_LANE(lane) {
      if (lane == 0) at<kv_u8>(a.status)[i] = status;
    }
  }
}

}  // namespace kv::gpu
