// The kernels: what NVRTC compiles, with the text of the headers in it.
#include "blocks.hpp"
#include "copies.hpp"
#include "lanes.hpp"
#include "vectors.hpp"

extern "C" __global__ void __launch_bounds__(128, 4) kv_decode_lanes(const kv::gpu::LaneArguments* arguments) {
  kv::gpu::decode_lanes(*arguments, (kv_u64)blockIdx.x * blockDim.x + threadIdx.x);
}

extern "C" __global__ void __launch_bounds__(32 * kv::gpu::kMaxWarps, 1)
    kv_decode_blocks(const kv::gpu::BlockArguments* arguments) {
  extern __shared__ kv_u32 shared[];
  const kv::gpu::BlockArguments& a = *arguments;
  const kv_u32 warp = threadIdx.x / 32;
  const kv::gpu::SlotTables tables{kv::gpu::at<const kv_u32>(a.slots)};
  kv::gpu::decode_blocks(a, tables, blockIdx.x * (blockDim.x / 32) + warp, warp, shared);
}

extern "C" __global__ void __launch_bounds__(32 * kv::gpu::kMaxWarps, 1)
    kv_decode_blocks_compact(const kv::gpu::BlockArguments* arguments) {
  extern __shared__ kv_u32 shared[];
  const kv::gpu::BlockArguments& a = *arguments;
  const kv_u32 warp = threadIdx.x / 32;
  const kv_u32* words = kv::gpu::at<const kv_u32>(a.compact);
  for (kv_u32 i = threadIdx.x; i < kv::kvr1::kCompactWords; i += blockDim.x) shared[i] = kv::gpu::load(words + i);
  __syncthreads();
  const kv::gpu::CompactTables tables{kv::gpu::shared_words(shared)};
  kv::gpu::decode_blocks(a, tables, blockIdx.x * (blockDim.x / 32) + warp, warp,
                         shared + kv::kvr1::kCompactWords);
}

extern "C" __global__ void __launch_bounds__(32) kv_look_through_payloads(const kv::gpu::VectorArguments* arguments) {
  kv::gpu::look_through_payloads(*arguments, (kv_u64)blockIdx.x * blockDim.x + threadIdx.x,
                                 (kv_u64)gridDim.x * blockDim.x);
}

extern "C" __global__ void __launch_bounds__(32 * kv::gpu::kMaxVectorWarps, 1)
    kv_decode_vectors(const kv::gpu::VectorArguments* arguments) {
  extern __shared__ kv::gpu::Together rooms[];
  const kv_u32 warp = threadIdx.x / 32;
  kv::gpu::decode_vectors(*arguments, blockIdx.x * (blockDim.x / 32) + warp, warp, rooms);
}

extern "C" __global__ void __launch_bounds__(128) kv_copy_rows(const kv::gpu::CopyArguments* arguments) {
  kv::gpu::copy_rows(*arguments, (kv_u64)blockIdx.x * blockDim.x + threadIdx.x, (kv_u64)gridDim.x * blockDim.x);
}
