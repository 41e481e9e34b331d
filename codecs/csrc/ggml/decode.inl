// The decoders as plain loops. decode.cpp includes this once for each instruction set, in a namespace of its own.

inline float half_at(const kv_u8* at) {
  kv_u16 bits;
  std::memcpy(&bits, at, 2);
  return from_float16(bits);
}

void decode_f16(const kv_u8* blocks, kv_u64 n_blocks, float* __restrict out) {
  for (kv_u64 i = 0; i < n_blocks; ++i) out[i] = half_at(blocks + 2 * i);
}

void decode_q8_0(const kv_u8* blocks, kv_u64 n_blocks, float* __restrict out) {
  for (kv_u64 b = 0; b < n_blocks; ++b, blocks += 34, out += 32) {
    const float d = half_at(blocks);
    for (int i = 0; i < 32; ++i) out[i] = (float)(signed char)blocks[2 + i] * d;
  }
}

Decode decoder(kv_u32 scheme) {
  switch (scheme) {
    case kF16: return decode_f16;
    case kQ8_0: return decode_q8_0;
    default: return nullptr;
  }
}
