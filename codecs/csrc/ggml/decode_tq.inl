// The ternary schemes. Part of decode.inl; layouts: FORMAT.md 10.4.

template <class Out>
void decode_tq2_0(const kv_u8* in, kv_u64 n_blocks, Out* out) {
  for (; n_blocks > 0; --n_blocks, in += 66, out += 256) {
    const float d = half_at(in + 64);
    for (int i = 0; i < 4; ++i) {
      const Bytes q = load<Bytes>(in + 16 * i);
      Out* to = out + i / 2 * 128 + i % 2 * 16;
      for (int j = 0; j < 4; ++j) put(field(q, 2 * j, 2) - all(1), d, to + 32 * j);
    }
  }
}

// The leading trit of fractions of 256, minus 1: 3 q / 256, without a product.
inline Codes leading_trit(Bytes q) { return (Codes)all(-1) - (Codes)(q > all(85)) - (Codes)(q > all(170)); }

template <class Out>
void decode_tq1_0(const kv_u8* in, kv_u64 n_blocks, Out* out) {
  for (; n_blocks > 0; --n_blocks, in += 54, out += 256) {
    const float d = half_at(in + 52);
    for (int i = 0; i < 3; ++i) {
      Bytes q = load<Bytes>(in + 16 * i);
      Out* to = i < 2 ? out + 16 * i : out + 160;
      for (int trit = 0; trit < 5; ++trit, q += q + q) put(leading_trit(q), d, to + trit * (i < 2 ? 32 : 16));
    }
    const kv_u64 last = load<kv_u32>(in + 48) * 0x100000001u;
    const Bytes powers = {1, 1, 1, 1, 3, 3, 3, 3, 9, 9, 9, 9, 27, 27, 27, 27};
    put(leading_trit((Bytes)Longs{last, last} * powers), d, out + 240);
  }
}
