// The kernel, on vectors of one instruction set. kernel.cpp includes this once for each, in a namespace of its own.

// 2^x for x <= 0, with a relative error of 2e-7; zero below 2^-126. Not a number stays what it is.
KV_ATTEND Vec power(Vec x) {
  x = max(all(-127.0f), x);
  const Vec whole = round(x), f = x - whole;
  Vec p = all(1.533757684e-04f);
  p = fma(p, f, all(1.339986036e-03f));
  p = fma(p, f, all(9.618519534e-03f));
  p = fma(p, f, all(5.550328998e-02f));
  p = fma(p, f, all(2.402264661e-01f));
  p = fma(p, f, all(6.931472056e-01f));
  p = fma(p, f, all(1.0f));
  return times_power(p, whole);
}

KV_ATTEND float power(float x) {
  float lanes[kLanes];
  store(lanes, power(all(x)));
  return lanes[0];
}

// Scores of kRows query rows, each by itself, [row][kTileRows].
template <int kRows>
KV_ATTEND void scores_of_rows(const float* q, kv_u64 q_stride, const Tile& tile, float* scores) {
  for (kv_u32 t = 0; t < tile.n; t += 4) {
    const float* k = tile.k + t * tile.k_stride;
    Vec sums[kRows][4];
    for (int r = 0; r < kRows; ++r)
      for (int i = 0; i < 4; ++i) sums[r][i] = all(0.0f);
    for (kv_u64 d = 0; d < q_stride; d += kLanes) {
      const Vec k0 = load(k + d), k1 = load(k + tile.k_stride + d);
      const Vec k2 = load(k + 2 * tile.k_stride + d), k3 = load(k + 3 * tile.k_stride + d);
      for (int r = 0; r < kRows; ++r) {
        const Vec x = load(q + r * q_stride + d);
        sums[r][0] = fma(x, k0, sums[r][0]);
        sums[r][1] = fma(x, k1, sums[r][1]);
        sums[r][2] = fma(x, k2, sums[r][2]);
        sums[r][3] = fma(x, k3, sums[r][3]);
      }
    }
    for (int r = 0; r < kRows; ++r)
      sum4(sums[r][0], sums[r][1], sums[r][2], sums[r][3], scores + r * kTileRows + t);
  }
}

// Scores of query rows side by side in kVectors vectors, [tile row][width].
template <int kVectors, int kRows>
KV_ATTEND void scores_of_panel(const float* q, kv_u32 k_dim, const Tile& tile, float* scores) {
  constexpr kv_u32 kWidth = kVectors * kLanes;
  const kv_u64 s = tile.k_stride, s3 = 3 * s, s5 = 5 * s, s7 = 7 * s;
  for (kv_u32 t = 0; t < tile.n; t += kRows) {
    Vec sums[kRows][kVectors];
    for (int i = 0; i < kRows; ++i)
      for (int j = 0; j < kVectors; ++j) sums[i][j] = all(0.0f);
    const float* k = tile.k + t * s;
    const float* x = q;
    for (kv_u32 d = 0; d < k_dim; ++d, ++k, x += kWidth) {
      Vec rows[kVectors];
      for (int j = 0; j < kVectors; ++j) rows[j] = load(x + j * kLanes);
      // Eight rows by one address and four multiples of the stride: there are no registers for more.
      auto take = [&](int i, float value) KV_TARGET __attribute__((always_inline)) {
        for (int j = 0; j < kVectors; ++j) sums[i][j] = fma(all(value), rows[j], sums[i][j]);
      };
      take(0, k[0]);
      take(1, k[s]);
      take(2, k[2 * s]);
      take(3, k[s3]);
      if constexpr (kRows > 4) {
        take(4, k[4 * s]);
        take(5, k[s5]);
        take(6, k[2 * s3]);
        take(7, k[s7]);
      }
      if constexpr (kRows > 8) {
        const float* more = k + 8 * s;
        take(8, more[0]);
        take(9, more[s]);
        take(10, more[2 * s]);
        take(11, more[s3]);
        take(12, more[4 * s]);
        take(13, more[s5]);
        take(14, more[2 * s3]);
        take(15, more[s7]);
      }
    }
    for (int i = 0; i < kRows; ++i)
      for (int j = 0; j < kVectors; ++j) store(scores + (t + i) * kWidth + j * kLanes, sums[i][j]);
  }
}

// The scores in float64, as a float32 and the rest. They are met where |q k| is large: speed is not.
KV_ATTEND void exact_scores(const Shape& shape, const HeadQueries& q, const Panel& panel, const Tile& tile,
                            const Scratch& x) {
  const kv_u64 row_stride = panel.width ? 1 : kTileRows, t_stride = panel.width ? panel.width : 1;
  for (kv_u32 r = 0; r < panel.n; ++r) {
    const float* __restrict row = q.as_given + (panel.first + r) * shape.k_stride;
    for (kv_u32 t = 0; t < tile.n; ++t) {
      const float* __restrict k = tile.k + t * tile.k_stride;
      double sums[8] = {};
      for (kv_u64 d = 0; d < shape.k_stride; d += 8)
        for (int i = 0; i < 8; ++i) sums[i] += (double)row[d + i] * (double)k[d + i];
      double score = 0;
      for (double part : sums) score += part;
      score *= shape.factor;
      const float high = (float)score;
      x.scores[r * row_stride + t * t_stride] = high;
      x.rest[r * row_stride + t * t_stride] = (float)(score - high);
    }
  }
}

// Largest magnitude of each channel.
KV_ATTEND void largest_of_channels(const Tile& tile, kv_u64 n_channels, float* out) {
  for (kv_u64 d = 0; d < n_channels; d += kPad) {
    constexpr int n = kPad / kLanes;
    Vec most[2][n];
    for (int j = 0; j < n; ++j) most[0][j] = most[1][j] = all(0.0f);
    const float* k = tile.k + d;
    kv_u32 t = 0;
    for (; t + 2 <= tile.n; t += 2, k += 2 * tile.k_stride)
      for (int i = 0; i < 2; ++i)
        for (int j = 0; j < n; ++j)
          most[i][j] = max(most[i][j], magnitude(load(k + i * tile.k_stride + j * kLanes)));
    for (int j = 0; j < n; ++j) {
      if (t < tile.n) most[0][j] = max(most[0][j], magnitude(load(k + j * kLanes)));
      store(out + d + j * kLanes, max(most[0][j], most[1][j]));
    }
  }
}

KV_ATTEND float dot(const float* a, const float* b, kv_u64 n) {
  Vec total = all(0.0f);
  for (kv_u64 d = 0; d < n; d += kLanes) total = fma(load(a + d), load(b + d), total);
  return sum(total);
}

// Scores to weights, and the state's maximum and sum along. x.scale: what becomes of the sums so far.
template <bool kExact>
KV_ATTEND void weigh_rows(const Panel& panel, kv_u32 n, const HeadState& state, const Scratch& x) {
  for (kv_u32 r = 0; r < panel.n; ++r) {
    float* s = x.scores + r * kTileRows;
    float* rest = x.rest + r * kTileRows;
    const kv_u32 end = (n + kLanes - 1) / kLanes * kLanes;
    for (kv_u32 t = n; t < end; ++t) {
      s[t] = -std::numeric_limits<float>::infinity();
      rest[t] = 0.0f;
    }
    float& top = state.max[panel.first + r];
    Vec most = all(top);
    for (kv_u32 t = 0; t < end; t += kLanes) most = max(most, load(s + t));
    const float before = top;
    top = largest(most);
    // Where nothing was seen yet, any finite reference does.
    const float reference = top > kLowest ? top : kLowest;
    Vec total = all(0.0f);
    for (kv_u32 t = 0; t < end; t += kLanes) {
      Vec distance = load(s + t) - all(reference);
      if (kExact) distance = distance + load(rest + t);
      const Vec weight = power(distance);
      store(s + t, weight);
      total = total + weight;
    }
    x.scale[r] = before == top ? 1.0f : power(before - reference);
    float& all_weights = state.sum[panel.first + r];
    all_weights = all_weights * x.scale[r] + sum(total);
  }
}

template <bool kExact>
KV_ATTEND void weigh_panel(const Panel& panel, kv_u32 n, const HeadState& state, const Scratch& x) {
  for (kv_u32 j = 0; j < panel.width; j += kLanes) {
    float* s = x.scores + j;
    float* top = state.max + panel.first + j;
    float* all_weights = state.sum + panel.first + j;
    const Vec before = load(top);
    Vec most = before;
    for (kv_u32 t = 0; t < n; ++t) most = max(most, load(s + t * panel.width));
    const Vec reference = max(most, all(kLowest));
    Vec total = all(0.0f);
    for (kv_u32 t = 0; t < n; ++t) {
      Vec distance = load(s + t * panel.width) - reference;
      if (kExact) distance = distance + load(x.rest + j + t * panel.width);
      const Vec weight = power(distance);
      store(s + t * panel.width, weight);
      total = total + weight;
    }
    const Vec scale = power(before - reference);
    store(x.scale + j, scale);
    store(top, most);
    store(all_weights, fma(load(all_weights), scale, total));
  }
}

// Adds the weighted V rows to kRows output rows and kVectors vectors of them.
template <int kRows, int kVectors>
KV_ATTEND void add_block(const float* weights, kv_u64 row_stride, kv_u64 t_stride, const float* v, kv_u64 v_stride,
                         kv_u32 n, const float* scale, float* out, kv_u64 out_stride) {
  Vec sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kVectors; ++c) sums[r][c] = all(0.0f);
  for (kv_u32 t = 0; t < n; ++t, v += v_stride, weights += t_stride) {
    Vec values[kVectors];
    for (int c = 0; c < kVectors; ++c) values[c] = load(v + c * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = all(weights[r * row_stride]);
      for (int c = 0; c < kVectors; ++c) sums[r][c] = fma(weight, values[c], sums[r][c]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kVectors; ++c) {
      float* at = out + r * out_stride + c * kLanes;
      store(at, fma(load(at), all(scale[r]), sums[r][c]));
    }
}

template <int kRows, int kVectors>
KV_ATTEND void add_rows(const Shape& shape, const Tile& tile, const float* weights, kv_u64 row_stride, kv_u64 t_stride,
                        const float* scale, float* out) {
  kv_u64 c = 0;
  for (; c + kVectors * kLanes <= shape.v_stride; c += kVectors * kLanes)
    add_block<kRows, kVectors>(weights, row_stride, t_stride, tile.v + c, tile.v_stride, tile.n, scale, out + c,
                               shape.v_stride);
  for (; c < shape.v_stride; c += kLanes)
    add_block<kRows, 1>(weights, row_stride, t_stride, tile.v + c, tile.v_stride, tile.n, scale, out + c,
                        shape.v_stride);
}

// As many sums as the registers hold: 32 vectors with AVX-512, 16 else.
constexpr int kWide = kLanes == 16 ? 2 : 1;

KV_ATTEND void add_weighted(const Shape& shape, const Panel& panel, const Tile& tile, const HeadState& state,
                            const Scratch& x) {
  const kv_u64 row_stride = panel.width ? 1 : kTileRows, t_stride = panel.width ? panel.width : 1;
  const float* weights = x.scores;
  float* out = state.out + panel.first * shape.v_stride;
  kv_u32 r = 0;
  for (; r + 4 <= panel.n; r += 4, weights += 4 * row_stride, out += 4 * shape.v_stride)
    add_rows<4, 2 * kWide>(shape, tile, weights, row_stride, t_stride, x.scale + r, out);
  for (; r + 2 <= panel.n; r += 2, weights += 2 * row_stride, out += 2 * shape.v_stride)
    add_rows<2, 4 * kWide>(shape, tile, weights, row_stride, t_stride, x.scale + r, out);
  if (r < panel.n) add_rows<1, 8>(shape, tile, weights, row_stride, t_stride, x.scale + r, out);
}

KV_ATTEND void mask(const Shape& shape, const Panel& panel, const Tile& tile, const Scratch& x) {
  const kv_u64 row_stride = panel.width ? 1 : kTileRows, t_stride = panel.width ? panel.width : 1;
  for (kv_u32 r = 0; r < panel.n; ++r) {
    const Range& range = shape.ranges[panel.first + r];
    for (kv_u32 t = 0; t < tile.n; ++t) {
      const kv_i64 position = tile.first_position + t;
      if (position >= range.first && position <= range.last) continue;
      x.scores[r * row_stride + t * t_stride] = -std::numeric_limits<float>::infinity();
      x.rest[r * row_stride + t * t_stride] = 0.0f;
    }
  }
}

KV_ATTEND void scores(const Shape& shape, const Panel& panel, const float* q, const Tile& tile, float* out) {
  if (panel.width == 2 * kLanes) {
    scores_of_panel<2, 4 * kWide>(q, shape.k_dim, tile, out);
  } else if (panel.width == kLanes) {
    scores_of_panel<1, 8 * kWide>(q, shape.k_dim, tile, out);
  } else {
    constexpr int kMost = 2 * kWide;
    kv_u32 r = 0;
    for (; r + kMost <= panel.n; r += kMost)
      scores_of_rows<kMost>(q + r * shape.k_stride, shape.k_stride, tile, out + r * kTileRows);
    for (; r + 2 <= panel.n; r += 2)
      scores_of_rows<2>(q + r * shape.k_stride, shape.k_stride, tile, out + r * kTileRows);
    if (r < panel.n) scores_of_rows<1>(q + r * shape.k_stride, shape.k_stride, tile, out + r * kTileRows);
  }
}

KV_TARGET void attend(const Shape& shape, const HeadQueries& q, const HeadState& state, const Tile& tile,
                      const Scratch& x) {
  largest_of_channels(tile, shape.k_stride, x.largest);
  for (kv_u32 p = 0; p < shape.n_panels; ++p) {
    const Panel& panel = shape.panels[p];
    const kv_i64 first = tile.first_position, last = first + tile.n - 1;
    bool any = false, whole = true;
    for (kv_u32 r = panel.first; r < panel.first + panel.n; ++r) {
      const Range& range = shape.ranges[r];
      any |= range.first <= last && range.last >= first;
      whole &= range.first <= first && range.last >= last;
    }
    if (!any) continue;
    // Also where it is not a number.
    const bool exact = !(dot(q.largest + p * shape.k_stride, x.largest, shape.k_stride) <= kLargestSum);
    if (exact)
      exact_scores(shape, q, panel, tile, x);
    else
      scores(shape, panel, q.scaled + panel.first * shape.k_stride, tile, x.scores);
    if (!whole) mask(shape, panel, tile, x);
    if (panel.width && exact)
      weigh_panel<true>(panel, tile.n, state, x);
    else if (panel.width)
      weigh_panel<false>(panel, tile.n, state, x);
    else if (exact)
      weigh_rows<true>(panel, tile.n, state, x);
    else
      weigh_rows<false>(panel, tile.n, state, x);
    add_weighted(shape, panel, tile, state, x);
  }
}

KV_TARGET void rotate(float* rows, kv_u64 stride, kv_u32 n_rows, kv_u32 half, kv_u32 n_pairs, const float* cos,
                      const float* sin) {
  for (kv_u32 t = 0; t < n_rows; ++t, rows += stride, cos += n_pairs, sin += n_pairs) {
    float* __restrict first = rows;
    float* __restrict second = rows + half;
    const float* __restrict c = cos;
    const float* __restrict s = sin;
    for (kv_u32 i = 0; i < n_pairs; ++i) {
      const float a = first[i], b = second[i];
      first[i] = a * c[i] - b * s[i];
      second[i] = b * c[i] + a * s[i];
    }
  }
}

// The angle is taken in float32, as models do; its cosine and sine within 1e-8 of the true ones.
KV_TARGET void angles(const float* inv_freq, kv_u32 n_pairs, float scaling, kv_i64 position, kv_u32 n_rows, float* cos,
                      float* sin) {
  // Pi / 2 in parts whose products with whole numbers below 2^26 are exact.
  constexpr double kFirst = 0x1.921fb5p+0, kSecond = 0x1.110b46p-26, kThird = 0x1.1a62633145c07p-54;
  constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52
  for (kv_u32 t = 0; t < n_rows; ++t) {
    const float at = (float)(position + t);
    float* __restrict c = cos + (kv_u64)t * n_pairs;
    float* __restrict s = sin + (kv_u64)t * n_pairs;
    for (kv_u32 i = 0; i < n_pairs; ++i) {
      const double angle = (double)(at * inv_freq[i]);
      union {
        double value;
        kv_u64 bits;
      } turns;
      turns.value = angle * 0.63661977236758134308 + kMagic;
      const double n = turns.value - kMagic;
      const double r = ((angle - n * kFirst) - n * kSecond) - n * kThird, r2 = r * r;
      const double sine =
          r + r * r2 * (-1.0 / 6 + r2 * (1.0 / 120 + r2 * (-1.0 / 5040 + r2 * (1.0 / 362880 - r2 / 39916800))));
      const double cosine =
          1 + r2 * (-1.0 / 2 + r2 * (1.0 / 24 + r2 * (-1.0 / 720 + r2 * (1.0 / 40320 - r2 / 3628800))));
      const kv_u64 odd = -(turns.bits & 1);
      union {
        double value;
        kv_u64 bits;
      } a, b;
      a.value = cosine;
      b.value = sine;
      const kv_u64 swap = (a.bits ^ b.bits) & odd;
      a.bits ^= swap ^ ((turns.bits + 1) & 2) << 62;
      b.bits ^= swap ^ (turns.bits & 2) << 62;
      c[i] = (float)a.value * scaling;
      s[i] = (float)b.value * scaling;
    }
    for (kv_u32 i = 0; i < n_pairs; ++i) {
      const float angle = at * inv_freq[i];
      if (std::fabs(angle) < 33554432.0f) continue;
      c[i] = (float)std::cos((double)angle) * scaling;
      s[i] = (float)std::sin((double)angle) * scaling;
    }
  }
}

constexpr Kernel kKernel{kLanes, attend, rotate, angles};
