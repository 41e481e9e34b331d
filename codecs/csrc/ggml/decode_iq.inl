// The IQ schemes: values from tables. Part of decode.inl; layouts: FORMAT.md 10.4.

template <class Out>
void decode_iq4_nl(const kv_u8* in, kv_u64 n_blocks, Out* out) {
  for (; n_blocks > 0; --n_blocks, in += 18, out += 32) {
    const float d = half_at(in);
    const Bytes q = load<Bytes>(in + 2);
    put(iq4_values(field(q, 0, 4)), d, out);
    put(iq4_values(field(q, 4, 4)), d, out + 16);
  }
}

inline void iq4_xs_scales(const kv_u8* block, float (&scale)[8]) {
  const float d = half_at(block);
  const kv_u32 high = load<kv_u16>(block + 2), low = load<kv_u32>(block + 4);
  for (int g = 0; g < 8; ++g) scale[g] = d * (float)((int)((low >> 4 * g & 15) | (high >> 2 * g & 3) << 4) - 32);
}

template <class Out>
void decode_iq4_xs(const kv_u8* in, kv_u64 n_blocks, Out* out) {
  for (; n_blocks > 0; --n_blocks, in += 136, out += 256) {
    float scale[8];
    iq4_xs_scales(in, scale);
    for (int g = 0; g < 8; ++g) {
      const Bytes q = load<Bytes>(in + 8 + 16 * g);
      put(iq4_values(field(q, 0, 4)), scale[g], out + 32 * g);
      put(iq4_values(field(q, 4, 4)), scale[g], out + 32 * g + 16);
    }
  }
}

// Sixteen magnitudes: two rows of eight, four rows of four.
template <class T>
inline Codes rows_of(const T (&a)[8], const T (&b)[8]) {
  return (Codes)Longs{load<kv_u64>(a), load<kv_u64>(b)};
}
inline Codes rows_of(const kv_u8 (&a)[4], const kv_u8 (&b)[4], const kv_u8 (&c)[4], const kv_u8 (&d)[4]) {
  return (Codes)Longs{load<kv_u32>(a) | (kv_u64)load<kv_u32>(b) << 32, load<kv_u32>(c) | (kv_u64)load<kv_u32>(d) << 32};
}

// Sixteen signs out of two indices of seven bits.
inline kv_u32 signs_of(kv_u32 a, kv_u32 b) { return kTables.signs[a & 127] | (kv_u32)kTables.signs[b & 127] << 8; }

inline float half_steps(float d, kv_u32 scale) { return d * (0.5f + (float)scale); }

template <class Out>
void decode_iq2_xxs(const kv_u8* in, kv_u64 n_blocks, Out* out) {
  for (; n_blocks > 0; --n_blocks, in += 66, out += 256) {
    const float d = half_at(in);
    for (int group = 0; group < 8; ++group) {
      const kv_u8* q = in + 2 + 8 * group;
      const kv_u32 signs = load<kv_u32>(q + 4);
      const float scale = half_steps(d, signs >> 28) * 0.25f;
      Out* to = out + 32 * group;
      put(with_signs(rows_of(kTables.iq2_xxs[q[0]], kTables.iq2_xxs[q[1]]), signs_of(signs, signs >> 7)), scale, to);
      put(with_signs(rows_of(kTables.iq2_xxs[q[2]], kTables.iq2_xxs[q[3]]), signs_of(signs >> 14, signs >> 21)), scale,
          to + 16);
    }
  }
}

template <class Out>
void decode_iq2_xs(const kv_u8* in, kv_u64 n_blocks, Out* out) {
  for (; n_blocks > 0; --n_blocks, in += 74, out += 256) {
    const float d = half_at(in);
    for (int group = 0; group < 16; ++group) {
      const kv_u32 a = load<kv_u16>(in + 2 + 4 * group), b = load<kv_u16>(in + 4 + 4 * group);
      const float scale = half_steps(d, in[66 + group / 2] >> 4 * (group % 2) & 15) * 0.25f;
      put(with_signs(rows_of(kTables.iq2_xs[a & 511], kTables.iq2_xs[b & 511]), signs_of(a >> 9, b >> 9)), scale,
          out + 16 * group);
    }
  }
}

template <class Out>
void decode_iq2_s(const kv_u8* in, kv_u64 n_blocks, Out* out) {
  for (; n_blocks > 0; --n_blocks, in += 82, out += 256) {
    const float d = half_at(in);
    for (int group = 0; group < 16; ++group) {
      const kv_u8* q = in + 2 + 2 * group;
      const kv_u32 high = in[66 + group / 2] >> 4 * (group % 2);
      const float scale = half_steps(d, in[74 + group / 2] >> 4 * (group % 2) & 15) * 0.25f;
      const kv_u32 a = q[0] | (high & 3) << 8, b = q[1] | (high >> 2 & 3) << 8;
      put(with_signs(rows_of(kTables.iq2_s[a], kTables.iq2_s[b]), load<kv_u16>(q + 32)), scale, out + 16 * group);
    }
  }
}

template <class Out>
void decode_iq3_xxs(const kv_u8* in, kv_u64 n_blocks, Out* out) {
  const auto& grid = kTables.iq3_xxs;
  for (; n_blocks > 0; --n_blocks, in += 98, out += 256) {
    const float d = half_at(in);
    for (int group = 0; group < 8; ++group) {
      const kv_u8* q = in + 2 + 8 * group;
      const kv_u32 signs = load<kv_u32>(in + 66 + 4 * group);
      const float scale = half_steps(d, signs >> 28) * 0.5f;
      Out* to = out + 32 * group;
      put(with_signs(rows_of(grid[q[0]], grid[q[1]], grid[q[2]], grid[q[3]]), signs_of(signs, signs >> 7)), scale, to);
      put(with_signs(rows_of(grid[q[4]], grid[q[5]], grid[q[6]], grid[q[7]]), signs_of(signs >> 14, signs >> 21)),
          scale, to + 16);
    }
  }
}

template <class Out>
void decode_iq3_s(const kv_u8* in, kv_u64 n_blocks, Out* out) {
  const auto& grid = kTables.iq3_s;
  for (; n_blocks > 0; --n_blocks, in += 110, out += 256) {
    const float d = half_at(in);
    for (int group = 0; group < 16; ++group) {
      const kv_u8* q = in + 2 + 4 * group;
      const kv_u32 high = (kv_u32)in[66 + group / 2] >> 4 * (group % 2);  // bit i: ninth bit of index i
      const float scale = d * (float)(1 + 2 * (in[106 + group / 4] >> 4 * (group / 2 % 2) & 15));
      const Codes rows = rows_of(grid[q[0] | (high & 1) << 8], grid[q[1] | (high >> 1 & 1) << 8],
                                 grid[q[2] | (high >> 2 & 1) << 8], grid[q[3] | (high >> 3 & 1) << 8]);
      put(with_signs(rows, load<kv_u16>(in + 74 + 2 * group)), scale, out + 16 * group);
    }
  }
}

// d times an odd number, over 8; the codes are 8 times a row of -1, 0, 1, plus or minus 1.
inline float iq1_scale(float d, kv_u32 scale) { return d * (float)(2 * (scale & 7) + 1) * 0.125f; }

inline Codes iq1_codes(kv_u32 a, kv_u32 b, Codes shifts) {
  const Codes rows = rows_of(kTables.iq1[a], kTables.iq1[b]);
  const Codes twice = rows + rows, four = twice + twice;
  return four + four + shifts;
}

template <class Out>
void decode_iq1_s(const kv_u8* in, kv_u64 n_blocks, Out* out) {
  for (; n_blocks > 0; --n_blocks, in += 50, out += 256) {
    const float d = half_at(in);
    for (int group = 0; group < 8; ++group) {
      const kv_u8* q = in + 2 + 4 * group;
      const kv_u32 high = load<kv_u16>(in + 34 + 2 * group);
      const float scale = iq1_scale(d, high >> 12);
      const Codes shifts = (Codes)all(high >> 15 ? -1 : 1);
      Out* to = out + 32 * group;
      put(iq1_codes(q[0] | (high & 7) << 8, q[1] | (high >> 3 & 7) << 8, shifts), scale, to);
      put(iq1_codes(q[2] | (high >> 6 & 7) << 8, q[3] | (high >> 9 & 7) << 8, shifts), scale, to + 16);
    }
  }
}

template <class Out>
void decode_iq1_m(const kv_u8* in, kv_u64 n_blocks, Out* out) {
  for (; n_blocks > 0; --n_blocks, in += 56, out += 256) {
    const kv_u64 scales = load<kv_u64>(in + 48);
    const kv_u32 d_bits = (kv_u32)((scales >> 12 & 0xF) | (scales >> 24 & 0xF0) | (scales >> 36 & 0xF00) |
                                   (scales >> 48 & 0xF000));
    const kv_u16 d_half = (kv_u16)d_bits;
    const float d = half_at((const kv_u8*)&d_half);
    for (int group = 0; group < 16; ++group) {
      const kv_u8* q = in + 2 * group;
      const kv_u32 high = in[32 + group];
      const float scale = iq1_scale(d, (kv_u32)(scales >> (group / 4 * 16 + group % 4 * 3)));
      const kv_u64 one = 0x0101010101010101u, minus_one = ~(kv_u64)0;
      const Longs shifts = {high & 8 ? minus_one : one, high & 128 ? minus_one : one};
      put(iq1_codes(q[0] | (high & 7) << 8, q[1] | (high >> 4 & 7) << 8, (Codes)shifts), scale, out + 16 * group);
    }
  }
}
