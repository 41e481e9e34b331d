// Encoders of all schemes. FORMAT.md section 10 says which search each of them does.
#pragma once

#include "../simd.hpp"
#include "scheme.hpp"

namespace kv::ggml {

// Encodes `n_blocks` whole blocks of finite values. False: a block's scale leaves float16.
using Encode = bool (*)(const float* x, kv_u64 n_blocks, kv_u8* out);

// The encoder of a scheme; null if there is none. All levels give the same bytes.
Encode encoder(kv_u32 scheme, int level);

}  // namespace kv::ggml
