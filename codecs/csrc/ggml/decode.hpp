// Decoders of all schemes, each compiled for every instruction set in decode.cpp.
#pragma once

#include "../simd.hpp"
#include "scheme.hpp"

namespace kv::ggml {

// Decodes whole blocks: `n_blocks` of them, one after the other, at any address.
using Decode = void (*)(const kv_u8* blocks, kv_u64 n_blocks, float* out);

// The decoder of a scheme; null if there is none. All levels give the same bits.
Decode decoder(kv_u32 scheme, int level);

}  // namespace kv::ggml
