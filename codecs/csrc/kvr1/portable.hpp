// The 32 states in plain loops that compilers vectorise for whatever CPU they build for. The readable one of the three.
#pragma once

#include "block.hpp"

namespace kv::kvr1::portable {

#define KV_LEVEL inline __attribute__((always_inline))
#define KV_LEVEL_CALL

constexpr bool kTogether = false;  // scalar code has enough to do while it waits

struct Residuals {
  kv_i32 v[kStates];
  kv_u32 slots;  // all slots met, or-ed: whether one of them escapes
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
  KV_LEVEL Residuals symbols(kv_u32 lanes, const kv_u32* slots, const kv_i32* tables, const kv_u8*& next) {
    Residuals q;
    kv_u32 met = 0;
    kv_u64 read = 0;
#pragma GCC unroll 4
    for (kv_u32 i = 0; i < lanes; ++i) {
      const kv_u32 slot = slots[(kv_u32)tables[i] + (x[i] & (kSlots - 1))];
      const kv_u32 after = slot_frequency(slot) * (x[i] >> kSlotBits) + slot_offset(slot);
      met |= slot;
      q.v[i] = slot_value(slot);
      x[i] = kRenormalise ? renormalised(after, next, read) : after;
    }
    next += 2 * read;
    q.slots = met;
    return q;
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

// Lanes that hold the escape.
KV_LEVEL kv_u32 escapes(const Residuals& q, kv_u32 lanes) {
  kv_u32 mask = 0;
  if (KV_UNLIKELY(q.slots & kSlotEscapes))
    for (kv_u32 i = 0; i < lanes; ++i) mask |= (kv_u32)(q.v[i] == kEscape) << i;
  return mask;
}

KV_LEVEL void store(const Residuals& q, kv_i32* to) { std::memcpy(to, q.v, sizeof q.v); }
KV_LEVEL Residuals load(const kv_i32* from) {
  Residuals q;
  std::memcpy(q.v, from, sizeof q.v);
  q.slots = 0;
  return q;
}

// Largest magnitude of the values of a row.
struct Magnitude {
  kv_u32 any = 0;  // of all bits: 2^24 is a power of two
  KV_LEVEL bool reaches_limit() const { return any >= (kv_u32)kValueLimit; }
};

KV_LEVEL void reconstruct(kv_u32 lanes, const Residuals& q, const kv_i32* mean, const kv_i32* rho, kv_i32 scale,
                          kv_i32* previous, Magnitude& magnitude) {
  kv_u32 any = 0;
  // Many CPUs multiply 32-bit vectors slowly.
  if ((scale & (scale - 1)) == 0) {
    const int shift = __builtin_ctz((kv_u32)scale);
    for (kv_u32 i = 0; i < lanes; ++i) {
      const kv_i32 prediction = mean[i] + ((rho[i] * (previous[i] - mean[i])) >> 4);
      const kv_i32 value = prediction + (kv_i32)((kv_u32)q.v[i] << shift);
      any |= (kv_u32)(value < 0 ? -value : value);
      previous[i] = value;
    }
  } else {
    for (kv_u32 i = 0; i < lanes; ++i) {
      const kv_i32 prediction = mean[i] + ((rho[i] * (previous[i] - mean[i])) >> 4);
      const kv_i32 value = prediction + q.v[i] * scale;
      any |= (kv_u32)(value < 0 ? -value : value);
      previous[i] = value;
    }
  }
  magnitude.any |= any;
}

#include "block.inl"

}  // namespace kv::kvr1::portable

#undef KV_LEVEL
#undef KV_LEVEL_CALL
