#include "decode.hpp"

#include <cmath>
#include <cstring>

#include "../half.hpp"
#include "../narrow.hpp"
#include "tables.hpp"

namespace kv::ggml {
namespace {

// Where the float16 scales of a block are, and the power of two below which no value of it leaves float16: the largest
// scale times the largest code, plus the largest offset. log2 is -1 where values have to be looked at.
struct ScaleLimit {
  kv_u32 d, m;
  int log2;
};

constexpr ScaleLimit scale_limit(kv_u32 scheme) {
  switch (scheme) {
    case kQ4_0: return {0, 0, 12};     // 8
    case kQ4_1: return {0, 2, 11};     // 15 + 1
    case kQ5_0: return {0, 0, 11};     // 16
    case kQ5_1: return {0, 2, 10};     // 31 + 1
    case kQ8_0: return {0, 0, 8};      // 128
    case kQ2_K: return {80, 82, 10};   // 15 * 3 + 15
    case kQ3_K: return {108, 108, 8};  // 32 * 4
    case kQ4_K: return {0, 2, 6};      // 63 * 15 + 63
    case kQ5_K: return {0, 2, 5};      // 63 * 31 + 63
    case kQ6_K: return {208, 208, 3};  // 128 * 32
    case kIQ2_XXS: case kIQ2_XS: case kIQ2_S: return {0, 0, 8};  // 15.5 * 0.25 * 43
    case kIQ3_XXS: return {0, 0, 7};   // 15.5 * 0.5 * 62
    case kIQ3_S: return {0, 0, 7};     // 31 * 15
    case kIQ1_S: return {0, 0, 11};    // 15 * 1.125
    case kIQ4_NL: return {0, 0, 9};    // 127
    case kIQ4_XS: return {0, 0, 4};    // 32 * 127
    case kTQ1_0: return {52, 52, 15};  // 1
    case kTQ2_0: return {64, 64, 14};  // 2
    case kQ1_0: return {0, 0, 15};     // 1
    case kQ2_0: case kQ2_0_128: return {0, 0, 14};  // 2
    default: return {0, 0, -1};
  }
}

}  // namespace
}  // namespace kv::ggml

// The decoders, once for each instruction set, in a namespace of its own. GCC's pragma does not define its macros in
// time: the width of vectors says which instructions there are.
#define KV_GGML_LEVEL portable
#define KV_GGML_BITS 128
#include "decode.inl"
#undef KV_GGML_BITS
#undef KV_GGML_LEVEL

#if KV_X86
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#define KV_GGML_LEVEL avx2
#define KV_GGML_BITS 256
#include "decode.inl"
#undef KV_GGML_BITS
#undef KV_GGML_LEVEL
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c")
#define KV_GGML_LEVEL avx512
#define KV_GGML_BITS 512
#include "decode.inl"
#undef KV_GGML_BITS
#undef KV_GGML_LEVEL
#pragma GCC pop_options
#endif

namespace kv::ggml {

Decode decoder(kv_u32 scheme, int level) {
#if KV_X86
  if (level == kAvx512) return avx512::decoder(scheme);
  if (level == kAvx2) return avx2::decoder(scheme);
#endif
  (void)level;
  return portable::decoder(scheme);
}

DecodeHalf half_decoder(kv_u32 scheme, int level) {
#if KV_X86
  if (level == kAvx512) return avx512::half_decoder(scheme);
  if (level == kAvx2) return avx2::half_decoder(scheme);
#endif
  (void)level;
  return portable::half_decoder(scheme);
}

}  // namespace kv::ggml
