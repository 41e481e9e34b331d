#include "kernel.hpp"

#include <cmath>
#include <cstring>
#include <limits>

namespace kv::attention {

namespace {

constexpr float kLowest = -std::numeric_limits<float>::max();

namespace portable {
#define KV_TARGET
#define KV_ATTEND inline __attribute__((always_inline))
#include "portable.inl"
#include "kernel.inl"
#undef KV_TARGET
#undef KV_ATTEND
}  // namespace portable

#if KV_X86
namespace avx2 {
#define KV_TARGET __attribute__((target("avx2,fma")))
#define KV_ATTEND KV_TARGET inline __attribute__((always_inline))
#include "avx2.inl"
#include "kernel.inl"
#undef KV_TARGET
#undef KV_ATTEND
}  // namespace avx2

namespace avx512 {
#define KV_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define KV_ATTEND KV_TARGET inline __attribute__((always_inline))
#include "avx512.inl"
#include "kernel.inl"
#undef KV_TARGET
#undef KV_ATTEND
}  // namespace avx512
#endif

}  // namespace

const Kernel& kernel_of(int level) {
#if KV_X86
  if (level == kAvx512) return avx512::kKernel;
  if (level == kAvx2 && __builtin_cpu_supports("fma")) return avx2::kKernel;
#endif
  (void)level;
  return portable::kKernel;
}

}  // namespace kv::attention
