#include "kernels.hpp"

#include <cmath>
#include <cstring>
#include <limits>

#include "../half.hpp"
#include "payload.hpp"

namespace kv::fib {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

typedef float Four __attribute__((vector_size(16)));

}  // namespace
}  // namespace kv::fib

// The kernels, once for each instruction set, in a namespace of its own.
#define KV_FIB_LEVEL portable
#define KV_FIB_BITS 128
#include "kernels.inl"
#undef KV_FIB_BITS
#undef KV_FIB_LEVEL

#if KV_X86
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define KV_FIB_LEVEL avx2
#define KV_FIB_BITS 256
#include "kernels.inl"
#undef KV_FIB_BITS
#undef KV_FIB_LEVEL
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")
#define KV_FIB_LEVEL avx512
#define KV_FIB_BITS 512
#include "kernels.inl"
#undef KV_FIB_BITS
#undef KV_FIB_LEVEL
#pragma GCC pop_options
#endif

namespace kv::fib {

const Kernels& kernels_of(int level) {
#if KV_X86
  if (level == kAvx512) return avx512::kKernels;
  if (level == kAvx2 && __builtin_cpu_supports("fma")) return avx2::kKernels;
#endif
  (void)level;
  return portable::kKernels;
}

}  // namespace kv::fib
