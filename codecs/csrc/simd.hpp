// Instruction sets: functions compiled for one of them, chosen at run time.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define KV_X86 1
// GCC's own header reads a variable it declares as undefined on purpose, and warns about itself (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#define KV_AVX2 __attribute__((target("avx2,f16c,popcnt")))
#define KV_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,popcnt")))
#define KV_AVX512_INLINE KV_AVX512 inline __attribute__((always_inline))
#define KV_AVX2_INLINE KV_AVX2 inline __attribute__((always_inline))

namespace kv {

inline bool avx2_supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("popcnt");
}
inline bool avx512_supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("popcnt");
}

}  // namespace kv
#else
#define KV_X86 0
namespace kv {
inline bool avx2_supported() { return false; }
inline bool avx512_supported() { return false; }
}  // namespace kv
#endif

namespace kv {

// Instruction sets, best last. All give the same bits.
enum Level : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

inline bool level_supported(int level) {
  if (level == kPortable) return true;
  if (level == kAvx2) return avx2_supported();
  return level == kAvx512 && avx512_supported();
}
inline int best_level() { return avx512_supported() ? kAvx512 : avx2_supported() ? kAvx2 : kPortable; }

}  // namespace kv

// Plain loops that the compiler vectorises for several CPUs.
#if KV_X86 && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define KV_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define KV_CLONES
#endif
