// The K schemes: 256 values with scales of 16 or 32 of them. Part of decode.inl; layouts: FORMAT.md 10.4.

inline void q2_k_scales(const kv_u8* block, float (&scale)[16], float (&offset)[16]) {
  const Bytes scales = load<Bytes>(block);
  put(field(scales, 0, 4), half_at(block + 80), scale);
  put(field(scales, 4, 4), -half_at(block + 82), offset);
}

template <class Out>
void decode_q2_k(const kv_u8* in, kv_u64 n_blocks, Out* out) {
  for (; n_blocks > 0; --n_blocks, in += 84, out += 256) {
    float scale[16], offset[16];
    q2_k_scales(in, scale, offset);
    keep_in_memory(scale), keep_in_memory(offset);
#pragma GCC unroll 16
    for (int g = 0; g < 16; ++g) {  // eight of them share two vectors of codes
      const Bytes q = load<Bytes>(in + 16 + g / 8 * 32 + g % 2 * 16);
      put(field(q, g % 8 / 2 * 2, 2), scale[g], offset[g], out + 16 * g);
    }
  }
}

// Twelve bytes of sixteen scales of six bits: their low nibbles, then their high pairs of bits.
inline Bytes q3_k_scales(const kv_u8* at) {
  constexpr kv_u32 kNibbles = 0x0F0F0F0F, kPairs = 0x03030303;
  const kv_u32 a = load<kv_u32>(at), b = load<kv_u32>(at + 4), high = load<kv_u32>(at + 8);
  const kv_u32 words[4] = {(a & kNibbles) | (high & kPairs) << 4, (b & kNibbles) | (high >> 2 & kPairs) << 4,
                           (a >> 4 & kNibbles) | (high >> 4 & kPairs) << 4,
                           (b >> 4 & kNibbles) | (high >> 6 & kPairs) << 4};
  return load<Bytes>(words);
}

template <class Out>
void decode_q3_k(const kv_u8* in, kv_u64 n_blocks, Out* out) {
  for (; n_blocks > 0; --n_blocks, in += 110, out += 256) {
    float scale[16];
    put(q3_k_scales(in + 96) - all(32), half_at(in + 108), scale);
    keep_in_memory(scale);
#pragma GCC unroll 16
    for (int g = 0; g < 16; ++g) {
      const Bytes q = load<Bytes>(in + 32 + g / 8 * 32 + g % 2 * 16), high = load<Bytes>(in + g % 2 * 16);
      put((field(q, g % 8 / 2 * 2, 2) | high_field(high, g / 2, 1, 3)) - all(4), scale[g], out + 16 * g);
    }
  }
}

// Also of q5_k: twelve bytes of eight scales and eight offsets of six bits. The scales are the first eight of `scale`,
// the offsets the last eight of `offset`.
inline void q4_k_scales(const kv_u8* block, float (&scale)[16], float (&offset)[16]) {
  constexpr kv_u32 kNibbles = 0x0F0F0F0F, kSix = 0x3F3F3F3F, kHigh = 0x30303030;
  const kv_u32 a = load<kv_u32>(block + 4), b = load<kv_u32>(block + 8), low = load<kv_u32>(block + 12);
  const kv_u32 words[4] = {a & kSix, (low & kNibbles) | (a >> 2 & kHigh), b & kSix,
                           (low >> 4 & kNibbles) | (b >> 2 & kHigh)};
  put(load<Bytes>(words), half_at(block), scale);
  put(load<Bytes>(words), -half_at(block + 2), offset);
  keep_in_memory(scale), keep_in_memory(offset);
}

template <class Out>
void decode_q4_k(const kv_u8* in, kv_u64 n_blocks, Out* out) {
  for (; n_blocks > 0; --n_blocks, in += 144, out += 256) {
    float scale[16], offset[16];
    q4_k_scales(in, scale, offset);
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
      const kv_u8* q = in + 16 + g / 2 * 32;
      put(field(load<Bytes>(q), g % 2 * 4, 4), scale[g], offset[8 + g], out + 32 * g);
      put(field(load<Bytes>(q + 16), g % 2 * 4, 4), scale[g], offset[8 + g], out + 32 * g + 16);
    }
  }
}

template <class Out>
void decode_q5_k(const kv_u8* in, kv_u64 n_blocks, Out* out) {
  for (; n_blocks > 0; --n_blocks, in += 176, out += 256) {
    float scale[16], offset[16];
    q4_k_scales(in, scale, offset);
    const Bytes high[2] = {load<Bytes>(in + 16), load<Bytes>(in + 32)};
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const int g = i / 2;
      const Bytes q = load<Bytes>(in + 48 + g / 2 * 32 + i % 2 * 16);
      put(field(q, g % 2 * 4, 4) | high_field(high[i % 2], g, 1, 5), scale[g], offset[8 + g], out + 16 * i);
    }
  }
}

template <class Out>
void decode_q6_k(const kv_u8* in, kv_u64 n_blocks, Out* out) {
  for (; n_blocks > 0; --n_blocks, in += 210, out += 256) {
    float scale[16];
    put(load<Codes>(in + 192), half_at(in + 208), scale);
    keep_in_memory(scale);
#pragma GCC unroll 16
    for (int g = 0; g < 16; ++g) {
      const int plane = g % 8 / 2;  // of 32 values, four in each half of the block
      const Bytes q = load<Bytes>(in + g / 8 * 64 + plane % 2 * 32 + g % 2 * 16);
      const Bytes high = load<Bytes>(in + 128 + g / 8 * 32 + g % 2 * 16);
      put((field(q, plane / 2 * 4, 4) | high_field(high, 2 * plane, 2, 6)) - all(32), scale[g], out + 16 * g);
    }
  }
}

template <class Out>
void decode_q8_k(const kv_u8* in, kv_u64 n_blocks, Out* out) {
  for (; n_blocks > 0; --n_blocks, in += 292, out += 256) {
    const float d = load<float>(in);
    for (int i = 0; i < 16; ++i) put(load<Codes>(in + 4 + 16 * i), d, out + 16 * i);
  }
}
