#include <cmath>
#include <cstring>

#include "encode_families.hpp"
#include "encode_fields.hpp"
#include "encode_grids.hpp"
#include "scheme.hpp"

#define KV_GGML_SOURCE "encode_iq.inl"
#include "encode_levels.inl"

namespace kv::ggml {

Encode iq_encoder(kv_u32 scheme, int level) {
#if KV_X86
  if (level == kAvx512) return avx512::iq_encoder(scheme);
  if (level == kAvx2) return avx2::iq_encoder(scheme);
#endif
  (void)level;
  return portable::iq_encoder(scheme);
}

}  // namespace kv::ggml
