// The 32 states in two AVX-512 vectors. Bit for bit what portable.hpp does.
#pragma once

#include "../simd.hpp"
#include "block.hpp"

#if KV_X86
#define KV_LEVEL KV_AVX512_INLINE
#define KV_LEVEL_CALL KV_AVX512

namespace kv::kvr1::avx512 {

constexpr bool kTogether = true;

// The slots of a step's symbols: lanes 0 to 15, 16 to 31.
struct Slots {
  __m512i low, high;
};
struct Residuals {
  __m512i low, high;
};

KV_LEVEL __mmask16 taking_part(kv_u32 lanes, kv_u32 first) {
  return (__mmask16)(lanes >= first + 16 ? 0xFFFFu : lanes <= first ? 0u : (1u << (lanes - first)) - 1);
}

KV_LEVEL void renormalise16(__m512i& x, __mmask16 active, const kv_u8*& next) {
  const __mmask16 low = _mm512_mask_cmplt_epu32_mask(active, x, _mm512_set1_epi32((int)kLeastState));
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)next));
  x = _mm512_mask_or_epi32(x, low, _mm512_slli_epi32(x, 16), _mm512_maskz_expand_epi32(low, words));
  next += 2 * (kv_u32)__builtin_popcount(low);
}

KV_LEVEL __m512i symbols16(__m512i& x, __mmask16 active, const kv_u32* slots, const kv_i32* tables) {
  const __m512i eleven = _mm512_set1_epi32((int)kSlots - 1);
  const __m512i at = _mm512_add_epi32(_mm512_load_si512(tables), _mm512_and_si512(x, eleven));
  const __m512i slot = _mm512_i32gather_epi32(at, slots, 4);
  const __m512i offset = _mm512_and_si512(_mm512_srli_epi32(slot, kSlotBits), eleven);
  const __m512i product = _mm512_mullo_epi32(_mm512_and_si512(slot, eleven), _mm512_srli_epi32(x, kSlotBits));
  x = _mm512_mask_add_epi32(x, active, product, offset);
  return slot;
}

KV_LEVEL void low_bits16(__m512i& x, __mmask16 active, const kv_i32* shifts, __m512i& q) {
  const __m512i shift = _mm512_load_si512(shifts);
  const __m512i one = _mm512_set1_epi32(1);
  const __m512i mask = _mm512_sub_epi32(_mm512_sllv_epi32(one, shift), one);
  q = _mm512_or_si512(_mm512_sllv_epi32(q, shift), _mm512_and_si512(x, mask));
  x = _mm512_mask_srlv_epi32(x, active, x, shift);
}

struct States {
  __m512i low, high;

  KV_LEVEL void load(const kv_u32* from) {
    low = _mm512_loadu_si512(from);
    high = _mm512_loadu_si512(from + 16);
  }
  KV_LEVEL void store(kv_u32* to) const {
    _mm512_storeu_si512(to, low);
    _mm512_storeu_si512(to + 16, high);
  }

  template <bool kRenormalise>
  KV_LEVEL Slots symbols(kv_u32 lanes, const kv_u32* slots, const kv_i32* tables, const kv_u8*& next) {
    const __mmask16 first = taking_part(lanes, 0), second = taking_part(lanes, 16);
    Slots met;
    met.low = symbols16(low, first, slots, tables);
    met.high = symbols16(high, second, slots, tables + 16);
    if (kRenormalise) {
      renormalise16(low, first, next);
      renormalise16(high, second, next);
    }
    return met;
  }

  template <bool kRenormalise>
  KV_LEVEL void low_bits(kv_u32 lanes, const kv_i32* shifts, Residuals& q, const kv_u8*& next) {
    const __mmask16 first = taking_part(lanes, 0), second = taking_part(lanes, 16);
    low_bits16(low, first, shifts, q.low);
    low_bits16(high, second, shifts + 16, q.high);
    if (kRenormalise) {
      renormalise16(low, first, next);
      renormalise16(high, second, next);
    }
  }
};

// Lanes whose symbol is the escape.
KV_LEVEL kv_u32 escapes(const Slots& slots, kv_u32 lanes) {
  const __m512i flag = _mm512_set1_epi32((int)kSlotEscapes);
  if (_mm512_test_epi32_mask(_mm512_or_si512(slots.low, slots.high), flag) == 0) return 0;
  return (kv_u32)_mm512_mask_test_epi32_mask(taking_part(lanes, 0), slots.low, flag) |
         (kv_u32)_mm512_mask_test_epi32_mask(taking_part(lanes, 16), slots.high, flag) << 16;
}

KV_LEVEL Residuals values(const Slots& slots) {
  return {_mm512_srai_epi32(slots.low, kSlotValueShift), _mm512_srai_epi32(slots.high, kSlotValueShift)};
}

// Values times 2^shift, shift up to kMaxScaleShift, where none is the escape.
KV_LEVEL Residuals scaled(const Slots& slots, kv_u32 shift) {
  const __m512i down = _mm512_set1_epi32((int)(kSlotValueShift - shift));
  return {_mm512_srav_epi32(slots.low, down), _mm512_srav_epi32(slots.high, down)};
}
KV_LEVEL Residuals times(const Residuals& q, kv_i32 scale) {
  const __m512i factor = _mm512_set1_epi32(scale);
  return {_mm512_mullo_epi32(q.low, factor), _mm512_mullo_epi32(q.high, factor)};
}

KV_LEVEL void store(const Residuals& q, kv_i32* to) {
  _mm512_storeu_si512(to, q.low);
  _mm512_storeu_si512(to + 16, q.high);
}
KV_LEVEL Residuals load(const kv_i32* from) { return {_mm512_loadu_si512(from), _mm512_loadu_si512(from + 16)}; }

// The bits of all magnitudes of a row: limits are powers of two.
struct Magnitude {
  __m512i any;
  KV_LEVEL Magnitude() : any(_mm512_setzero_si512()) {}
  KV_LEVEL bool reaches(kv_i32 limit) const {
    return _mm512_test_epi32_mask(any, _mm512_set1_epi32(-limit)) != 0;
  }
};

KV_LEVEL void reconstruct16(__m512i distance, __mmask16 active, const kv_i32* mean, const kv_i32* rho,
                            kv_i32* previous, Magnitude& magnitude) {
  const __m512i mu = _mm512_load_si512(mean), before = _mm512_load_si512(previous);
  const __m512i pull = _mm512_mullo_epi32(_mm512_load_si512(rho), _mm512_sub_epi32(before, mu));
  const __m512i prediction = _mm512_add_epi32(mu, _mm512_srai_epi32(pull, 4));
  const __m512i value = _mm512_maskz_add_epi32(active, prediction, distance);
  magnitude.any = _mm512_or_si512(magnitude.any, _mm512_abs_epi32(value));
  _mm512_store_si512(previous, value);
}

KV_LEVEL void reconstruct(kv_u32 lanes, const Residuals& distance, const kv_i32* mean, const kv_i32* rho,
                          kv_i32* previous, Magnitude& magnitude) {
  reconstruct16(distance.low, taking_part(lanes, 0), mean, rho, previous, magnitude);
  reconstruct16(distance.high, taking_part(lanes, 16), mean + 16, rho + 16, previous + 16, magnitude);
}

// Rows of n channels, a multiple of 32, times the unit. Those that rotate return whether a value overflows.
KV_LEVEL __m512 in_units(const kv_i32* values, __m512 unit) {
  return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(values)), unit);
}

KV_LEVEL void put_plain16(const kv_i32* values, kv_u32 n, float unit, kv_u16* out) {
  const __m512 u = _mm512_set1_ps(unit);
  for (kv_u32 c = 0; c < n; c += 16)
    _mm256_storeu_si256((__m256i*)(out + c), _mm512_cvtps_ph(in_units(values + c, u), _MM_FROUND_TO_NEAREST_INT));
}

KV_LEVEL void put_plain32(const kv_i32* values, kv_u32 n, float unit, float* out) {
  const __m512 u = _mm512_set1_ps(unit);
  for (kv_u32 c = 0; c < n; c += 16) _mm512_storeu_ps(out + c, in_units(values + c, u));
}

struct Rotated {
  __m512 first, second;
};
KV_LEVEL Rotated rotated(const kv_i32* values, kv_u32 half, __m512 unit, const float* cos, const float* sin) {
  const __m512 a = in_units(values, unit), b = in_units(values + half, unit);
  const __m512 c = _mm512_loadu_ps(cos), s = _mm512_loadu_ps(sin);
  return {_mm512_sub_ps(_mm512_mul_ps(a, c), _mm512_mul_ps(b, s)),
          _mm512_add_ps(_mm512_mul_ps(b, c), _mm512_mul_ps(a, s))};
}

KV_LEVEL bool put_rotated16(const kv_i32* values, kv_u32 n, float unit, const float* cos, const float* sin, float*,
                            kv_u16* out) {
  Narrow512 narrow{_mm256_setzero_si256()};
  for (kv_u32 c = 0; c < n / 2; c += 16) {
    const Rotated r = rotated(values + c, n / 2, _mm512_set1_ps(unit), cos + c, sin + c);
    narrow.put(r.first, out + c);
    narrow.put(r.second, out + n / 2 + c);
  }
  return narrow.overflow();
}

KV_LEVEL bool put_rotated32(const kv_i32* values, kv_u32 n, float unit, const float* cos, const float* sin,
                            float* out) {
  const __m512 largest = _mm512_set1_ps(3.402823466e+38f);
  __mmask16 beyond = 0;
  for (kv_u32 c = 0; c < n / 2; c += 16) {
    const Rotated r = rotated(values + c, n / 2, _mm512_set1_ps(unit), cos + c, sin + c);
    beyond |= _mm512_cmp_ps_mask(_mm512_abs_ps(r.first), largest, _CMP_NLE_UQ) |
              _mm512_cmp_ps_mask(_mm512_abs_ps(r.second), largest, _CMP_NLE_UQ);
    _mm512_storeu_ps(out + c, r.first);
    _mm512_storeu_ps(out + n / 2 + c, r.second);
  }
  return beyond != 0;
}

#include "block.inl"

}  // namespace kv::kvr1::avx512

#undef KV_LEVEL
#undef KV_LEVEL_CALL
#endif
