#include "encode_families.hpp"

namespace kv::ggml {

Encode k_encoder(kv_u32, int) { return nullptr; }

}  // namespace kv::ggml
