// The rANS encoder of KVR1: residuals of whole rows into words, backwards. FORMAT.md section 9. Host only.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "../aligned.hpp"
#include "../simd.hpp"
#include "rans.hpp"

namespace kv::kvr1 {

// Words, filled from the back: rANS encodes in the reverse of the order in which it decodes.
class BackwardWords {
 public:
  explicit BackwardWords(std::size_t n) : words_(n), next_(n) {}

  // Room for n more words before the first one.
  kv_u16* reserve(std::size_t n) {
    if (next_ < n) {
      std::vector<kv_u16> larger(words_.size() * 2 + n);
      const std::size_t used = words_.size() - next_, at = larger.size() - used;
      std::copy(words_.begin() + (std::ptrdiff_t)next_, words_.end(), larger.begin() + (std::ptrdiff_t)at);
      words_.swap(larger);
      next_ = at;
    }
    return words_.data() + next_;
  }
  void resume(const kv_u16* next) { next_ = (std::size_t)(next - words_.data()); }
  const kv_u16* begin() const { return words_.data() + next_; }
  std::size_t size() const { return words_.size() - next_; }

 private:
  std::vector<kv_u16> words_;
  std::size_t next_;
};

// What a class says to the encoder, of every component; padded to whole steps.
struct CodedClasses {
  Aligned<kv_u32> tables;  // first entry of the table in Tables::symbols
  Aligned<kv_u32> shifts;
  std::vector<kv_u8> has_shift;  // of each step
};

// What one step codes, by lane. Plain arrays, so that compilers vectorise the loops over them.
struct Step {
  alignas(64) kv_u32 frequency[kStates];
  alignas(64) kv_u32 start[kStates];
  alignas(64) float inverse[kStates];
  alignas(64) kv_u32 escape[kStates];

  // Mask of the lanes that escape.
  inline __attribute__((always_inline)) kv_u32 look_up(const Tables& t, kv_u32 lanes, const kv_i32* __restrict q,
                                                       const kv_u32* __restrict tables,
                                                       const kv_u32* __restrict shifts) {
    kv_u32 any = 0;
    for (kv_u32 i = 0; i < kStates; ++i) {
      const kv_u32 symbol = (kv_u32)((q[i] >> shifts[i]) + kZeroSymbol);
      const kv_u32 at = tables[i] + (symbol < kSymbols ? symbol : 0);
      const kv_u32 word = t.symbols[at];
      frequency[i] = word & (kSlots - 1);
      start[i] = word >> 16;
      inverse[i] = t.inverse[at];
      escape[i] = word & kEscapes;
      any |= escape[i];
    }
    kv_u32 mask = 0;
    if (KV_UNLIKELY(any))
      for (kv_u32 i = 0; i < lanes; ++i) mask |= (kv_u32)(escape[i] != 0) << i;
    return mask;
  }
};

inline kv_u32 zigzag(kv_i32 value) { return ((kv_u32)value << 1) ^ (kv_u32)(value >> 31); }

// Words of the lanes in `mask`, which escape; the last lane first.
inline kv_u16* put_escapes(kv_u32 mask, const kv_i32* q, const kv_u32* shifts, kv_u16* out) {
  for (kv_u32 i = kStates; i-- > 0;) {
    if (!(mask >> i & 1)) continue;
    const kv_u32 z = zigzag(q[i] >> shifts[i]);
    if (z > 0x7FFF) *--out = (kv_u16)(z >> 15);
    *--out = (kv_u16)((z & 0x7FFF) | (z > 0x7FFF) << 15);
  }
  return out;
}

// A state that is full gives up its low word.
inline __attribute__((always_inline)) kv_u16* put_word(kv_u32& x, bool full, kv_u16* out) {
  out[-1] = (kv_u16)x;
  x = full ? x >> 16 : x;
  return out - full;
}

// Rows of residuals to code, the last one first; of the last one only the steps before `from_step`.
struct CodedRows {
  const kv_i32* residuals;
  kv_u64 n;
  kv_u32 steps;  // of a row
  kv_u32 last_lanes;
  kv_u32 from_step;
  const CodedClasses* classes;
};

// Codes rows, renormalising, into words that end at `out`; there is room for all of them.
KV_CLONES static kv_u16* code_rows_plain(const Tables& t, kv_u32* states, const CodedRows& rows, kv_u16* out) {
  Step step;
  kv_u32 x[kStates];
  std::memcpy(x, states, sizeof x);
  kv_u32 from_step = rows.from_step;
  for (kv_u64 row = rows.n; row-- > 0; from_step = rows.steps) {
    for (kv_u32 s = from_step; s-- > 0;) {
      const std::size_t at = (std::size_t)s * kStates;
      const kv_i32* q = rows.residuals + row * rows.steps * kStates + at;
      const CodedClasses& classes = *rows.classes;
      const kv_u32* shifts = classes.shifts.data() + at;
      const kv_u32 lanes = s + 1 < rows.steps ? kStates : rows.last_lanes;
      const kv_u32 escapes = step.look_up(t, lanes, q, classes.tables.data() + at, shifts);
      if (KV_UNLIKELY(escapes)) out = put_escapes(escapes, q, shifts, out);
      if (classes.has_shift[s]) {
        for (kv_u32 i = lanes; i-- > 0;) {
          out = put_word(x[i], shifts[i] != 0 && x[i] >> (32 - shifts[i]) != 0, out);
          x[i] = x[i] << shifts[i] | ((kv_u32)q[i] & ((1u << shifts[i]) - 1));
        }
      }
      for (kv_u32 i = lanes; i-- > 0;) out = put_word(x[i], x[i] >= step.frequency[i] << 21, out);
      for (kv_u32 i = 0; i < kStates; ++i) {
        const kv_u32 f = step.frequency[i];
        kv_u32 quotient = (kv_u32)(kv_i32)((float)x[i] * step.inverse[i]);
        quotient += (kv_u32)(x[i] - quotient * f >= f);
        const kv_u32 next = x[i] + quotient * (kSlots - f) + step.start[i];
        x[i] = i < lanes ? next : x[i];
      }
    }
  }
  std::memcpy(states, x, sizeof x);
  return out;
}

#if KV_X86
// Half a step: what code_rows_plain does, sixteen lanes at once.
struct Half512 {
  __m512i q, shift, frequency, start;
  __m512 inverse;
  __mmask16 active;

  // Mask of the lanes that escape.
  KV_AVX512_INLINE __mmask16 look_up(const Tables& t, const kv_i32* residuals, const kv_u32* tables,
                                     const kv_u32* shifts) {
    q = _mm512_loadu_si512(residuals);
    shift = _mm512_loadu_si512(shifts);
    const __m512i first = _mm512_loadu_si512(tables);
    const __m512i symbol = _mm512_add_epi32(_mm512_srav_epi32(q, shift), _mm512_set1_epi32(kZeroSymbol));
    const __mmask16 known = _mm512_cmplt_epu32_mask(symbol, _mm512_set1_epi32(kSymbols));
    const __m512i at = _mm512_mask_add_epi32(first, known, first, symbol);
    const __m512i word = _mm512_i32gather_epi32(at, t.symbols, 4);
    frequency = _mm512_and_si512(word, _mm512_set1_epi32(kSlots - 1));
    start = _mm512_srli_epi32(word, 16);
    inverse = _mm512_i32gather_ps(at, t.inverse, 4);
    return _mm512_mask_test_epi32_mask(active, word, _mm512_set1_epi32((int)kEscapes));
  }

  // Lanes in `full` give up their low word.
  KV_AVX512_INLINE static kv_u16* put(__m512i& x, __mmask16 full, kv_u16* out) {
    const kv_u32 n = (kv_u32)__builtin_popcount(full);
    out -= n;
    const __m256i words = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(full, x));
    _mm256_mask_storeu_epi16(out, (__mmask16)((1u << n) - 1), words);
    x = _mm512_mask_srli_epi32(x, full, x, 16);
    return out;
  }

  KV_AVX512_INLINE __mmask16 full_of_low_bits(__m512i x) const {
    const __m512i above = _mm512_srlv_epi32(x, _mm512_sub_epi32(_mm512_set1_epi32(32), shift));
    return _mm512_mask_test_epi32_mask(active, above, above);
  }
  KV_AVX512_INLINE __m512i with_low_bits(__m512i x) const {
    const __m512i one = _mm512_set1_epi32(1);
    const __m512i mask = _mm512_sub_epi32(_mm512_sllv_epi32(one, shift), one);
    return _mm512_mask_or_epi32(x, active, _mm512_sllv_epi32(x, shift), _mm512_and_si512(q, mask));
  }

  KV_AVX512_INLINE __mmask16 full_of_symbol(__m512i x) const {
    return _mm512_mask_cmpge_epu32_mask(active, x, _mm512_slli_epi32(frequency, 21));
  }
  KV_AVX512_INLINE __m512i with_symbol(__m512i x) const {
    __m512i quotient = _mm512_cvttps_epu32(_mm512_mul_ps(_mm512_cvtepu32_ps(x), inverse));
    const __m512i rest = _mm512_sub_epi32(x, _mm512_mullo_epi32(quotient, frequency));
    const __mmask16 one_more = _mm512_cmpge_epu32_mask(rest, frequency);
    quotient = _mm512_mask_add_epi32(quotient, one_more, quotient, _mm512_set1_epi32(1));
    const __m512i others = _mm512_sub_epi32(_mm512_set1_epi32(kSlots), frequency);
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(x, start), _mm512_mullo_epi32(quotient, others));
    return _mm512_mask_mov_epi32(x, active, sum);
  }
};

KV_AVX512 inline kv_u16* code_rows_avx512(const Tables& t, kv_u32* states, const CodedRows& rows, kv_u16* out) {
  __m512i x0 = _mm512_loadu_si512(states), x1 = _mm512_loadu_si512(states + 16);
  kv_u32 from_step = rows.from_step;
  for (kv_u64 row = rows.n; row-- > 0; from_step = rows.steps) {
    for (kv_u32 s = from_step; s-- > 0;) {
      const std::size_t at = (std::size_t)s * kStates;
      const kv_i32* q = rows.residuals + row * rows.steps * kStates + at;
      const kv_u32* tables = rows.classes->tables.data() + at;
      const kv_u32* shifts = rows.classes->shifts.data() + at;
      const kv_u32 lanes = s + 1 < rows.steps ? kStates : rows.last_lanes;
      const kv_u32 active = lanes == kStates ? ~0u : (1u << lanes) - 1;
      Half512 low, high;
      low.active = (__mmask16)active;
      high.active = (__mmask16)(active >> 16);
      const kv_u32 escapes = low.look_up(t, q, tables, shifts) |
                             (kv_u32)high.look_up(t, q + 16, tables + 16, shifts + 16) << 16;
      if (KV_UNLIKELY(escapes)) out = put_escapes(escapes, q, shifts, out);
      if (rows.classes->has_shift[s]) {
        out = Half512::put(x1, high.full_of_low_bits(x1), out);
        out = Half512::put(x0, low.full_of_low_bits(x0), out);
        x1 = high.with_low_bits(x1);
        x0 = low.with_low_bits(x0);
      }
      out = Half512::put(x1, high.full_of_symbol(x1), out);
      out = Half512::put(x0, low.full_of_symbol(x0), out);
      x1 = high.with_symbol(x1);
      x0 = low.with_symbol(x0);
    }
  }
  _mm512_storeu_si512(states, x0);
  _mm512_storeu_si512(states + 16, x1);
  return out;
}
#endif

inline kv_u16* code_rows(const Tables& t, kv_u32* states, const CodedRows& rows, kv_u16* out, bool wide) {
#if KV_X86
  if (wide) return code_rows_avx512(t, states, rows, out);
#endif
  (void)wide;
  return code_rows_plain(t, states, rows, out);
}

}  // namespace kv::kvr1
