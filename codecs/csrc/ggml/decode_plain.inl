// f16 and the schemes of one scale a block, or a scale and an offset. Part of decode.inl; layouts: FORMAT.md 10.4.

template <class Out>
void decode_q8_0(const kv_u8* in, kv_u64 n_blocks, Out* out) {
  for (; n_blocks > 0; --n_blocks, in += 34, out += 32) {
    const float d = half_at(in);
    put(load<Codes>(in + 2), d, out);
    put(load<Codes>(in + 18), d, out + 16);
  }
}

template <class Out>
void decode_q4_0(const kv_u8* in, kv_u64 n_blocks, Out* out) {
  for (; n_blocks > 0; --n_blocks, in += 18, out += 32) {
    const float d = half_at(in);
    const Bytes q = load<Bytes>(in + 2);
    put(field(q, 0, 4) - all(8), d, out);
    put(field(q, 4, 4) - all(8), d, out + 16);
  }
}

template <class Out>
void decode_q4_1(const kv_u8* in, kv_u64 n_blocks, Out* out) {
  for (; n_blocks > 0; --n_blocks, in += 20, out += 32) {
    const float d = half_at(in), m = half_at(in + 2);
    const Bytes q = load<Bytes>(in + 4);
    put(field(q, 0, 4), d, m, out);
    put(field(q, 4, 4), d, m, out + 16);
  }
}

// Sixteen codes of four bits with a fifth from `high`.
inline Bytes five_bits(Bytes low, kv_u32 high) { return low | ((Bytes)bit_mask(high) & all(16)); }

template <class Out>
void decode_q5_0(const kv_u8* in, kv_u64 n_blocks, Out* out) {
  for (; n_blocks > 0; --n_blocks, in += 22, out += 32) {
    const float d = half_at(in);
    const Bytes q = load<Bytes>(in + 6);
    put(five_bits(field(q, 0, 4), load<kv_u16>(in + 2)) - all(16), d, out);
    put(five_bits(field(q, 4, 4), load<kv_u16>(in + 4)) - all(16), d, out + 16);
  }
}

template <class Out>
void decode_q5_1(const kv_u8* in, kv_u64 n_blocks, Out* out) {
  for (; n_blocks > 0; --n_blocks, in += 24, out += 32) {
    const float d = half_at(in), m = half_at(in + 2);
    const Bytes q = load<Bytes>(in + 8);
    put(five_bits(field(q, 0, 4), load<kv_u16>(in + 4)), d, m, out);
    put(five_bits(field(q, 4, 4), load<kv_u16>(in + 6)), d, m, out + 16);
  }
}

template <class Out>
void decode_q1_0(const kv_u8* in, kv_u64 n_blocks, Out* out) {
  for (; n_blocks > 0; --n_blocks, in += 18, out += 128) {
    const float d = half_at(in);
    for (int i = 0; i < 8; ++i) {
      const Codes set = spread_bits(load<kv_u16>(in + 2 + 2 * i));
      put(-(set + set) - (Codes)all(1), d, out + 16 * i);
    }
  }
}

// Four codes a byte that are neighbours as values: byte i has values 4 i to 4 i + 3.
template <class Out>
inline void put_quarters(Bytes q, float d, Out* out) {
  const Bytes c0 = field(q, 0, 2), c1 = field(q, 2, 2), c2 = field(q, 4, 2), c3 = field(q, 6, 2);
  const Bytes lower = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  const Bytes upper = lower + all(8);
  const Shorts lower_pairs = {0, 8, 1, 9, 2, 10, 3, 11}, upper_pairs = lower_pairs + 4;
  for (int half = 0; half < 2; ++half) {
    const Bytes order = half ? upper : lower;
    const Shorts even = (Shorts)__builtin_shuffle(c0, c1, order), odd = (Shorts)__builtin_shuffle(c2, c3, order);
    put((Bytes)__builtin_shuffle(even, odd, lower_pairs) - all(1), d, out + 32 * half);
    put((Bytes)__builtin_shuffle(even, odd, upper_pairs) - all(1), d, out + 32 * half + 16);
  }
}

template <class Out>
void decode_q2_0(const kv_u8* in, kv_u64 n_blocks, Out* out) {
  for (; n_blocks > 0; --n_blocks, in += 18, out += 64) put_quarters(load<Bytes>(in + 2), half_at(in), out);
}

template <class Out>
void decode_q2_0_128(const kv_u8* in, kv_u64 n_blocks, Out* out) {
  for (; n_blocks > 0; --n_blocks, in += 34, out += 128) {
    const float d = half_at(in);
    put_quarters(load<Bytes>(in + 2), d, out);
    put_quarters(load<Bytes>(in + 18), d, out + 64);
  }
}

inline void decode_f16(const kv_u8* in, kv_u64 n, float* out) {
#if KV_GGML_BITS == 512
  for (; n >= 16; n -= 16, in += 32, out += 16)
    _mm512_storeu_ps(out, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)in)));
#elif KV_GGML_BITS == 256
  for (; n >= 8; n -= 8, in += 16, out += 8)
    _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)in)));
#endif
  for (kv_u64 i = 0; i < n; ++i) out[i] = half_at(in + 2 * i);
}
inline void decode_f16(const kv_u8* in, kv_u64 n, kv_u16* out) { std::memcpy(out, in, 2 * n); }
