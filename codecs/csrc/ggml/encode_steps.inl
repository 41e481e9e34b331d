// The search for scales of rows of grids. Part of encode_iq.inl.

// The scale of each lane with the largest gain among those that put the value of largest magnitude on some share of the
// largest level. `simple` are those that put it there.
template <class S>
void search_scales_of_rows(const ScanGrid& grid, const Scan<S>& scan, const float* shares, int n_shares,
                           float* scales, float* simple) {
  for (int lane = 0; lane < kLanes; lane += kWide) {
    Floats largest = all(0), best = all(0), found = all(0);
    for (int t = 0; t < S::slots; ++t)
      for (int i = 0; i < S::width; ++i) largest = most(largest, magnitude(load(scan.x[t][i] + lane)));
    for (int k = 0; k < n_shares; ++k) {
      const Floats scale = largest * (shares[k] / S::largest_level);
      const Floats gain = gain_of<S, false>(grid, scan, lane, scale, nullptr);
      found = gain > best ? scale : found;
      best = most(best, gain);
    }
    store(found, scales + lane);
    store(largest / S::largest_level, simple + lane);
  }
}

// Every lane's best scale under `d`, of the nearest and its neighbours.
template <class S>
void choose_steps(const ScanGrid& grid, const Scan<S>& scan, const float* scales, const float* d, float* steps,
                  float* gains) {
  for (int lane = 0; lane < kLanes; lane += kWide) {
    const Floats unit = load(d + lane) * S::unit;
    const Floats middle = nearest_between(
        (load(scales + lane) * inverse(unit) - S::first) * (1 / S::step), 0, (float)(S::count - 1));
    Floats best = gain_of<S, false>(grid, scan, lane, unit * (S::first + S::step * middle), nullptr), chosen = middle;
    for (int side = 0; side < 2; ++side) {
      const Floats other = side == 0 ? most(middle - 1, all(0)) : least(middle + 1, all((float)(S::count - 1)));
      const Floats gain = gain_of<S, false>(grid, scan, lane, unit * (S::first + S::step * other), nullptr);
      chosen = gain > best ? other : chosen;
      best = most(best, gain);
    }
    store(chosen, steps + lane);
    store(best, gains + lane);
  }
}

// The last of all steps.
template <class S>
constexpr float kLast = S::first + S::step * (S::count - 1);

// The steps nearest to simple scales.
template <class S>
void simple_steps(const ScanGrid& grid, const Scan<S>& scan, const float* simple, const float* d, float* steps,
                  float* gains) {
  for (int lane = 0; lane < kLanes; lane += kWide) {
    for (int g = lane; g < lane + kWide; ++g)
      steps[g] = simple_multiple(simple[g], d[g] * S::unit, 0, (float)(S::count - 1), S::first, S::step);
    const Floats scale = load(d + lane) * S::unit * (S::first + S::step * load(steps + lane));
    store(gain_of<S, false>(grid, scan, lane, scale, nullptr), gains + lane);
  }
}

template <class S>
struct Steps {
  float d[kLanes], k[kLanes];
  bool fits;
};

template <class S>
void pick_rows(const ScanGrid& grid, const Scan<S>& scan, const Steps<S>& steps, Picks<S>& picks) {
  for (int lane = 0; lane < kLanes; lane += kWide) {
    const Floats scale = load(steps.d + lane) * S::unit * (S::first + S::step * load(steps.k + lane));
    gain_of<S, true>(grid, scan, lane, scale, &picks);
  }
}

// The unit of scales that fits the rows picked for a block.
template <class S>
float fit_unit(const ScanGrid& grid, const Scan<S>& scan, const Steps<S>& steps, const Picks<S>& picks, int first) {
  float over = 0, under = 0;
  for (int lane = first; lane < first + S::subs; ++lane) {
    float product = 0, norm = 0;
    for (int t = 0; t < S::slots; ++t) {
      const int c = (int)picks.in_class[t][lane];
      const bool wrong = S::signs == kEven4 && picks.wrong[t][lane] != 0;
      product += 0.5f * scan.gain[wrong ? S::planes - 1 : 0][t][c][lane];
      norm += grid.norm[c];
      if (S::shifted) {
        const float shift = picks.shift[t][lane];
        product += shift * scan.sum[t][lane];
        norm += 2 * shift * grid.sum[c] + 0.125f;
      }
    }
    const float weight = S::unit * (S::first + S::step * steps.k[lane]);
    over += weight * product;
    under += weight * weight * norm;
  }
  return under > 0 && over > 0 ? stored(over / under) : 0;
}

// One unit of scales for each block, with which it errs no more than as zeros: the largest scale is tried on the steps
// `ends`, the largest simple one on the last of all, then the unit is fitted to the rows twice.
template <class S>
Steps<S> search_steps(const ScanGrid& grid, const Scan<S>& scan, const float* scales, const float* simple,
                      const float* ends, int n_ends, Picks<S>& picks) {
  constexpr int kFits = 2;
  const int n_starts = n_ends + 1;
  Steps<S> best{}, now;
  float largest[S::blocks], largest_simple[S::blocks], most_gain[S::blocks] = {};
  bool fits[S::blocks] = {};
  alignas(64) float gains[kLanes];
  for (int b = 0; b < S::blocks; ++b) {
    largest[b] = largest_of(scales + b * S::subs, S::subs);
    largest_simple[b] = largest_of(simple + b * S::subs, S::subs);
  }
  for (int k = 0; k < n_starts + kFits; ++k) {
    for (int b = 0; b < S::blocks; ++b) {
      const float d = k < n_ends    ? stored(largest[b] / (S::unit * ends[k]))
                      : k == n_ends ? simple_unit(largest_simple[b] / (S::unit * kLast<S>))
                                    : fit_unit<S>(grid, scan, best, picks, b * S::subs);
      const bool finite = d < kInfinity;
      if (k < n_starts) fits[b] |= finite;
      for (int g = b * S::subs; g < (b + 1) * S::subs; ++g) now.d[g] = finite ? d : 0;
    }
    if (k == n_ends)
      simple_steps<S>(grid, scan, simple, now.d, now.k, gains);
    else
      choose_steps<S>(grid, scan, scales, now.d, now.k, gains);
    for (int b = 0; b < S::blocks; ++b) {
      float gain = 0;
      for (int g = b * S::subs; g < (b + 1) * S::subs; ++g) gain += gains[g];
      if (!(gain > most_gain[b])) continue;
      most_gain[b] = gain;
      for (int g = b * S::subs; g < (b + 1) * S::subs; ++g) {
        best.d[g] = now.d[g];
        best.k[g] = now.k[g];
      }
    }
    if (k >= n_starts - 1) pick_rows<S>(grid, scan, best, picks);
  }
  best.fits = true;
  for (bool fit : fits) best.fits &= fit;
  return best;
}

// A block as it is written.
struct RowCodes {
  float d;
  kv_u8 k[16];
  kv_u16 row[64];
  kv_u8 negative[32];  // of each eight values
  kv_u8 down[32];      // 1 where 0.125 is taken away, of each eight values
};

// The row of a class with the largest product, and the value whose sign has to be wrong.
template <class S>
int best_row(const ScanGrid& grid, const Scan<S>& scan, int t, int lane, int c, bool wrong, int& wrong_value) {
  float low[S::combinations], high[S::combinations], low_least[S::combinations], high_least[S::combinations];
  half_products<S>([&](int i) { return scan.x[t][i][lane]; }, grid.levels, low, low_least);
  half_products<S>([&](int i) { return scan.x[t][S::half + i][lane]; }, grid.levels, high, high_least);
  int best = 0;
  float best_product = -kInfinity;
  for (int n = c == 0 ? 0 : grid.end[c - 1]; n < grid.end[c]; ++n) {
    float product = low[grid.low[n]] + high[grid.high[n]];
    if (S::even && wrong) {
      const float a = low_least[grid.low[n]], b = high_least[grid.high[n]];
      product -= 2 * (a < b ? a : b);
    }
    best = product > best_product ? n : best;
    best_product = product > best_product ? product : best_product;
  }
  float least_term = kInfinity;
  for (int i = 0, digits = grid.low[best]; wrong && i < S::width; ++i, digits /= S::base) {
    if (i == S::half) digits = grid.high[best];
    const float term = scan.x[t][i][lane] * grid.levels[digits % S::base];
    wrong_value = term < least_term ? i : wrong_value;
    least_term = term < least_term ? term : least_term;
  }
  return grid.row[best];
}

template <class S>
void codes_of_rows(const ScanGrid& grid, const Scan<S>& scan, const Steps<S>& steps, const Picks<S>& picks, int first,
                   RowCodes& codes) {
  std::memset(codes.negative, 0, sizeof codes.negative);
  codes.d = steps.d[first];
  for (int g = 0; g < S::subs; ++g) {
    const int lane = first + g;
    codes.k[g] = (kv_u8)steps.k[lane];
    for (int t = 0; t < S::slots; ++t) {
      const bool wrong = S::signs == kEven8   ? scan.twice[t][lane] != 0
                         : S::signs == kEven4 ? picks.wrong[t][lane] != 0
                                              : false;
      const int at = g * S::slots + t;
      int wrong_value = 0;
      codes.row[at] = (kv_u16)best_row<S>(grid, scan, t, lane, (int)picks.in_class[t][lane], wrong, wrong_value);
      const kv_u32 negative = scan.negative[t][lane] ^ (wrong ? 1u << wrong_value : 0);
      codes.negative[at * S::width / 8] |= (kv_u8)(negative << at * S::width % 8);
      if (S::shifted) codes.down[at] = picks.shift[t][lane] < 0;
    }
  }
}

// Calls `put(codes, out)` with every block. Several blocks at a time fill the lanes, the last one more than once if
// need be.
template <class S, class Put>
bool encode_rows(const float* values, kv_u64 n_blocks, kv_u8* out, const float* shares, int n_shares, const float* ends,
                 int n_ends, const Put& put) {
  const ScanGrid& grid = scan_grid<S::id>();
  bool fits = true;
  Scan<S> scan;
  Picks<S> picks;
  alignas(64) float scales[kLanes], simple[kLanes];
  for (kv_u64 first = 0; first < n_blocks; first += S::blocks) {
    const int n = n_blocks - first < S::blocks ? (int)(n_blocks - first) : S::blocks;
    const float* blocks[S::blocks];
    for (int b = 0; b < S::blocks; ++b) {
      blocks[b] = values + (first + (kv_u64)(b < n ? b : n - 1)) * 256;
      if (!(largest_of(blocks[b], 256) < kBeyondAll)) return false;
    }
    fill<S>(blocks, scan);
    scan_rows<S>(grid, scan);
    search_scales_of_rows<S>(grid, scan, shares, n_shares, scales, simple);
    const Steps<S> steps = search_steps<S>(grid, scan, scales, simple, ends, n_ends, picks);
    fits &= steps.fits;
    for (int b = 0; b < n; ++b) {
      RowCodes codes;
      codes_of_rows<S>(grid, scan, steps, picks, b * S::subs, codes);
      put(codes, out + (first + (kv_u64)b) * format_of(S::id).bytes);
    }
  }
  return fits;
}
