#include "decode.hpp"

#include <cmath>
#include <cstring>

#include "../half.hpp"
#include "../narrow.hpp"
#include "tables.hpp"

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
