// Values that are a scale times a code from 0 to kTop, less an offset; neither is negative. Part of encode_k.inl.

// Scales and offsets of lanes: those found, and those that reach from the least value, or zero, to the largest.
struct Ranges {
  alignas(64) float scales[kLanes], offsets[kLanes], simple_scales[kLanes], simple_offsets[kLanes];
};

// Scale and offset of each lane with the least squared error among those that start from the range of its values, each
// end moved inwards by one of `cuts` of it, each fitted to the codes that follow, and the best of them once more.
template <int kTop, int kN>
void search_offsets(const float (*x)[kLanes], const float* cuts, int n_cuts, Ranges& ranges) {
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
      // An offset would be negative, or could be any, as all codes are equal: there is none.
      const auto with_offset = (det > 0) & (at <= -low);
      fit = with_offset ? fit : (xq + low * q1) / q2;
      at = with_offset ? at : -low;
      const Floats error = squares + fit * (fit * q2 + 2 * at * q1 - 2 * xq) + at * ((float)kN * at - 2 * sum);
      const auto better = (error < best) & (fit > 0);
      scale = better ? fit : scale;
      offset = better ? at : offset;
      best = better ? error : best;
    }
    store(scale, ranges.scales + lane);
    store(most(-low - offset, all(0)), ranges.offsets + lane);
    store(range / (float)kTop, ranges.simple_scales + lane);
    store(-low, ranges.simple_offsets + lane);
  }
}

// The squared error of each lane. Values are moved before they are scaled: an offset may be far above the scale.
template <int kTop, int kN>
inline Floats error_of_pair(const float (*x)[kLanes], int lane, Floats step, Floats offset) {
  const Floats factor = inverse(step);
  Floats sum = all(0);
  for (int i = 0; i < kN; ++i) {
    const Floats v = load(x[i] + lane);
    const Floats e = v - (step * nearest_between((v + offset) * factor, 0, kTop) - offset);
    sum += e * e;
  }
  return sum;
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
      const Floats step = unit * multiple, factor = inverse(step), offset = load(offsets + lane);
      Floats rest = all(0);
      for (int i = 0; i < kN; ++i) {
        const Floats v = load(x[i] + lane);
        rest += step * nearest_between((v + offset) * factor, 0, kTop) - v;
      }
      const Floats multiple_m = nearest_between(rest * (1.0f / kN) * inverse_m, 0, top);
      const Floats error = error_of_pair<kTop, kN>(x, lane, step, unit_m * multiple_m);
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
    const Floats offset = load(pairs.dmin + lane) * load(pairs.m + lane);
    Floats q1 = all(0), q2 = all(0), xq = all(0), x1 = all(0);
    for (int i = 0; i < kN; ++i) {
      const Floats v = load(x[i] + lane), q = nearest_between((v + offset) * factor, 0, kTop);
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

// The unit of scales and that of offsets that fit a block's codes; where offsets are what scales and codes could be too,
// theirs stays.
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
  double fit = 0, fit_m = 0;
  if (det > 1e-9 * aa * bb) {
    fit = (xa * bb - xb * ab) / det;
    fit_m = (xa * ab - xb * aa) / det;
  } else if (aa > 0) {
    fit_m = pairs.dmin[first];
    fit = (xa + fit_m * ab) / aa;
  } else if (bb > 0) {
    fit_m = -xb / bb;
  }
  d = stored(fit > 0 ? (float)fit : 0.0f);
  dmin = stored(fit_m > 0 ? (float)fit_m : 0.0f);
}

// One unit of scales and one of offsets for each block, with which it errs no more than as zeros: the largest of each is
// tried on the multiples of `ends`, the largest simple ones on `top`, then both are fitted to the codes twice.
template <int kTop, int kN, int kPerBlock>
Pairs search_pairs(const float (*x)[kLanes], const Ranges& ranges, const float* ends, int n_ends, float top,
                   float (*codes)[kLanes]) {
  constexpr int kBlocks = kLanes / kPerBlock, kFits = 2;
  const int simple = n_ends * n_ends, n_starts = simple + 1;
  Pairs best{}, now;
  CodeSums sums;
  alignas(64) float errors[kLanes];
  float largest[kBlocks], largest_m[kBlocks], simple_d[kBlocks], simple_dmin[kBlocks], least_error[kBlocks];
  bool fits[kBlocks] = {};
  for (int lane = 0; lane < kLanes; lane += kWide) store(squares_of<kN>(x, lane), errors + lane);
  for (int b = 0; b < kBlocks; ++b) {
    const int first = b * kPerBlock;
    largest[b] = largest_of(ranges.scales + first, kPerBlock);
    largest_m[b] = largest_of(ranges.offsets + first, kPerBlock);
    simple_d[b] = simple_unit(largest_of(ranges.simple_scales + first, kPerBlock) / top);
    simple_dmin[b] = simple_unit(largest_of(ranges.simple_offsets + first, kPerBlock) / top);
    least_error[b] = 0;
    for (int g = first; g < first + kPerBlock; ++g) least_error[b] += errors[g];
  }
  for (int k = 0; k < n_starts + kFits; ++k) {
    for (int b = 0; b < kBlocks; ++b) {
      float d, dmin;
      if (k < simple) {
        d = stored(largest[b] / ends[k / n_ends]);
        dmin = stored(largest_m[b] / ends[k % n_ends]);
      } else if (k == simple) {
        d = simple_d[b];
        dmin = simple_dmin[b];
      } else {
        fit_units<kN, kPerBlock>(best, sums, b * kPerBlock, d, dmin);
      }
      const bool finite = d < kInfinity && dmin < kInfinity;
      if (k < n_starts) fits[b] |= finite;
      for (int g = b * kPerBlock; g < (b + 1) * kPerBlock; ++g) {
        now.d[g] = finite ? d : 0;
        now.dmin[g] = finite ? dmin : 0;
      }
    }
    if (k == simple) {
      for (int g = 0; g < kLanes; ++g) {
        now.s[g] = simple_multiple(ranges.simple_scales[g], now.d[g], 0, top);
        now.m[g] = simple_multiple(ranges.simple_offsets[g], now.dmin[g], 0, top);
      }
      for (int lane = 0; lane < kLanes; lane += kWide)
        store(error_of_pair<kTop, kN>(x, lane, load(now.d + lane) * load(now.s + lane),
                                      load(now.dmin + lane) * load(now.m + lane)),
              errors + lane);
    } else {
      choose_pairs<kTop, kN>(x, ranges.scales, ranges.offsets, now.d, now.dmin, top, now.s, now.m, errors);
    }
    for (int b = 0; b < kBlocks; ++b) {
      float error = 0;
      for (int g = b * kPerBlock; g < (b + 1) * kPerBlock; ++g) error += errors[g];
      if (!(error < least_error[b])) continue;
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
  best.fits = true;
  for (bool fit : fits) best.fits &= fit;
  return best;
}
