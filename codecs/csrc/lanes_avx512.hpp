// Sixteen lanes at once with AVX-512: the lane decoder of lane.hpp, one lane per vector element.
//
// Scalar decoding spends most of its time on mispredicted branches, since the bits it branches on are nearly
// random. Here every lane takes every step under a mask. The models of the sixteen lanes are interleaved
// (word i of lane l is at 16 i + l), so that gathers and scatters of one model share a cache line.
#pragma once

#include <cstring>
#include <vector>

#include "lane.hpp"
#include "simd.hpp"

namespace kv {

constexpr kv_u32 kWide = 16;
// Products of a residual below 2^24 and the scale stay below 2^30.
constexpr kv_u32 kWideMaxSinkDiv = 64;
// Offsets into the staging buffer are signed 32-bit.
constexpr kv_u64 kWideMaxBytes = 1u << 26;

}  // namespace kv

#if KV_X86
namespace kv {

// Sixteen range decoders. Bytes come from a staging buffer in which zeros follow each substream.
struct WideCoder {
  __m512i code, range;
  __m512i high, low;  // the next eight bytes, big endian
  __m512i n_bytes;    // of which are valid
  __m512i position, end;
  const kv_u8* staged;
  kv_u32* models;

  KV_AVX512_INLINE void refill() {
    const __mmask16 m = _mm512_cmple_epu32_mask(n_bytes, _mm512_set1_epi32(4));
    const __m512i at = _mm512_min_epu32(position, end);  // at the end for good: a position never wraps
    __m512i x = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), m, at, staged, 1);
    const __m512i swap = _mm512_broadcast_i32x4(_mm_setr_epi8(3, 2, 1, 0, 7, 6, 5, 4, 11, 10, 9, 8, 15, 14, 13, 12));
    x = _mm512_shuffle_epi8(x, swap);
    const __m512i bits = _mm512_slli_epi32(n_bytes, 3);
    high = _mm512_mask_or_epi32(high, m, high, _mm512_srlv_epi32(x, bits));
    low = _mm512_mask_sllv_epi32(low, m, x, _mm512_sub_epi32(_mm512_set1_epi32(32), bits));
    n_bytes = _mm512_mask_add_epi32(n_bytes, m, n_bytes, _mm512_set1_epi32(4));
    position = _mm512_mask_add_epi32(at, m, at, _mm512_set1_epi32(4));
  }

  KV_AVX512_INLINE void shift_byte(__mmask16 m) {
    range = _mm512_mask_slli_epi32(range, m, range, 8);
    code = _mm512_mask_or_epi32(code, m, _mm512_slli_epi32(code, 8), _mm512_srli_epi32(high, 24));
    high = _mm512_mask_or_epi32(high, m, _mm512_slli_epi32(high, 8), _mm512_srli_epi32(low, 24));
    low = _mm512_mask_slli_epi32(low, m, low, 8);
    n_bytes = _mm512_mask_sub_epi32(n_bytes, m, n_bytes, _mm512_set1_epi32(1));
  }

  KV_AVX512_INLINE void renormalise() {
    const __m512i top = _mm512_set1_epi32((int)kTop);
    shift_byte(_mm512_cmplt_epu32_mask(range, top));
    const __mmask16 again = _mm512_cmplt_epu32_mask(range, top);
    if (KV_UNLIKELY(again)) shift_byte(again);
  }

  // A symbol rarely takes more than the three bytes that a refill at its start leaves to spare.
  KV_AVX512_INLINE void refill_if_low() {
    if (KV_UNLIKELY(_mm512_cmplt_epu32_mask(n_bytes, _mm512_set1_epi32(2)))) refill();
  }

  // The split that decode and decode_raw share; lanes outside `active` keep their state.
  KV_AVX512_INLINE __mmask16 split(__mmask16 active, __m512i bound) {
    const __mmask16 one = _mm512_mask_cmplt_epu32_mask(active, code, bound);
    const __mmask16 zero = (__mmask16)(active & ~one);
    range = _mm512_mask_mov_epi32(_mm512_mask_sub_epi32(range, zero, range, bound), one, bound);
    code = _mm512_mask_sub_epi32(code, zero, code, bound);
    return one;
  }

  KV_AVX512_INLINE __mmask16 decode(__mmask16 active, __m512i index) {
    const __m512i half = _mm512_set1_epi32(0xFFFF), whole = _mm512_set1_epi32((int)kOne);
    const __m512i m = _mm512_mask_i32gather_epi32(half, active, index, models, 4);
    const __m512i fast = _mm512_and_si512(m, half), slow = _mm512_srli_epi32(m, 16);
    const __m512i p = _mm512_srli_epi32(_mm512_add_epi32(fast, slow), 1);
    const __mmask16 one = split(active, _mm512_mullo_epi32(_mm512_srli_epi32(range, 16), p));
    const __m512i fast_down = _mm512_sub_epi32(fast, _mm512_srli_epi32(fast, kFastShift));
    const __m512i slow_down = _mm512_sub_epi32(slow, _mm512_srli_epi32(slow, kSlowShift));
    const __m512i f = _mm512_mask_add_epi32(fast_down, one, fast,
                                            _mm512_srli_epi32(_mm512_sub_epi32(whole, fast), kFastShift));
    const __m512i s = _mm512_mask_add_epi32(slow_down, one, slow,
                                            _mm512_srli_epi32(_mm512_sub_epi32(whole, slow), kSlowShift));
    _mm512_mask_i32scatter_epi32(models, active, index, _mm512_or_si512(f, _mm512_slli_epi32(s, 16)), 4);
    renormalise();
    return one;
  }

  KV_AVX512_INLINE __mmask16 decode_raw(__mmask16 active) {
    const __mmask16 one = split(active, _mm512_slli_epi32(_mm512_srli_epi32(range, 16), 15));
    renormalise();
    return one;
  }

  // decode_residual of lane.hpp. Lanes that read 24 ones are added to `bad`.
  KV_AVX512_INLINE __m512i residual(__mmask16 active, __m512i context, __mmask16& bad) {
    const __m512i one = _mm512_set1_epi32(1);
    refill();
    const __mmask16 nonzero = (__mmask16)(active & ~decode(active, context));
    if (!nonzero) return _mm512_setzero_si512();
    const __mmask16 negative = decode_raw(nonzero);
    __m512i k = _mm512_setzero_si512();  // of the lanes whose unary part has ended
    __mmask16 open = nonzero;
    for (kv_u32 i = 0; open; ++i) {
      if (KV_UNLIKELY(i == kBits)) {
        bad |= open;
        break;
      }
      refill_if_low();
      const __m512i index = _mm512_add_epi32(context, _mm512_set1_epi32((int)((kUnary + i) * kWide)));
      const __mmask16 more = decode(open, index);
      k = _mm512_mask_set1_epi32(k, (__mmask16)(open & ~more), (int)i);
      open = more;
    }
    __m512i w = one;
    const __mmask16 mantissa = _mm512_mask_cmpgt_epu32_mask(nonzero, k, _mm512_setzero_si512());
    if (mantissa) {
      refill_if_low();
      const __m512i index = _mm512_add_epi32(
          context, _mm512_slli_epi32(_mm512_add_epi32(k, _mm512_set1_epi32((int)kMantissa)), 4));
      const __mmask16 top = decode(mantissa, index);
      w = _mm512_mask_mov_epi32(w, mantissa, _mm512_set1_epi32(2));
      w = _mm512_mask_or_epi32(w, top, w, one);
      for (kv_u32 i = 1;; ++i) {
        const __mmask16 raw = _mm512_mask_cmpgt_epu32_mask(mantissa, k, _mm512_set1_epi32((int)i));
        if (!raw) break;
        refill_if_low();
        const __mmask16 bit = decode_raw(raw);
        w = _mm512_mask_slli_epi32(w, raw, w, 1);
        w = _mm512_mask_or_epi32(w, bit, w, one);
      }
    }
    const __m512i q = _mm512_maskz_mov_epi32(nonzero, w);
    return _mm512_mask_sub_epi32(q, negative, _mm512_setzero_si512(), q);
  }
};

// What a group of lanes needs: everything as [channel][16].
struct WideLanes {
  kv_u32 width = 0;
  kv_u32 sink_div = 1;
  alignas(64) kv_u64 first_token[kWide];
  alignas(64) kv_u64 sink[kWide];
  alignas(64) kv_u32 position[kWide];
  alignas(64) kv_u32 end[kWide];
  std::vector<kv_i32> mean, rho, base, previous, context, values;
  std::vector<kv_u32> models;
  std::vector<kv_u8> staged;
  WideCoder coder;

  // Lanes join one by one; every lane of a group has this width.
  void start(kv_u32 lane_width, kv_u32 div) {
    width = lane_width;
    sink_div = div;
    for (auto* table : {&mean, &rho, &base, &previous, &context, &values}) table->assign((std::size_t)width * kWide, 0);
    models.resize((std::size_t)kPriorWords * kWide);
    staged.assign(16, 0);
    std::memset(position, 0, sizeof position);
    std::memset(end, 0, sizeof end);
    std::memset(first_token, 0, sizeof first_token);
    std::memset(sink, 0, sizeof sink);
  }

  void add(kv_u32 lane, const kv_u8* bytes, kv_u64 n_bytes, const Channel* channels, const kv_u8* classes,
           kv_u64 first, kv_u64 lane_sink) {
    position[lane] = (kv_u32)staged.size();
    staged.insert(staged.end(), bytes, bytes + n_bytes);
    end[lane] = (kv_u32)staged.size();
    staged.insert(staged.end(), 16, 0);
    first_token[lane] = first;
    sink[lane] = lane_sink;
    for (kv_u32 c = 0; c < width; ++c) {
      const std::size_t i = (std::size_t)c * kWide + lane;
      mean[i] = previous[i] = channels[c].mean;
      rho[i] = (kv_i32)channels[c].rho;
      base[i] = context[i] = (kv_i32)(classes[channels[c].models] * kClassModels * kWide + lane);
    }
  }

  KV_AVX512 void begin(const kv_u32* prior) {
    for (kv_u32 i = 0; i < kPriorWords; ++i)
      _mm512_storeu_si512(models.data() + (std::size_t)i * kWide, _mm512_set1_epi32((int)prior[i]));
    coder.staged = staged.data();
    coder.models = models.data();
    coder.position = _mm512_load_si512(position);
    coder.end = _mm512_load_si512(end);
    coder.range = _mm512_set1_epi32(-1);
    coder.code = coder.high = coder.low = coder.n_bytes = _mm512_setzero_si512();
    coder.refill();
    coder.code = coder.high;
    coder.high = coder.low = coder.n_bytes = _mm512_setzero_si512();
    coder.refill();
  }

  // Token `t` of every lane in `active` into values[channel][lane], in units. Lanes that hit a fault are added to
  // bad_residual or bad_value and end there.
  KV_AVX512 void row(kv_u32 t, kv_u32 active_lanes, kv_u32& bad_residual, kv_u32& bad_value) {
    alignas(64) kv_i32 scale_of[kWide];
    for (kv_u32 l = 0; l < kWide; ++l) scale_of[l] = first_token[l] + t < sink[l] ? 1 : (kv_i32)sink_div;
    const __m512i scale = _mm512_load_si512(scale_of);
    __mmask16 active = (__mmask16)active_lanes, residual_fault = 0, value_fault = 0;
    WideCoder w = coder;
    for (std::size_t i = 0; i < (std::size_t)width * kWide; i += kWide) {
      const __m512i q = w.residual(active, _mm512_loadu_si512(&context[i]), residual_fault);
      const __m512i mu = _mm512_loadu_si512(&mean[i]), before = _mm512_loadu_si512(&previous[i]);
      const __m512i pull = _mm512_mullo_epi32(_mm512_loadu_si512(&rho[i]), _mm512_sub_epi32(before, mu));
      const __m512i prediction = _mm512_add_epi32(mu, _mm512_srai_epi32(pull, 4));
      const __m512i value = _mm512_add_epi32(prediction, _mm512_mullo_epi32(q, scale));
      active &= (__mmask16)~residual_fault;
      value_fault |= _mm512_mask_cmpge_epu32_mask(active, _mm512_abs_epi32(value), _mm512_set1_epi32(kValueLimit));
      active &= (__mmask16)~value_fault;
      _mm512_storeu_si512(&values[i], value);
      _mm512_mask_storeu_epi32(&previous[i], active, value);
      const __m512i magnitude = _mm512_min_epu32(_mm512_abs_epi32(q), _mm512_set1_epi32(2));
      const __m512i act = _mm512_mullo_epi32(magnitude, _mm512_set1_epi32((int)(kContextModels * kWide)));
      _mm512_mask_storeu_epi32(&context[i], active, _mm512_add_epi32(_mm512_loadu_si512(&base[i]), act));
    }
    coder = w;
    bad_residual |= residual_fault;
    bad_value |= value_fault;
  }

  // The row just decoded of one lane, times `unit`, into out[0 .. width).
  KV_AVX512 void take(kv_u32 lane, float unit, float* out) const {
    const __m512i stride = _mm512_mullo_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32((int)kWide));
    const __m512 u = _mm512_set1_ps(unit);
    kv_u32 c = 0;
    for (; c + 16 <= width; c += 16) {
      const __m512i v = _mm512_i32gather_epi32(stride, &values[(std::size_t)c * kWide + lane], 4);
      _mm512_storeu_ps(out + c, _mm512_mul_ps(_mm512_cvtepi32_ps(v), u));
    }
    for (; c < width; ++c) out[c] = (float)values[(std::size_t)c * kWide + lane] * unit;
  }
};

}  // namespace kv
#endif
