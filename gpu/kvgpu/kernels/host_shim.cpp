// The kernels on a host without GPU: threads and warps one after the other. For tests: it proves the kernels' text.
#include <memory>

#include "blocks.hpp"
#include "copies.hpp"
#include "lanes.hpp"
#include "vectors.hpp"

extern "C" void kv_host_decode_lanes(const kv::gpu::LaneArguments* a) {
  for (kv_u64 thread = 0; thread < a->n_threads; ++thread) kv::gpu::decode_lanes(*a, thread);
}

// Shared memory is of just the size that a launch gives, so that sanitizers see what is outside.
template <class SymbolTables>
static void decode_blocks(const kv::gpu::BlockArguments& a, const SymbolTables& tables) {
  const std::unique_ptr<kv_u32[]> shared(new kv_u32[a.shared_words]);
  for (kv_u32 warp = 0; warp < a.n_warps; ++warp) kv::gpu::decode_blocks(a, tables, warp, 0, shared.get());
}

extern "C" void kv_host_decode_blocks(const kv::gpu::BlockArguments* a) {
  decode_blocks(*a, kv::gpu::SlotTables{kv::gpu::at<const kv_u32>(a->slots)});
}

extern "C" void kv_host_decode_blocks_compact(const kv::gpu::BlockArguments* a) {
  decode_blocks(*a, kv::gpu::CompactTables{kv::gpu::shared_words(kv::gpu::at<const kv_u32>(a->compact))});
}

extern "C" void kv_host_look_through_payloads(const kv::gpu::VectorArguments* a) {
  constexpr kv_u64 kThreads = 3;
  for (kv_u64 thread = 0; thread < kThreads; ++thread) kv::gpu::look_through_payloads(*a, thread, kThreads);
}

extern "C" void kv_host_decode_vectors(const kv::gpu::VectorArguments* a) {
  const std::unique_ptr<kv::gpu::Together[]> shared(new kv::gpu::Together[a->shared_words / kv::gpu::kTogether]);
  for (kv_u32 warp = 0; warp < a->n_warps; ++warp) kv::gpu::decode_vectors(*a, warp, 0, shared.get());
}

extern "C" void kv_host_copy_rows(const kv::gpu::CopyArguments* a) {
  constexpr kv_u64 kThreads = 3;
  for (kv_u64 thread = 0; thread < kThreads; ++thread) kv::gpu::copy_rows(*a, thread, kThreads);
}

// Sizes of the structs that Python mirrors.
extern "C" const kv_u32 kv_sizes[] = {
    sizeof(kv::gpu::Source),         sizeof(kv::gpu::Target),        sizeof(kv::gpu::Rotation),
    sizeof(kv::gpu::LaneArguments),  sizeof(kv::gpu::Component),     sizeof(kv::gpu::BlockArguments),
    sizeof(kv::gpu::Copy),           sizeof(kv::gpu::CopyArguments),  sizeof(kv::gpu::Book),
    sizeof(kv::gpu::Span),           sizeof(kv::gpu::Contents),       sizeof(kv::gpu::RawVectors),
    sizeof(kv::gpu::VectorArguments)};
