// The 32 states in four AVX2 vectors. Bit for bit what portable.hpp does.
#pragma once

#include "../simd.hpp"
#include "block.hpp"

#if KV_X86
#define KV_LEVEL KV_AVX2_INLINE
#define KV_LEVEL_CALL KV_AVX2

namespace kv::kvr1::avx2 {

constexpr bool kTogether = true;

constexpr kv_u32 kVectors = kStates / 8;

// The slots of a step's symbols, eight lanes a vector.
struct Slots {
  __m256i v[kVectors];
};
struct Residuals {
  __m256i v[kVectors];
};

// Byte shuffles that hand the next words, in order, to the lanes of an 8-bit mask; other lanes get zero.
struct SpreadTable {
  alignas(64) kv_u8 bytes[256][16];
  constexpr SpreadTable() : bytes() {
    for (int mask = 0; mask < 256; ++mask) {
      int word = 0;
      for (int lane = 0; lane < 8; ++lane) {
        const bool takes = (mask >> lane & 1) != 0;
        bytes[mask][2 * lane] = takes ? (kv_u8)(2 * word) : 0x80;
        bytes[mask][2 * lane + 1] = takes ? (kv_u8)(2 * word + 1) : 0x80;
        word += takes;
      }
    }
  }
};
inline constexpr SpreadTable kSpread{};

// All ones in the lanes that take part.
KV_LEVEL __m256i taking_part(kv_u32 lanes, kv_u32 vector) {
  const __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32((int)(8 * vector)));
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)lanes), lane);
}

KV_LEVEL void renormalise8(__m256i& x, kv_u32 lanes, kv_u32 vector, const kv_u8*& next) {
  __m256i low = _mm256_cmpeq_epi32(_mm256_srli_epi32(x, 16), _mm256_setzero_si256());
  if (lanes != kStates) low = _mm256_and_si256(low, taking_part(lanes, vector));
  const kv_u32 mask = (kv_u32)_mm256_movemask_ps(_mm256_castsi256_ps(low));
  const __m128i words = _mm_loadu_si128((const __m128i*)next);
  const __m128i spread = _mm_shuffle_epi8(words, _mm_load_si128((const __m128i*)kSpread.bytes[mask]));
  const __m256i filled = _mm256_or_si256(_mm256_slli_epi32(x, 16), _mm256_cvtepu16_epi32(spread));
  x = _mm256_blendv_epi8(x, filled, low);
  next += 2 * (kv_u32)__builtin_popcount(mask);
}

struct States {
  __m256i x[kVectors];

  KV_LEVEL void load(const kv_u32* from) {
    for (kv_u32 v = 0; v < kVectors; ++v) x[v] = _mm256_loadu_si256((const __m256i*)(from + 8 * v));
  }
  KV_LEVEL void store(kv_u32* to) const {
    for (kv_u32 v = 0; v < kVectors; ++v) _mm256_storeu_si256((__m256i*)(to + 8 * v), x[v]);
  }

  template <bool kRenormalise>
  KV_LEVEL Slots symbols(kv_u32 lanes, const kv_u32* slots, const kv_i32* tables, const kv_u8*& next) {
    const __m256i eleven = _mm256_set1_epi32((int)kSlots - 1);
    Slots met;
    for (kv_u32 v = 0; v < kVectors; ++v) {
      const __m256i at = _mm256_add_epi32(_mm256_load_si256((const __m256i*)(tables + 8 * v)),
                                          _mm256_and_si256(x[v], eleven));
      const __m256i slot = _mm256_i32gather_epi32((const int*)slots, at, 4);
      const __m256i offset = _mm256_and_si256(_mm256_srli_epi32(slot, kSlotBits), eleven);
      const __m256i product = _mm256_mullo_epi32(_mm256_and_si256(slot, eleven), _mm256_srli_epi32(x[v], kSlotBits));
      const __m256i after = _mm256_add_epi32(product, offset);
      x[v] = lanes == kStates ? after : _mm256_blendv_epi8(x[v], after, taking_part(lanes, v));
      met.v[v] = slot;
    }
    if (kRenormalise)
      for (kv_u32 v = 0; v < kVectors; ++v) renormalise8(x[v], lanes, v, next);
    return met;
  }

  template <bool kRenormalise>
  KV_LEVEL void low_bits(kv_u32 lanes, const kv_i32* shifts, Residuals& q, const kv_u8*& next) {
    const __m256i one = _mm256_set1_epi32(1);
    for (kv_u32 v = 0; v < kVectors; ++v) {
      const __m256i shift = _mm256_load_si256((const __m256i*)(shifts + 8 * v));
      const __m256i mask = _mm256_sub_epi32(_mm256_sllv_epi32(one, shift), one);
      q.v[v] = _mm256_or_si256(_mm256_sllv_epi32(q.v[v], shift), _mm256_and_si256(x[v], mask));
      const __m256i after = _mm256_srlv_epi32(x[v], shift);
      x[v] = lanes == kStates ? after : _mm256_blendv_epi8(x[v], after, taking_part(lanes, v));
    }
    if (kRenormalise)
      for (kv_u32 v = 0; v < kVectors; ++v) renormalise8(x[v], lanes, v, next);
  }
};

// Lanes whose symbol is the escape.
KV_LEVEL kv_u32 escapes(const Slots& slots, kv_u32 lanes) {
  const __m256i any = _mm256_or_si256(_mm256_or_si256(slots.v[0], slots.v[1]), _mm256_or_si256(slots.v[2], slots.v[3]));
  if (_mm256_testz_si256(any, _mm256_set1_epi32((int)kSlotEscapes))) return 0;
  kv_u32 mask = 0;
  for (kv_u32 v = 0; v < kVectors; ++v) {
    const __m256i sign = _mm256_slli_epi32(slots.v[v], 31 - kSlotEscapesBit);
    mask |= (kv_u32)_mm256_movemask_ps(_mm256_castsi256_ps(sign)) << 8 * v;
  }
  return lanes == kStates ? mask : mask & ((1u << lanes) - 1);
}

KV_LEVEL Residuals values(const Slots& slots) {
  Residuals q;
  for (kv_u32 v = 0; v < kVectors; ++v) q.v[v] = _mm256_srai_epi32(slots.v[v], kSlotValueShift);
  return q;
}

// Values times 2^shift, shift up to kMaxScaleShift, where none is the escape.
KV_LEVEL Residuals scaled(const Slots& slots, kv_u32 shift) {
  const __m256i down = _mm256_set1_epi32((int)(kSlotValueShift - shift));
  Residuals distance;
  for (kv_u32 v = 0; v < kVectors; ++v) distance.v[v] = _mm256_srav_epi32(slots.v[v], down);
  return distance;
}
KV_LEVEL Residuals times(const Residuals& q, kv_i32 scale) {
  const __m256i factor = _mm256_set1_epi32(scale);
  Residuals distance;
  for (kv_u32 v = 0; v < kVectors; ++v) distance.v[v] = _mm256_mullo_epi32(q.v[v], factor);
  return distance;
}

KV_LEVEL void store(const Residuals& q, kv_i32* to) {
  for (kv_u32 v = 0; v < kVectors; ++v) _mm256_storeu_si256((__m256i*)(to + 8 * v), q.v[v]);
}
KV_LEVEL Residuals load(const kv_i32* from) {
  Residuals q;
  for (kv_u32 v = 0; v < kVectors; ++v) q.v[v] = _mm256_loadu_si256((const __m256i*)(from + 8 * v));
  return q;
}

// The bits of all magnitudes of a row: limits are powers of two.
struct Magnitude {
  __m256i any;
  KV_LEVEL Magnitude() : any(_mm256_setzero_si256()) {}
  KV_LEVEL bool reaches(kv_i32 limit) const { return !_mm256_testz_si256(any, _mm256_set1_epi32(-limit)); }
};

KV_LEVEL void reconstruct(kv_u32 lanes, const Residuals& distance, const kv_i32* mean, const kv_i32* rho,
                          kv_i32* previous, Magnitude& magnitude) {
  for (kv_u32 v = 0; v < kVectors; ++v) {
    __m256i* at = (__m256i*)(previous + 8 * v);
    const __m256i mu = _mm256_load_si256((const __m256i*)(mean + 8 * v)), before = _mm256_load_si256(at);
    const __m256i pull = _mm256_mullo_epi32(_mm256_load_si256((const __m256i*)(rho + 8 * v)),
                                            _mm256_sub_epi32(before, mu));
    const __m256i prediction = _mm256_add_epi32(mu, _mm256_srai_epi32(pull, 4));
    __m256i value = _mm256_add_epi32(prediction, distance.v[v]);
    if (lanes != kStates) value = _mm256_and_si256(value, taking_part(lanes, v));
    magnitude.any = _mm256_or_si256(magnitude.any, _mm256_abs_epi32(value));
    _mm256_store_si256(at, value);
  }
}

// Rows of n channels, a multiple of 32, times the unit. Those that rotate return whether a value overflows.
KV_LEVEL __m256 in_units(const kv_i32* values, __m256 unit) {
  return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i*)values)), unit);
}

KV_LEVEL void put_plain16(const kv_i32* values, kv_u32 n, float unit, kv_u16* out) {
  const __m256 u = _mm256_set1_ps(unit);
  for (kv_u32 c = 0; c < n; c += 8)
    _mm_storeu_si128((__m128i*)(out + c), _mm256_cvtps_ph(in_units(values + c, u), _MM_FROUND_TO_NEAREST_INT));
}

KV_LEVEL void put_plain32(const kv_i32* values, kv_u32 n, float unit, float* out) {
  const __m256 u = _mm256_set1_ps(unit);
  for (kv_u32 c = 0; c < n; c += 8) _mm256_storeu_ps(out + c, in_units(values + c, u));
}

struct Rotated {
  __m256 first, second;
};
KV_LEVEL Rotated rotated(const kv_i32* values, kv_u32 half, __m256 unit, const float* cos, const float* sin) {
  const __m256 a = in_units(values, unit), b = in_units(values + half, unit);
  const __m256 c = _mm256_loadu_ps(cos), s = _mm256_loadu_ps(sin);
  return {_mm256_sub_ps(_mm256_mul_ps(a, c), _mm256_mul_ps(b, s)),
          _mm256_add_ps(_mm256_mul_ps(b, c), _mm256_mul_ps(a, s))};
}

KV_LEVEL bool put_rotated16(const kv_i32* values, kv_u32 n, float unit, const float* cos, const float* sin, float*,
                            kv_u16* out) {
  Narrow256 narrow{_mm_setzero_si128()};
  for (kv_u32 c = 0; c < n / 2; c += 8) {
    const Rotated r = rotated(values + c, n / 2, _mm256_set1_ps(unit), cos + c, sin + c);
    narrow.put(r.first, out + c);
    narrow.put(r.second, out + n / 2 + c);
  }
  return narrow.overflow();
}

KV_LEVEL bool put_rotated32(const kv_i32* values, kv_u32 n, float unit, const float* cos, const float* sin,
                            float* out) {
  const __m256 largest = _mm256_set1_ps(3.402823466e+38f), sign = _mm256_set1_ps(-0.0f);
  __m256 beyond = _mm256_setzero_ps();
  for (kv_u32 c = 0; c < n / 2; c += 8) {
    const Rotated r = rotated(values + c, n / 2, _mm256_set1_ps(unit), cos + c, sin + c);
    beyond = _mm256_or_ps(beyond, _mm256_cmp_ps(_mm256_andnot_ps(sign, r.first), largest, _CMP_NLE_UQ));
    beyond = _mm256_or_ps(beyond, _mm256_cmp_ps(_mm256_andnot_ps(sign, r.second), largest, _CMP_NLE_UQ));
    _mm256_storeu_ps(out + c, r.first);
    _mm256_storeu_ps(out + n / 2 + c, r.second);
  }
  return _mm256_movemask_ps(beyond) != 0;
}

#include "block.inl"

}  // namespace kv::kvr1::avx2

#undef KV_LEVEL
#undef KV_LEVEL_CALL
#endif
