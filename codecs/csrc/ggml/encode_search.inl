// Searches that several families share. Sixteen sub-blocks are searched side by side, one in each lane, position after
// position: `x[i][lane]` is value i of a lane's sub-block. A lane's sums are made in one order however wide vectors
// are, so that every instruction set finds the same.

constexpr int kLanes = 16, kWide = KV_GGML_BITS / 32;
typedef float Floats __attribute__((vector_size(KV_GGML_BITS / 8)));

inline Floats load(const float* at) {
  Floats v;
  std::memcpy(&v, at, sizeof v);
  return v;
}
inline void store(Floats v, float* at) { std::memcpy(at, &v, sizeof v); }
inline Floats all(float value) { return Floats{} + value; }
inline Floats least(Floats a, Floats b) { return a < b ? a : b; }
inline Floats most(Floats a, Floats b) { return a > b ? a : b; }
inline Floats magnitude(Floats a) { return a < 0 ? -a : a; }
// 1 / a, and 0 where there is nothing to divide by.
inline Floats inverse(Floats a) { return a != 0 ? 1 / a : all(0); }
// To a whole number between two others, both below 2^22; NaN becomes the lower one.
inline Floats nearest_between(Floats v, float low, float high) {
  v = v > low ? v : all(low);
  v = v < high ? v : all(high);
  return (v + 12582912.0f) - 12582912.0f;
}

// Whole numbers from kLow to kHigh.
template <int kLow, int kHigh>
struct Whole {
  static constexpr float kLeast = kLow;
  static Floats nearest(Floats v) { return nearest_between(v, kLow, kHigh); }
  static kv_u8 code(float value) { return (kv_u8)((int)value - kLow); }
};

// A magnitude that no scheme of scales in float16 comes near, and one that rounds to zero in all of them. Squares and
// their sums stay in float32 between the two.
constexpr float kBeyondAll = 1.0995116e12f, kBelowAll = 8.6736174e-19f;

inline float largest_of(const float* x, int n) {
  kv_i32 largest = 0;
  for (int i = 0; i < n; ++i) {
    const kv_i32 bits = (kv_i32)(bits_of(x[i]) & 0x7FFFFFFFu);
    largest = bits > largest ? bits : largest;
  }
  return float_of((kv_u32)largest);
}

// A scale as it is stored; what would round to zero is the least float16. Infinite beyond.
inline float stored(float d) {
  const float half = from_float16(to_float16_bits(d));
  return half != 0 || d == 0 ? half : d < 0 ? -5.9604645e-08f : 5.9604645e-08f;
}

// `kPerBlock` sub-blocks of kN values each out of 16 / kPerBlock blocks. Blocks that are too small for any scale are
// all zeros.
template <int kN, int kPerBlock>
inline void into_lanes(const float* const* blocks, float (*x)[kLanes]) {
  for (int b = 0; b < kLanes / kPerBlock; ++b) {
    const float factor = largest_of(blocks[b], kN * kPerBlock) > kBelowAll ? 1.0f : 0.0f;
    for (int g = 0; g < kPerBlock; ++g)
      for (int i = 0; i < kN; ++i) x[i][b * kPerBlock + g] = blocks[b][g * kN + i] * factor;
  }
}

// The unit of a block's scales as an encoder that does not search stores it, and the `k` with which `d (first + step k)`
// is nearest to a scale. Every search tries them, so that none of them errs more than that.
inline float simple_unit(float d) { return from_float16(to_float16_bits(d)); }
inline float simple_multiple(float scale, float d, float low, float high, float first = 0, float step = 1) {
  const float k = d != 0 ? std::nearbyint((scale / d - first) / step) : 0;
  return k < low ? low : k > high ? high : k;
}

// The squared error of each lane as zeros.
template <int kN>
inline Floats squares_of(const float (*x)[kLanes], int lane) {
  Floats sum = all(0);
  for (int i = 0; i < kN; ++i) {
    const Floats v = load(x[i] + lane);
    sum += v * v;
  }
  return sum;
}

// ---- Values that are a scale times a code.

// The scale of each lane with the least squared error among those that put the value of largest magnitude on one of
// `levels`, each fitted to the codes that follow from it, and the best of them once more. `simple` are those that put
// it on the least code.
template <class Code, int kN>
void search_scales(const float (*x)[kLanes], const float* levels, int n_levels, float* scales, float* simple) {
  for (int lane = 0; lane < kLanes; lane += kWide) {
    Floats big = all(0), best = all(0), scale = all(0);
    for (int i = 0; i < kN; ++i) {
      const Floats v = load(x[i] + lane);
      big = magnitude(v) > magnitude(big) ? v : big;
    }
    const Floats step = inverse(big);
    for (int k = 0; k < n_levels + 2; ++k) {
      const Floats factor = k < n_levels ? levels[k] * step : inverse(scale);
      Floats xq = all(0), qq = all(0);
      for (int i = 0; i < kN; ++i) {
        const Floats v = load(x[i] + lane), q = Code::nearest(v * factor);
        xq += v * q;
        qq += q * q;
      }
      const Floats fit = xq / qq, gain = xq * fit;
      scale = gain > best ? fit : scale;
      best = gain > best ? gain : best;
    }
    store(scale, scales + lane);
    store(big / Code::kLeast, simple + lane);
  }
}

// The squared error of each lane with the scale `step`.
template <class Code, int kN>
inline Floats error_of(const float (*x)[kLanes], int lane, Floats step) {
  const Floats factor = inverse(step);
  Floats sum = all(0);
  for (int i = 0; i < kN; ++i) {
    const Floats v = load(x[i] + lane), e = v - step * Code::nearest(v * factor);
    sum += e * e;
  }
  return sum;
}

// Every lane's best multiple of `d`, among the one nearest to its scale and its neighbours.
template <class Code, int kN>
void choose_multiples(const float (*x)[kLanes], const float* scales, const float* d, float low, float high,
                      float* multiples, float* errors) {
  for (int lane = 0; lane < kLanes; lane += kWide) {
    const Floats unit = load(d + lane), middle = nearest_between(load(scales + lane) * inverse(unit), low, high);
    Floats best = error_of<Code, kN>(x, lane, unit * middle), chosen = middle;
    for (int side = 0; side < 2; ++side) {
      const Floats other = side == 0 ? most(middle - 1, all(low)) : least(middle + 1, all(high));
      const Floats error = error_of<Code, kN>(x, lane, unit * other);
      chosen = error < best ? other : chosen;
      best = least(error, best);
    }
    store(chosen, multiples + lane);
    store(best, errors + lane);
  }
}

// What one block's scales became: `d`, a multiple of it for every lane, and whether it fits in float16.
struct Multiples {
  float d[kLanes], of[kLanes];
  bool fits;
};

// The codes of every lane under its scale, and the sums that fit a scale to them.
template <class Code, int kN>
void codes_of(const float (*x)[kLanes], const float* steps, float (*q)[kLanes], float* xq_sums, float* qq_sums) {
  for (int lane = 0; lane < kLanes; lane += kWide) {
    const Floats factor = inverse(load(steps + lane));
    Floats xq = all(0), qq = all(0);
    for (int i = 0; i < kN; ++i) {
      const Floats v = load(x[i] + lane), code = Code::nearest(v * factor);
      store(code, q[i] + lane);
      xq += v * code;
      qq += code * code;
    }
    store(xq, xq_sums + lane);
    store(qq, qq_sums + lane);
  }
}

// One scale for each block and multiples of it from `low` to `high`, none of which errs more than zeros: the largest
// scale is tried on every multiple of `ends`, the largest simple one on `high`, then the scale is fitted to the codes
// twice. `q` gets the codes' values.
template <class Code, int kN, int kPerBlock>
Multiples search_multiples(const float (*x)[kLanes], const float* scales, const float* simple, const float* ends,
                           int n_ends, float low, float high, float (*q)[kLanes]) {
  constexpr int kBlocks = kLanes / kPerBlock, kFits = 2;
  const int n_starts = n_ends + 1;
  Multiples best{};
  alignas(64) float d[kLanes], multiples[kLanes], errors[kLanes], steps[kLanes], xq[kLanes], qq[kLanes];
  float largest[kBlocks], largest_simple[kBlocks], least_error[kBlocks];
  bool fits[kBlocks] = {};
  for (int lane = 0; lane < kLanes; lane += kWide) store(squares_of<kN>(x, lane), errors + lane);
  for (int b = 0; b < kBlocks; ++b) {
    largest[b] = largest_simple[b] = least_error[b] = 0;
    for (int g = b * kPerBlock; g < (b + 1) * kPerBlock; ++g) {
      if (std::fabs(scales[g]) > std::fabs(largest[b])) largest[b] = scales[g];
      if (std::fabs(simple[g]) > largest_simple[b]) largest_simple[b] = std::fabs(simple[g]);
      least_error[b] += errors[g];
    }
  }
  for (int k = 0; k < n_starts + kFits; ++k) {
    for (int b = 0; b < kBlocks; ++b) {
      float unit;
      if (k < n_ends) {
        unit = stored(largest[b] / ends[k]);
      } else if (k == n_ends) {
        unit = simple_unit(largest_simple[b] / high);
      } else {
        float over = 0, under = 0;
        for (int g = b * kPerBlock; g < (b + 1) * kPerBlock; ++g) {
          over += best.of[g] * xq[g];
          under += best.of[g] * best.of[g] * qq[g];
        }
        unit = under > 0 ? stored(over / under) : 0;
      }
      const bool finite = std::fabs(unit) < kInfinity;
      if (k < n_starts) fits[b] |= finite;
      for (int g = b * kPerBlock; g < (b + 1) * kPerBlock; ++g) d[g] = finite ? unit : 0;
    }
    if (k == n_ends) {
      for (int g = 0; g < kLanes; ++g) multiples[g] = simple_multiple(simple[g], d[g], low, high);
      for (int lane = 0; lane < kLanes; lane += kWide)
        store(error_of<Code, kN>(x, lane, load(d + lane) * load(multiples + lane)), errors + lane);
    } else {
      choose_multiples<Code, kN>(x, scales, d, low, high, multiples, errors);
    }
    for (int b = 0; b < kBlocks; ++b) {
      float error = 0;
      for (int g = b * kPerBlock; g < (b + 1) * kPerBlock; ++g) error += errors[g];
      if (!(error < least_error[b])) continue;
      least_error[b] = error;
      for (int g = b * kPerBlock; g < (b + 1) * kPerBlock; ++g) {
        best.d[g] = d[g];
        best.of[g] = multiples[g];
      }
    }
    if (k < n_starts - 1) continue;
    for (int g = 0; g < kLanes; ++g) steps[g] = best.d[g] * best.of[g];
    codes_of<Code, kN>(x, steps, q, xq, qq);
  }
  best.fits = true;
  for (bool fit : fits) best.fits &= fit;
  return best;
}
