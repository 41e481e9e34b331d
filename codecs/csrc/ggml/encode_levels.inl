// Includes KV_GGML_SOURCE once for each instruction set: it fills the namespace KV_GGML_LEVEL. GCC's pragma does not
// define its macros in time: KV_GGML_BITS is the width of vectors.
#define KV_GGML_LEVEL portable
#define KV_GGML_BITS 128
#include KV_GGML_SOURCE
#undef KV_GGML_BITS
#undef KV_GGML_LEVEL

#if KV_X86
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#define KV_GGML_LEVEL avx2
#define KV_GGML_BITS 256
#include KV_GGML_SOURCE
#undef KV_GGML_BITS
#undef KV_GGML_LEVEL
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c")
#define KV_GGML_LEVEL avx512
#define KV_GGML_BITS 512
#include KV_GGML_SOURCE
#undef KV_GGML_BITS
#undef KV_GGML_LEVEL
#pragma GCC pop_options
#endif
