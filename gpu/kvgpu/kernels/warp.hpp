// A warp as phases over its 32 lanes between collectives, so that a host without GPU can run the same text.
//
// PerLane<T> is one T on the device, of the thread itself, and 32 on the host. KV_EACH_LANE(i) { ... } is one phase: it
// runs for this thread's lane, on the host for one lane after the other. Within a phase a lane touches only [i] of any
// PerLane and memory that no other lane touches in that phase; everything outside of phases is the same in all lanes.
#pragma once

#include "lane.hpp"

#if defined(__CUDACC_RTC__)
#define KV_DEVICE __device__ __forceinline__
#define KV_UNROLL _Pragma("unroll")
#define KV_ROLLED _Pragma("unroll 1")
#define KV_UNROLL_4 _Pragma("unroll 4")
#define KV_EACH_LANE(i) if (const kv_u32 i = threadIdx.x % 32; true)
#else
#define KV_DEVICE inline
#define KV_UNROLL
#define KV_ROLLED
#define KV_UNROLL_4
#define KV_EACH_LANE(i) for (kv_u32 i = 0; i < 32; ++i)
#endif

namespace kv::gpu {

#if defined(__CUDACC_RTC__)
template <class T>
struct PerLane {
  T value;
  KV_DEVICE T& operator[](kv_u32) { return value; }
  KV_DEVICE const T& operator[](kv_u32) const { return value; }
};

KV_DEVICE kv_u32 ballot(const PerLane<bool>& set) { return __ballot_sync(0xFFFFFFFFu, set.value); }
KV_DEVICE kv_u32 count(kv_u32 mask) { return (kv_u32)__popc(mask); }
KV_DEVICE kv_u32 lowest(kv_u32 mask) { return (kv_u32)__ffs(mask) - 1; }
// What lanes wrote to memory before is what all of them read after.
KV_DEVICE void sync_warp() { __syncwarp(); }
#else
template <class T>
struct PerLane {
  T values[32];
  T& operator[](kv_u32 i) { return values[i]; }
  const T& operator[](kv_u32 i) const { return values[i]; }
};

inline kv_u32 ballot(const PerLane<bool>& set) {
  kv_u32 mask = 0;
  for (kv_u32 i = 0; i < 32; ++i) mask |= (kv_u32)set[i] << i;
  return mask;
}
inline kv_u32 count(kv_u32 mask) { return (kv_u32)__builtin_popcount(mask); }
inline kv_u32 lowest(kv_u32 mask) { return (kv_u32)__builtin_ctz(mask); }
inline void sync_warp() {}
#endif

KV_DEVICE bool any(const PerLane<bool>& set) { return ballot(set) != 0; }
KV_DEVICE kv_u32 lanes_below(kv_u32 i) { return (1u << i) - 1; }

}  // namespace kv::gpu
