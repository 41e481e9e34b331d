// The K schemes: 256 values with scales of 16 or 32 of them. Part of decode.inl; layouts: FORMAT.md 10.4.

template <class Out>
void decode_q2_k(const kv_u8* in, kv_u64 n_blocks, Out* out) {
  for (; n_blocks > 0; --n_blocks, in += 84, out += 256) {
    float scale[16], offset[16];
    const Bytes scales = load<Bytes>(in);
    put(field(scales, 0, 4), half_at(in + 80), scale);
    put(field(scales, 4, 4), -half_at(in + 82), offset);
    for (int i = 0; i < 4; ++i) {  // 16 bytes: two for each half of the block
      const Bytes q = load<Bytes>(in + 16 + 16 * i);
      const int first = i / 2 * 8 + i % 2;
      for (int j = 0; j < 4; ++j) {
        const int group = first + 2 * j;
        put(field(q, 2 * j, 2), scale[group], offset[group], out + 16 * group);
      }
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
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const Bytes q = load<Bytes>(in + 32 + 16 * i), high = load<Bytes>(in + 16 * (i % 2));
      const int first = i / 2 * 8 + i % 2;
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const int group = first + 2 * j;
        put((field(q, 2 * j, 2) | high_field(high, group / 2, 1, 3)) - all(4), scale[group], out + 16 * group);
      }
    }
  }
}

// Twelve bytes of eight scales and eight offsets of six bits.
inline Bytes q4_k_scales(const kv_u8* at) {
  constexpr kv_u32 kNibbles = 0x0F0F0F0F, kSix = 0x3F3F3F3F, kHigh = 0x30303030;
  const kv_u32 a = load<kv_u32>(at), b = load<kv_u32>(at + 4), low = load<kv_u32>(at + 8);
  const kv_u32 words[4] = {a & kSix, (low & kNibbles) | (a >> 2 & kHigh), b & kSix,
                           (low >> 4 & kNibbles) | (b >> 2 & kHigh)};
  return load<Bytes>(words);
}

template <class Out>
void decode_q4_k(const kv_u8* in, kv_u64 n_blocks, Out* out) {
  for (; n_blocks > 0; --n_blocks, in += 144, out += 256) {
    float scale[16], offset[16];  // scales are the first eight, offsets the last
    const Bytes scales = q4_k_scales(in + 4);
    put(scales, half_at(in), scale);
    put(scales, -half_at(in + 2), offset);
    for (int i = 0; i < 8; ++i) {
      const Bytes q = load<Bytes>(in + 16 + 16 * i);
      const int group = i / 2 * 2;
      Out* to = out + 32 * group + 16 * (i % 2);
      put(field(q, 0, 4), scale[group], offset[8 + group], to);
      put(field(q, 4, 4), scale[group + 1], offset[9 + group], to + 32);
    }
  }
}

template <class Out>
void decode_q5_k(const kv_u8* in, kv_u64 n_blocks, Out* out) {
  for (; n_blocks > 0; --n_blocks, in += 176, out += 256) {
    float scale[16], offset[16];
    const Bytes scales = q4_k_scales(in + 4);
    put(scales, half_at(in), scale);
    put(scales, -half_at(in + 2), offset);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const Bytes q = load<Bytes>(in + 48 + 16 * i), high = load<Bytes>(in + 16 + 16 * (i % 2));
      const int group = i / 2 * 2;
      Out* to = out + 32 * group + 16 * (i % 2);
      put(field(q, 0, 4) | high_field(high, group, 1, 5), scale[group], offset[8 + group], to);
      put(field(q, 4, 4) | high_field(high, group + 1, 1, 5), scale[group + 1], offset[9 + group], to + 32);
    }
  }
}

template <class Out>
void decode_q6_k(const kv_u8* in, kv_u64 n_blocks, Out* out) {
  for (; n_blocks > 0; --n_blocks, in += 210, out += 256) {
    float scale[16];
    put(load<Codes>(in + 192), half_at(in + 208), scale);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const kv_u8* low = in + i / 2 * 64 + i % 2 * 16;
      const Bytes a = load<Bytes>(low), b = load<Bytes>(low + 32), high = load<Bytes>(in + 128 + 16 * i);
      const int first = i / 2 * 8 + i % 2;
      Out* to = out + 16 * first;
      put((field(a, 0, 4) | high_field(high, 0, 2, 6)) - all(32), scale[first], to);
      put((field(b, 0, 4) | high_field(high, 2, 2, 6)) - all(32), scale[first + 2], to + 32);
      put((field(a, 4, 4) | high_field(high, 4, 2, 6)) - all(32), scale[first + 4], to + 64);
      put((field(b, 4, 4) | high_field(high, 6, 2, 6)) - all(32), scale[first + 6], to + 96);
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
