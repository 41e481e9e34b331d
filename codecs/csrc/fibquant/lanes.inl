// Vectors in rows to vectors in lanes and back, and codewords to vectors in lanes. Part of kernels.inl.

// Four rows of four, with rows and columns changed.
inline void transpose(Four& a, Four& b, Four& c, Four& d) {
  typedef kv_i32 At __attribute__((vector_size(16)));
  const Four ab = __builtin_shuffle(a, b, At{0, 4, 1, 5}), AB = __builtin_shuffle(a, b, At{2, 6, 3, 7});
  const Four cd = __builtin_shuffle(c, d, At{0, 4, 1, 5}), CD = __builtin_shuffle(c, d, At{2, 6, 3, 7});
  a = __builtin_shuffle(ab, cd, At{0, 1, 4, 5});
  b = __builtin_shuffle(ab, cd, At{2, 3, 6, 7});
  c = __builtin_shuffle(AB, CD, At{0, 1, 4, 5});
  d = __builtin_shuffle(AB, CD, At{2, 3, 6, 7});
}
inline Four load4(const float* at) {
  Four x;
  std::memcpy(&x, at, sizeof x);
  return x;
}
inline void store4(float* at, Four x) { std::memcpy(at, &x, sizeof x); }

inline void from_rows(const float* const* rows, kv_u32 n, float* out) {
  for (kv_u32 l = 0; l < kLanes; l += 4) {
    kv_u32 c = 0;
    for (; c + 4 <= n; c += 4) {
      Four a = load4(rows[l] + c), b = load4(rows[l + 1] + c), e = load4(rows[l + 2] + c), f = load4(rows[l + 3] + c);
      transpose(a, b, e, f);
      float* const to = out + c * kLanes + l;
      store4(to, a);
      store4(to + kLanes, b);
      store4(to + 2 * kLanes, e);
      store4(to + 3 * kLanes, f);
    }
    for (; c < n; ++c)
      for (kv_u32 i = 0; i < 4; ++i) out[c * kLanes + l + i] = rows[l + i][c];
  }
}

// Every vector times its norm.
inline void to_rows(const float* x, kv_u32 n, const float* norms, float* rows) {
  for (kv_u32 l = 0; l < kLanes; l += 4) {
    const Four norm = load4(norms + l);
    kv_u32 c = 0;
    for (; c + 4 <= n; c += 4) {
      const float* const from = x + c * kLanes + l;
      Four a = load4(from) * norm, b = load4(from + kLanes) * norm;
      Four e = load4(from + 2 * kLanes) * norm, f = load4(from + 3 * kLanes) * norm;
      transpose(a, b, e, f);
      float* const to = rows + (kv_u64)l * n + c;
      store4(to, a);
      store4(to + n, b);
      store4(to + 2 * (kv_u64)n, e);
      store4(to + 3 * (kv_u64)n, f);
    }
    for (; c < n; ++c)
      for (kv_u32 i = 0; i < 4; ++i) rows[(kv_u64)(l + i) * n + c] = x[c * kLanes + l + i] * norm[i];
  }
}

// kDim: dimensions of a codeword; 0: any.
template <kv_u32 kDim>
inline void gather_dim(const Codewords& codewords, const kv_u32* index, kv_u32 n_blocks, float* out) {
  const kv_u32 k = kDim ? kDim : codewords.k();
  const float* const values = codewords.values();
  for (kv_u32 b = 0; b < n_blocks; ++b, index += kLanes, out += k * kLanes)
    for (kv_u32 l = 0; l < kLanes; l += 4) {
      const float* from[4];
      for (kv_u32 i = 0; i < 4; ++i) from[i] = values + (kv_u64)index[l + i] * k;
      kv_u32 c = 0;
      if (kDim == 0 || kDim >= 4)
        for (; c + 4 <= k; c += 4) {
          Four p = load4(from[0] + c), q = load4(from[1] + c), r = load4(from[2] + c), s = load4(from[3] + c);
          transpose(p, q, r, s);
          float* const to = out + c * kLanes + l;
          store4(to, p);
          store4(to + kLanes, q);
          store4(to + 2 * kLanes, r);
          store4(to + 3 * kLanes, s);
        }
      for (; c < k; ++c) store4(out + c * kLanes + l, Four{from[0][c], from[1][c], from[2][c], from[3][c]});
    }
}

inline void gather(const Codewords& codewords, const kv_u32* index, kv_u32 n_blocks, float* out) {
  switch (codewords.k()) {
    case 2: return gather_dim<2>(codewords, index, n_blocks, out);
    case 3: return gather_dim<3>(codewords, index, n_blocks, out);
    case 4: return gather_dim<4>(codewords, index, n_blocks, out);
    case 8: return gather_dim<8>(codewords, index, n_blocks, out);
    default: return gather_dim<0>(codewords, index, n_blocks, out);
  }
}
