// Rotations of vectors in lanes and their inverses, every operation in the order that FORMAT.md gives. Part of
// kernels.inl.

// kRows rows of Q u, from row i on.
template <kv_u32 kRows>
inline void haar_rows(const float* q, kv_u32 d, kv_u32 i, const float* u, float* y) {
  for (kv_u32 l = 0; l < kLanes; l += kWidth) {
    Vec sums[kRows] = {};
    for (kv_u32 j = 0; j < d; ++j) {
      const Vec x = load(u + j * kLanes + l);
      for (kv_u32 r = 0; r < kRows; ++r) sums[r] = sums[r] + all(q[(kv_u64)(i + r) * d + j]) * x;
    }
    for (kv_u32 r = 0; r < kRows; ++r) store(y + (i + r) * kLanes + l, sums[r]);
  }
}

// kRows rows of Q^T g, from row j on: the sum of what each codeword, of k values, adds.
template <kv_u32 kRows>
inline void haar_rows_back(const float* q, kv_u32 d, kv_u32 k, kv_u32 j, const float* g, float* v) {
  for (kv_u32 l = 0; l < kLanes; l += kWidth) {
    Vec sums[kRows] = {};
    for (kv_u32 i = 0; i < d; i += k) {
      Vec part[kRows];
      const float* row = q + (kv_u64)i * d + j;
      Vec x = load(g + i * kLanes + l);
      for (kv_u32 r = 0; r < kRows; ++r) part[r] = all(row[r]) * x;
      for (kv_u32 n = 1; n < k; ++n) {
        row += d;
        x = load(g + (i + n) * kLanes + l);
        for (kv_u32 r = 0; r < kRows; ++r) part[r] = part[r] + all(row[r]) * x;
      }
      for (kv_u32 r = 0; r < kRows; ++r) sums[r] = i == 0 ? part[r] : sums[r] + part[r];
    }
    for (kv_u32 r = 0; r < kRows; ++r) store(v + (j + r) * kLanes + l, sums[r]);
  }
}

// Stages h, 2h, .. of the butterflies of m values; the last of all is times the factor.
template <kv_u32 kStages>
inline void butterflies(float* x, kv_u32 m, kv_u32 h, float factor) {
  const bool last = h << kStages == m;
  constexpr kv_u32 kRows = 1 << kStages;
  for (kv_u32 base = 0; base < m; base += h * kRows)
    for (kv_u32 at = base * kLanes; at < (base + h) * kLanes; at += kWidth) {
      Vec r[kRows];
      for (kv_u32 i = 0; i < kRows; ++i) r[i] = load(x + at + i * h * kLanes);
      for (kv_u32 s = 1; s < kRows; s *= 2)
        for (kv_u32 i = 0; i < kRows; ++i)
          if (!(i & s)) {
            const Vec a = r[i], b = r[i + s];
            r[i] = a + b;
            r[i + s] = a - b;
          }
      for (kv_u32 i = 0; i < kRows; ++i) store(x + at + i * h * kLanes, last ? r[i] * factor : r[i]);
    }
}

inline void hadamard(float* x, kv_u32 m) {
  const float scale = (float)(1 / std::sqrt((double)m));
  for (kv_u32 h = 1; h < m;) {
    if (h * 8 <= m) {
      butterflies<3>(x, m, h, scale);
      h *= 8;
    } else if (h * 4 <= m) {
      butterflies<2>(x, m, h, scale);
      h *= 4;
    } else {
      butterflies<1>(x, m, h, scale);
      h *= 2;
    }
  }
}

inline void change_signs(float* x, kv_u32 d, const float* signs) {
  for (kv_u32 c = 0; c < d; ++c)
    for (kv_u32 l = 0; l < kLanes; l += kWidth) store(x + c * kLanes + l, load(x + c * kLanes + l) * signs[c]);
}

inline kv_u32 power_of_two(kv_u32 d) {
  kv_u32 m = 1;
  while (2 * m <= d) m *= 2;
  return m;
}

// The rotated vectors, in x or in y.
inline float* rotate(const Book& book, float* x, float* y) {
  const kv_u32 d = book.d;
  const float* const data = book.rotation_data.data();
  if (book.rotation == kHaar) {
    kv_u32 i = 0;
    for (; i + 4 <= d; i += 4) haar_rows<4>(data, d, i, x, y);
    for (; i < d; ++i) haar_rows<1>(data, d, i, x, y);
    return y;
  }
  const kv_u32 m = power_of_two(d);
  for (kv_u32 round = 0; round < 2; ++round) {
    change_signs(x, d, data + round * d);
    hadamard(x, m);
    if (m < d) hadamard(x + (d - m) * kLanes, m);
  }
  return x;
}

inline float* rotate_back(const Book& book, float* x, float* y) {
  const kv_u32 d = book.d, k = book.codewords.k();
  const float* const data = book.rotation_data.data();
  if (book.rotation == kHaar) {
    kv_u32 j = 0;
    for (; j + 4 <= d; j += 4) haar_rows_back<4>(data, d, k, j, x, y);
    for (; j < d; ++j) haar_rows_back<1>(data, d, k, j, x, y);
    return y;
  }
  const kv_u32 m = power_of_two(d);
  for (kv_u32 round = 2; round-- > 0;) {
    if (m < d) hadamard(x + (d - m) * kLanes, m);
    hadamard(x, m);
    change_signs(x, d, data + round * d);
  }
  return x;
}
