// Values that are a scale times a code from 0 to kTop, less an offset; neither is negative. Part of encode_k.inl.

// Scale and offset of each lane with the least squared error among those that start from the range of its values, each
// end moved inwards by one of `cuts` of it, each fitted to the codes that follow, and the best of them once more.
template <int kTop, int kN>
void search_offsets(const float (*x)[kLanes], const float* cuts, int n_cuts, float* scales, float* offsets) {
  for (int lane = 0; lane < kLanes; lane += kWide) {
    Floats low = all(0), high = load(x[0] + lane), sum = all(0), squares = all(0);
    for (int i = 0; i < kN; ++i) {
      const Floats v = load(x[i] + lane);
      low = least(low, v);
      high = most(high, v);
    }
    for (int i = 0; i < kN; ++i) {
      const Floats v = load(x[i] + lane) - low;
      sum += v;
      squares += v * v;
    }
    const Floats range = high - low;
    // Without any scale.
    Floats scale = all(0), offset = least(sum / (float)kN, -low);
    Floats best = squares + offset * ((float)kN * offset - 2 * sum);
    for (int k = 0; k < n_cuts * n_cuts + 2; ++k) {
      Floats factor, start;
      if (k < n_cuts * n_cuts) {
        const float below = cuts[k / n_cuts], above = cuts[k % n_cuts];
        start = range * below;
        factor = inverse(range * ((1 - below - above) / (float)kTop));
      } else {
        start = offset;
        factor = inverse(scale);
      }
      const Floats shift = start * factor;
      Floats q1 = all(0), q2 = all(0), xq = all(0);
      for (int i = 0; i < kN; ++i) {
        const Floats v = load(x[i] + lane) - low, q = nearest_between(v * factor - shift, 0, kTop);
        q1 += q;
        q2 += q * q;
        xq += v * q;
      }
      const Floats det = (float)kN * q2 - q1 * q1;
      Floats fit = ((float)kN * xq - q1 * sum) / det, at = (sum - fit * q1) / (float)kN;
      const Floats fit_there = (xq + low * q1) / q2;
      fit = at > -low ? fit_there : fit;
      at = least(at, -low);
      const Floats error = squares + fit * (fit * q2 + 2 * at * q1 - 2 * xq) + at * ((float)kN * at - 2 * sum);
      const auto better = (error < best) & (fit > 0);
      scale = better ? fit : scale;
      offset = better ? at : offset;
      best = better ? error : best;
    }
    store(scale, scales + lane);
    store(most(-low - offset, all(0)), offsets + lane);
  }
}

// Every lane's best multiples of `d` and `dmin`: of three scales around its own, each with the offset that fits best.
template <int kTop, int kN>
void choose_pairs(const float (*x)[kLanes], const float* scales, const float* offsets, const float* d,
                  const float* dmin, float top, float* s, float* m, float* errors) {
  for (int lane = 0; lane < kLanes; lane += kWide) {
    const Floats unit = load(d + lane), unit_m = load(dmin + lane), inverse_m = inverse(unit_m);
    const Floats middle = nearest_between(load(scales + lane) * inverse(unit), 0, top);
    Floats best = all(0), best_s = all(0), best_m = all(0);
    for (int side = 0; side < 3; ++side) {
      const Floats multiple = side == 0 ? middle : side == 1 ? most(middle - 1, all(0)) : least(middle + 1, all(top));
      const Floats step = unit * multiple, factor = inverse(step), shift = load(offsets + lane) * factor;
      Floats rest = all(0);
      for (int i = 0; i < kN; ++i) {
        const Floats v = load(x[i] + lane);
        rest += step * nearest_between(v * factor + shift, 0, kTop) - v;
      }
      const Floats multiple_m = nearest_between(rest * (1.0f / kN) * inverse_m, 0, top);
      const Floats offset = unit_m * multiple_m, shift_m = offset * factor;
      Floats error = all(0);
      for (int i = 0; i < kN; ++i) {
        const Floats v = load(x[i] + lane);
        const Floats e = v - (step * nearest_between(v * factor + shift_m, 0, kTop) - offset);
        error += e * e;
      }
      const auto better = (error < best) | (Floats{} + (float)side == 0);
      best_s = better ? multiple : best_s;
      best_m = better ? multiple_m : best_m;
      best = better ? error : best;
    }
    store(best_s, s + lane);
    store(best_m, m + lane);
    store(best, errors + lane);
  }
}

struct Pairs {
  float d[kLanes], dmin[kLanes], s[kLanes], m[kLanes];
  bool fits;
};

// Sums of each lane that fit scale and offset to its codes.
struct CodeSums {
  alignas(64) float q1[kLanes], q2[kLanes], xq[kLanes], x1[kLanes];
};

template <int kTop, int kN>
void codes_of_pairs(const float (*x)[kLanes], const Pairs& pairs, float (*codes)[kLanes], CodeSums& sums) {
  for (int lane = 0; lane < kLanes; lane += kWide) {
    const Floats factor = inverse(load(pairs.d + lane) * load(pairs.s + lane));
    const Floats shift = load(pairs.dmin + lane) * load(pairs.m + lane) * factor;
    Floats q1 = all(0), q2 = all(0), xq = all(0), x1 = all(0);
    for (int i = 0; i < kN; ++i) {
      const Floats v = load(x[i] + lane), q = nearest_between(v * factor + shift, 0, kTop);
      store(q, codes[i] + lane);
      q1 += q;
      q2 += q * q;
      xq += v * q;
      x1 += v;
    }
    store(q1, sums.q1 + lane);
    store(q2, sums.q2 + lane);
    store(xq, sums.xq + lane);
    store(x1, sums.x1 + lane);
  }
}

// The unit of scales and that of offsets that fit a block's codes.
template <int kN, int kPerBlock>
inline void fit_units(const Pairs& pairs, const CodeSums& sums, int first, float& d, float& dmin) {
  double aa = 0, ab = 0, bb = 0, xa = 0, xb = 0;
  for (int g = first; g < first + kPerBlock; ++g) {
    const double s = pairs.s[g], m = pairs.m[g];
    aa += s * s * sums.q2[g];
    ab += s * m * sums.q1[g];
    bb += m * m * kN;
    xa += s * sums.xq[g];
    xb += m * sums.x1[g];
  }
  const double det = aa * bb - ab * ab;
  double fit = aa > 0 ? xa / aa : 0, fit_m = 0;
  if (det > 1e-9 * aa * bb) {
    fit = (xa * bb - xb * ab) / det;
    fit_m = (xa * ab - xb * aa) / det;
  }
  d = stored(fit > 0 ? (float)fit : 0.0f);
  dmin = stored(fit_m > 0 ? (float)fit_m : 0.0f);
}

// One unit of scales and one of offsets for each block: the largest of each is tried on the multiples of `ends`, then
// both are fitted to the codes twice.
template <int kTop, int kN, int kPerBlock>
Pairs search_pairs(const float (*x)[kLanes], const float* scales, const float* offsets, const float* ends, int n_ends,
                   float top, float (*codes)[kLanes]) {
  constexpr int kBlocks = kLanes / kPerBlock, kFits = 2;
  const int n_starts = n_ends * n_ends;
  Pairs best, now;
  best.fits = true;
  CodeSums sums;
  alignas(64) float errors[kLanes];
  float largest[kBlocks], largest_m[kBlocks], least_error[kBlocks] = {};
  for (int b = 0; b < kBlocks; ++b) {
    largest[b] = largest_m[b] = 0;
    for (int g = b * kPerBlock; g < (b + 1) * kPerBlock; ++g) {
      largest[b] = scales[g] > largest[b] ? scales[g] : largest[b];
      largest_m[b] = offsets[g] > largest_m[b] ? offsets[g] : largest_m[b];
    }
  }
  for (int k = 0; k < n_starts + kFits; ++k) {
    for (int b = 0; b < kBlocks; ++b) {
      float d, dmin;
      if (k < n_starts) {
        d = stored(largest[b] / ends[k / n_ends]);
        dmin = stored(largest_m[b] / ends[k % n_ends]);
      } else {
        fit_units<kN, kPerBlock>(best, sums, b * kPerBlock, d, dmin);
      }
      if (!(d < kInfinity) || !(dmin < kInfinity)) {
        if (k == 0) best.fits = false;
        d = dmin = 0;
      }
      for (int g = b * kPerBlock; g < (b + 1) * kPerBlock; ++g) {
        now.d[g] = d;
        now.dmin[g] = dmin;
      }
    }
    choose_pairs<kTop, kN>(x, scales, offsets, now.d, now.dmin, top, now.s, now.m, errors);
    for (int b = 0; b < kBlocks; ++b) {
      float error = 0;
      for (int g = b * kPerBlock; g < (b + 1) * kPerBlock; ++g) error += errors[g];
      if (k > 0 && !(error < least_error[b])) continue;
      least_error[b] = error;
      for (int g = b * kPerBlock; g < (b + 1) * kPerBlock; ++g) {
        best.d[g] = now.d[g];
        best.dmin[g] = now.dmin[g];
        best.s[g] = now.s[g];
        best.m[g] = now.m[g];
      }
    }
    if (k >= n_starts - 1) codes_of_pairs<kTop, kN>(x, best, codes, sums);
  }
  return best;
}
