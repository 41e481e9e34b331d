// The decoders of one instruction set, in the namespace KV_GGML_LEVEL.

namespace kv::ggml::KV_GGML_LEVEL {
namespace {

#include "codes.inl"
#include "decode_iq.inl"
#include "decode_k.inl"
#include "decode_plain.inl"
#include "decode_tq.inl"
#if KV_GGML_BITS == 512
#include "halves512.inl"
#endif

template <class Out>
using DecodeTo = void (*)(const kv_u8* blocks, kv_u64 n_blocks, Out* out);

// Null if there is no such scheme.
template <class Out>
constexpr DecodeTo<Out> decode_of(kv_u32 scheme) {
  switch (scheme) {
    case kF16: return decode_f16;
    case kQ4_0: return decode_q4_0;
    case kQ4_1: return decode_q4_1;
    case kQ5_0: return decode_q5_0;
    case kQ5_1: return decode_q5_1;
    case kQ8_0: return decode_q8_0;
    case kQ2_K: return decode_q2_k;
    case kQ3_K: return decode_q3_k;
    case kQ4_K: return decode_q4_k;
    case kQ5_K: return decode_q5_k;
    case kQ6_K: return decode_q6_k;
    case kQ8_K: return decode_q8_k;
    case kIQ2_XXS: return decode_iq2_xxs;
    case kIQ2_XS: return decode_iq2_xs;
    case kIQ3_XXS: return decode_iq3_xxs;
    case kIQ1_S: return decode_iq1_s;
    case kIQ4_NL: return decode_iq4_nl;
    case kIQ3_S: return decode_iq3_s;
    case kIQ2_S: return decode_iq2_s;
    case kIQ4_XS: return decode_iq4_xs;
    case kIQ1_M: return decode_iq1_m;
    case kTQ1_0: return decode_tq1_0;
    case kTQ2_0: return decode_tq2_0;
    case kQ1_0: return decode_q1_0;
    case kQ2_0: return decode_q2_0;
    case kQ2_0_128: return decode_q2_0_128;
    default: return nullptr;
  }
}

#if KV_GGML_BITS >= 256
// Whether all scales of the blocks are so small that no value leaves float16, as is usual: then nobody looks at values.
template <kv_u32 kScheme>
bool small_scales(const kv_u8* blocks, kv_u64 n_blocks) {
  constexpr ScaleLimit kLimit = scale_limit(kScheme);
  if (kLimit.log2 < 0) return false;
  constexpr kv_u32 kBytes = format_of(kScheme).bytes, kBits = (kv_u32)(kLimit.log2 + 15) << 10;
  kv_u32 largest = 0;
  for (kv_u64 i = 0; i < n_blocks; ++i, blocks += kBytes) {
    const kv_u32 d = load<kv_u16>(blocks + kLimit.d) & 0x7FFF, m = load<kv_u16>(blocks + kLimit.m) & 0x7FFF;
    largest = largest > d ? largest : d;
    largest = largest > m ? largest : m;
  }
  return largest < kBits;
}

bool all_fit(const kv_u16* halves, kv_u64 n) {
  kv_u16 largest = 0;
  for (kv_u64 i = 0; i < n; ++i) {
    const kv_u16 magnitude = halves[i] & 0x7FFF;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest < 0x7C00;
}
#endif

// So few values at a time that they are still in the first cache for a second look.
constexpr kv_u64 kValuesAtATime = 2048;

template <kv_u32 kScheme>
bool decode_half(const kv_u8* blocks, kv_u64 n_blocks, kv_u16* out) {
  constexpr Format kFormat = format_of(kScheme);
  constexpr kv_u64 kStep = kValuesAtATime / kFormat.values;
  bool fit = true;
  while (n_blocks > 0) {
    const kv_u64 n = n_blocks < kStep ? n_blocks : kStep, n_values = n * kFormat.values;
#if KV_GGML_BITS >= 256
    decode_of<kv_u16>(kScheme)(blocks, n, out);
    if (!small_scales<kScheme>(blocks, n)) fit &= all_fit(out, n_values);
#else
    float values[kValuesAtATime];
    decode_of<float>(kScheme)(blocks, n, values);
    fit &= !kNarrow.row(values, (kv_u32)n_values, out);
#endif
    n_blocks -= n;
    blocks += n * kFormat.bytes;
    out += n_values;
  }
  return fit;
}

}  // namespace

Decode decoder(kv_u32 scheme) { return decode_of<float>(scheme); }

DecodeHalf half_decoder(kv_u32 scheme) {
  switch (scheme) {
#define KV_HALF(scheme) \
  case scheme: return decode_half<scheme>;
    KV_HALF(kF16) KV_HALF(kQ4_0) KV_HALF(kQ4_1) KV_HALF(kQ5_0) KV_HALF(kQ5_1) KV_HALF(kQ8_0)
    KV_HALF(kQ2_K) KV_HALF(kQ3_K) KV_HALF(kQ4_K) KV_HALF(kQ5_K) KV_HALF(kQ6_K) KV_HALF(kQ8_K)
    KV_HALF(kIQ2_XXS) KV_HALF(kIQ2_XS) KV_HALF(kIQ3_XXS) KV_HALF(kIQ1_S) KV_HALF(kIQ4_NL) KV_HALF(kIQ3_S)
    KV_HALF(kIQ2_S) KV_HALF(kIQ4_XS) KV_HALF(kIQ1_M) KV_HALF(kTQ1_0) KV_HALF(kTQ2_0) KV_HALF(kQ1_0)
    KV_HALF(kQ2_0) KV_HALF(kQ2_0_128)
#undef KV_HALF
    default: return nullptr;
  }
}

}  // namespace kv::ggml::KV_GGML_LEVEL
