#include <cmath>
#include <cstring>

#include "encode_families.hpp"
#include "encode_fields.hpp"

#define KV_GGML_SOURCE "encode_k.inl"
#include "encode_levels.inl"

namespace kv::ggml {

Encode k_encoder(kv_u32 scheme, int level) {
#if KV_X86
  if (level == kAvx512) return avx512::k_encoder(scheme);
  if (level == kAvx2) return avx2::k_encoder(scheme);
#endif
  (void)level;
  return portable::k_encoder(scheme);
}

}  // namespace kv::ggml
