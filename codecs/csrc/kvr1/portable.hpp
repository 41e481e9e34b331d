// The 32 states in plain loops that compilers vectorise for whatever CPU they build for. The readable one of the three.
#pragma once

#include "block.hpp"

namespace kv::kvr1::portable {

#define KV_LEVEL inline __attribute__((always_inline))
#define KV_LEVEL_CALL

constexpr bool kTogether = false;  // scalar code has enough to do while it waits

// The slots of a step's symbols.
struct Slots {
  kv_u32 v[kStates];
  kv_u32 met;  // all of them, or-ed: whether one escapes
};

struct Residuals {
  kv_i32 v[kStates];
};

struct States {
  kv_u32 x[kStates];

  void load(const kv_u32* from) { std::memcpy(x, from, sizeof x); }
  void store(kv_u32* to) const { std::memcpy(to, x, sizeof x); }

  // A state below 2^16 takes the next word. By masks: a branch on it would be mispredicted half of the time.
  KV_LEVEL static kv_u32 renormalised(kv_u32 x, const kv_u8* words, kv_u64& next) {
    const kv_u64 mask = 0u - (kv_u64)(x < kLeastState);
    const kv_u32 filled = x << 16 | load_word(words + 2 * next);
    next -= mask;
    return x ^ ((x ^ filled) & (kv_u32)mask);
  }

  template <bool kRenormalise>
  KV_LEVEL Slots symbols(kv_u32 lanes, const kv_u32* slots, const kv_i32* tables, const kv_u8*& next) {
    Slots met;
    kv_u32 any = 0;
    kv_u64 read = 0;
#pragma GCC unroll 4
    for (kv_u32 i = 0; i < lanes; ++i) {
      const kv_u32 slot = slots[(kv_u32)tables[i] + (x[i] & (kSlots - 1))];
      const kv_u32 after = slot_frequency(slot) * (x[i] >> kSlotBits) + slot_offset(slot);
      any |= slot;
      met.v[i] = slot;
      x[i] = kRenormalise ? renormalised(after, next, read) : after;
    }
    next += 2 * read;
    met.met = any;
    return met;
  }

  template <bool kRenormalise>
  KV_LEVEL void low_bits(kv_u32 lanes, const kv_i32* shifts, Residuals& q, const kv_u8*& next) {
    kv_u64 read = 0;
    for (kv_u32 i = 0; i < lanes; ++i) {
      const kv_u32 shift = (kv_u32)shifts[i];
      q.v[i] = (kv_i32)((kv_u32)q.v[i] << shift | (x[i] & ((1u << shift) - 1)));
      x[i] = kRenormalise ? renormalised(x[i] >> shift, next, read) : x[i] >> shift;
    }
    next += 2 * read;
  }
};

// Lanes whose symbol is the escape.
KV_LEVEL kv_u32 escapes(const Slots& slots, kv_u32 lanes) {
  kv_u32 mask = 0;
  if (KV_UNLIKELY(slots.met & kSlotEscapes))
    for (kv_u32 i = 0; i < lanes; ++i) mask |= (kv_u32)((slots.v[i] & kSlotEscapes) != 0) << i;
  return mask;
}

KV_LEVEL Residuals values(const Slots& slots) {
  Residuals q;
  for (kv_u32 i = 0; i < kStates; ++i) q.v[i] = slot_value(slots.v[i]);
  return q;
}

// Values times 2^shift, shift up to kMaxScaleShift, where none is the escape.
KV_LEVEL Residuals scaled(const Slots& slots, kv_u32 shift) {
  Residuals distance;
  for (kv_u32 i = 0; i < kStates; ++i)
    distance.v[i] = (kv_i32)slots.v[i] >> (kSlotValueShift - shift);
  return distance;
}
KV_LEVEL Residuals times(const Residuals& q, kv_i32 scale) {
  Residuals distance;
  for (kv_u32 i = 0; i < kStates; ++i) distance.v[i] = q.v[i] * scale;
  return distance;
}

KV_LEVEL void store(const Residuals& q, kv_i32* to) { std::memcpy(to, q.v, sizeof q.v); }
KV_LEVEL Residuals load(const kv_i32* from) {
  Residuals q;
  std::memcpy(q.v, from, sizeof q.v);
  return q;
}

// The bits of all magnitudes of a row: limits are powers of two.
struct Magnitude {
  kv_u32 any = 0;
  KV_LEVEL bool reaches(kv_i32 limit) const { return any >= (kv_u32)limit; }
};

KV_LEVEL void reconstruct(kv_u32 lanes, const Residuals& distance, const kv_i32* mean, const kv_i32* rho,
                          kv_i32* previous, Magnitude& magnitude) {
  kv_u32 any = 0;
  for (kv_u32 i = 0; i < lanes; ++i) {
    const kv_i32 value = mean[i] + ((rho[i] * (previous[i] - mean[i])) >> 4) + distance.v[i];
    any |= (kv_u32)(value < 0 ? -value : value);
    previous[i] = value;
  }
  magnitude.any |= any;
}

// Rows of n channels times the unit. Those that rotate return whether a value overflows.
KV_LEVEL void put_plain16(const kv_i32* values, kv_u32 n, float unit, kv_u16* out) { narrow_small_values(values, n, unit, out); }

KV_LEVEL void put_plain32(const kv_i32* __restrict values, kv_u32 n, float unit, float* __restrict out) {
  for (kv_u32 c = 0; c < n; ++c) out[c] = (float)values[c] * unit;
}

KV_LEVEL bool put_rotated32(const kv_i32* __restrict values, kv_u32 n, float unit, const float* __restrict cos,
                            const float* __restrict sin, float* __restrict out) {
  kv_u32 beyond = 0;
  for (kv_u32 c = 0; c < n / 2; ++c) {
    const float a = (float)values[c] * unit, b = (float)values[n / 2 + c] * unit;
    const float first = a * cos[c] - b * sin[c], second = b * cos[c] + a * sin[c];
    beyond |= (kv_u32)!(std::fabs(first) <= 3.402823466e+38f) | (kv_u32)!(std::fabs(second) <= 3.402823466e+38f);
    out[c] = first;
    out[n / 2 + c] = second;
  }
  return beyond != 0;
}

KV_LEVEL bool put_rotated16(const kv_i32* values, kv_u32 n, float unit, const float* cos, const float* sin,
                            float* row, kv_u16* out) {
  put_rotated32(values, n, unit, cos, sin, row);
  return kNarrow.row(row, n, out);
}

#include "block.inl"

}  // namespace kv::kvr1::portable

#undef KV_LEVEL
#undef KV_LEVEL_CALL
