// Decoders of all schemes, each compiled for every instruction set in decode.cpp.
#pragma once

#include "../simd.hpp"
#include "scheme.hpp"

namespace kv::ggml {

// Decodes whole blocks: `n_blocks` of them, one after the other, at any address. Reads nothing else, whatever the bytes
// are. Out of scales that are not finite come values that are not, and NaN of no particular bits.
using Decode = void (*)(const kv_u8* blocks, kv_u64 n_blocks, float* out);

// The decoder of a scheme; null if there is none. All levels give the same bits.
Decode decoder(kv_u32 scheme, int level);

// The same values as `Decode` gives, narrowed to float16 on the way. False: one of them overflows.
using DecodeHalf = bool (*)(const kv_u8* blocks, kv_u64 n_blocks, kv_u16* out);

DecodeHalf half_decoder(kv_u32 scheme, int level);

}  // namespace kv::ggml
