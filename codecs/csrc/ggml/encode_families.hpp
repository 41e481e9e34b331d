// The encoders of each family, in a source of their own; null if a scheme is not of the family.
#pragma once

#include "encode.hpp"

namespace kv::ggml {

Encode plain_encoder(kv_u32 scheme, int level);  // and ternary, and q8_k, which has nothing to search
Encode k_encoder(kv_u32 scheme, int level);
Encode iq_encoder(kv_u32 scheme, int level);

}  // namespace kv::ggml
