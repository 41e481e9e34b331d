// Values that are a scale times a row of a grid. Part of encode_iq.inl.
//
// With a scale s, a row g and values x the error is |x|^2 - s (2 x.g - s |g|^2). What is in the brackets is the gain of a
// row. Rows of one class share |g|^2, and 2 x.g of the best of them is found once, for all scales.

// How rows get signs.
enum Signs {
  kFree,    // a bit for each value
  kEven8,   // an even number of negatives in each row of eight
  kEven4,   // the same in each two rows of four
  kShift,   // rows have signs, and 0.125 is added to or taken from all of their values: of a sub-block
  kShift8,  // the same, of each row
};

// kSubs sub-blocks of kSlots rows of kWidth values in a block. A scale is `kUnit d (kFirst + kStep k)`, with k below kCount.
template <kv_u32 kId, int kSubs, int kSlots, int kWidth, Signs kSigns>
struct Shape {
  static constexpr kv_u32 id = kId;
  static constexpr int subs = kSubs, slots = kSlots, width = kWidth, blocks = kLanes / kSubs;
  static constexpr Signs signs = kSigns;
  static constexpr bool shifted = kSigns == kShift || kSigns == kShift8;
  static constexpr bool even = kSigns == kEven8 || kSigns == kEven4;
  static constexpr int planes = kSigns == kEven4 ? 2 : 1;  // gains as they are, and with one value's sign wrong
  static constexpr int half = kWidth / 2, combinations = kWidth == 8 ? 81 : 64, base = kWidth == 8 ? 3 : 8;
  static constexpr int count = shifted ? 8 : 16;
  static constexpr float first = shifted || kId == kIQ3_S ? 1.0f : 0.5f;
  static constexpr float step = shifted || kId == kIQ3_S ? 2.0f : 1.0f;
  static constexpr float unit = shifted || kId == kIQ3_S ? 1.0f : kWidth == 8 ? 0.25f : 0.5f;
  static constexpr float largest_level = shifted ? 1.125f : kId == kIQ3_S ? 15 : kWidth == 8 ? 43 : 62;
};

template <class S>
struct Scan {
  alignas(64) float x[S::slots][S::width][kLanes];  // magnitudes, unless rows have signs
  kv_u8 negative[S::slots][kLanes];
  alignas(64) float twice[S::slots][kLanes];  // 2 where one sign of a row of eight has to be wrong, else 0
  alignas(64) float sum[S::slots][kLanes];    // of values, where rows have signs
  alignas(64) float gain[S::planes][S::slots][ScanGrid::kMaxClasses][kLanes];
};

template <class S>
void fill(const float* const* blocks, Scan<S>& scan) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const float* block = blocks[lane / S::subs];
    const float factor = largest_of(block, 256) > kBelowAll ? 1.0f : 0.0f;
    for (int t = 0; t < S::slots; ++t) {
      const float* from = block + ((lane % S::subs) * S::slots + t) * S::width;
      kv_u32 negative = 0;
      float sum = 0;
      for (int i = 0; i < S::width; ++i) {
        negative |= (kv_u32)(from[i] < 0) << i;
        scan.x[t][i][lane] = (S::shifted ? from[i] : std::fabs(from[i])) * factor;
        sum += from[i] * factor;
      }
      scan.negative[t][lane] = (kv_u8)negative;
      scan.sum[t][lane] = sum;
    }
    for (int t = 0; t < S::slots; ++t) {
      kv_u32 negative = scan.negative[t][lane];
      if (S::signs == kEven4) negative ^= scan.negative[t ^ 1][lane];
      negative ^= negative >> 4;
      scan.twice[t][lane] = 0x6996u >> (negative & 15) & 1 ? 2.0f : 0.0f;
    }
  }
}

// The products of half a row's values with all halves of rows, and the least of their terms. `value(i)` is value i.
template <class S, class V, class Value>
inline void half_products(const Value& value, const float* levels, V* sums, V* leasts) {
  sums[0] = V{};
  leasts[0] = V{} + kInfinity;
  for (int i = 0, n = 1; i < S::half; ++i, n *= S::base) {
    const V x = value(i);
    for (int digit = S::base - 1; digit >= 0; --digit) {
      const V term = x * levels[digit];
      for (int c = 0; c < n; ++c) {
        sums[digit * n + c] = sums[c] + term;
        if (S::even) leasts[digit * n + c] = leasts[c] < term ? leasts[c] : term;
      }
    }
  }
}

template <class S>
void scan_rows(const ScanGrid& grid, Scan<S>& scan) {
  for (int t = 0; t < S::slots; ++t)
    for (int lane = 0; lane < kLanes; lane += kWide) {
      Floats low[S::combinations], high[S::combinations], low_least[S::combinations], high_least[S::combinations];
      half_products<S>([&](int i) { return load(scan.x[t][i] + lane); }, grid.levels, low, low_least);
      half_products<S>([&](int i) { return load(scan.x[t][S::half + i] + lane); }, grid.levels, high, high_least);
      const Floats twice = S::signs == kEven8 ? load(scan.twice[t] + lane) : all(2);
      for (int c = 0, n = 0; c < grid.n_classes; ++c) {
        Floats best = all(-kInfinity), wrong = all(-kInfinity);
        for (; n < grid.end[c]; ++n) {
          Floats product = low[grid.low[n]] + high[grid.high[n]];
          if (S::even) {
            const Floats other = product - twice * least(low_least[grid.low[n]], high_least[grid.high[n]]);
            if (S::signs == kEven8)
              product = other;
            else
              wrong = most(wrong, other);
          }
          best = most(best, product);
        }
        store(best * 2, scan.gain[0][t][c] + lane);
        if (S::signs == kEven4) store(wrong * 2, scan.gain[S::planes - 1][t][c] + lane);
      }
    }
}

// What was chosen for every lane's rows.
template <class S>
struct Picks {
  alignas(64) float in_class[S::slots][kLanes];
  alignas(64) float wrong[S::slots][kLanes];  // of kEven4: not 0 where one sign of this row is wrong
  alignas(64) float shift[S::slots][kLanes];  // 0.125 or -0.125
};

// The best gain of a row, and its class.
template <bool kPick>
struct Best {
  Floats gain = all(-kInfinity), in_class = all(0);

  void look(Floats other, int c) {
    if (kPick) in_class = other > gain ? all((float)c) : in_class;
    gain = most(gain, other);
  }
};

// The gains of all lanes' sub-blocks under their scales, times the scale.
template <class S, bool kPick>
inline Floats gain_of(const ScanGrid& grid, const Scan<S>& scan, int lane, Floats scale, Picks<S>* picks) {
  constexpr bool kTwo = S::shifted || S::signs == kEven4;
  Best<kPick> first[S::slots], second[S::slots];
  for (int c = 0; c < grid.n_classes; ++c) {
    const Floats cost = scale * (S::shifted ? grid.norm[c] + 0.25f * grid.sum[c] + 0.125f : grid.norm[c]);
    const Floats other_cost = S::shifted ? scale * (grid.norm[c] - 0.25f * grid.sum[c] + 0.125f) : cost;
    for (int t = 0; t < S::slots; ++t) {
      const Floats gain = load(scan.gain[0][t][c] + lane);
      first[t].look(gain - cost, c);
      if (S::shifted) second[t].look(gain - other_cost, c);
      if (S::signs == kEven4) second[t].look(load(scan.gain[S::planes - 1][t][c] + lane) - cost, c);
    }
  }
  Floats total = all(0), other_total = all(0);
  if (!kTwo) {
    for (int t = 0; t < S::slots; ++t) {
      total += first[t].gain;
      if (kPick) store(first[t].in_class, picks->in_class[t] + lane);
    }
    return total * scale;
  }
  if (S::signs == kEven4) {
    for (int t = 0; t < S::slots; t += 2) {
      const Floats right = first[t].gain + first[t + 1].gain;
      const Floats here = second[t].gain + first[t + 1].gain, there = first[t].gain + second[t + 1].gain;
      const auto odd = load(scan.twice[t] + lane) != 0;
      total += odd ? most(here, there) : right;
      if (!kPick) continue;
      const Floats wrong_here = odd & (here >= there) ? all(1) : all(0);
      const Floats wrong_there = odd & (here < there) ? all(1) : all(0);
      store(wrong_here, picks->wrong[t] + lane);
      store(wrong_there, picks->wrong[t + 1] + lane);
      store(wrong_here != 0 ? second[t].in_class : first[t].in_class, picks->in_class[t] + lane);
      store(wrong_there != 0 ? second[t + 1].in_class : first[t + 1].in_class, picks->in_class[t + 1] + lane);
    }
    return total * scale;
  }
  for (int t = 0; t < S::slots; ++t) {
    const Floats shift = 0.25f * load(scan.sum[t] + lane);
    first[t].gain += shift;
    second[t].gain -= shift;
    total += first[t].gain;
    other_total += second[t].gain;
  }
  Floats gain = most(total, other_total);
  if (S::signs == kShift8) {
    gain = all(0);
    for (int t = 0; t < S::slots; ++t) gain += most(first[t].gain, second[t].gain);
  }
  for (int t = 0; kPick && t < S::slots; ++t) {
    const auto up = S::signs == kShift8 ? first[t].gain >= second[t].gain : total >= other_total;
    store(up ? first[t].in_class : second[t].in_class, picks->in_class[t] + lane);
    store(up ? all(0.125f) : all(-0.125f), picks->shift[t] + lane);
  }
  return gain * scale;
}

// The scale of each lane with the largest gain among those that put the value of largest magnitude on some share of the
// largest level.
template <class S>
void search_scales_of_rows(const ScanGrid& grid, const Scan<S>& scan, const float* shares, int n_shares, float* scales) {
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

// One unit of scales for each block: the largest scale is tried on the steps `ends`, then the unit is fitted to the rows
// twice.
template <class S>
Steps<S> search_steps(const ScanGrid& grid, const Scan<S>& scan, const float* scales, const float* ends, int n_ends,
                      Picks<S>& picks) {
  constexpr int kFits = 2;
  Steps<S> best, now;
  best.fits = true;
  float largest[S::blocks], most_gain[S::blocks] = {};
  alignas(64) float gains[kLanes];
  for (int b = 0; b < S::blocks; ++b) {
    largest[b] = 0;
    for (int g = b * S::subs; g < (b + 1) * S::subs; ++g) largest[b] = scales[g] > largest[b] ? scales[g] : largest[b];
  }
  for (int k = 0; k < n_ends + kFits; ++k) {
    for (int b = 0; b < S::blocks; ++b) {
      float d = k < n_ends ? stored(largest[b] / (S::unit * ends[k]))
                           : fit_unit<S>(grid, scan, best, picks, b * S::subs);
      if (!(d < kInfinity)) {
        if (k == 0) best.fits = false;
        d = 0;
      }
      for (int g = b * S::subs; g < (b + 1) * S::subs; ++g) now.d[g] = d;
    }
    choose_steps<S>(grid, scan, scales, now.d, now.k, gains);
    for (int b = 0; b < S::blocks; ++b) {
      float gain = 0;
      for (int g = b * S::subs; g < (b + 1) * S::subs; ++g) gain += gains[g];
      // Nothing is better than a scale that makes things worse.
      if (k == 0 ? gain <= 0 : !(gain > most_gain[b])) {
        if (k > 0) continue;
        for (int g = b * S::subs; g < (b + 1) * S::subs; ++g) best.d[g] = best.k[g] = 0;
        continue;
      }
      most_gain[b] = gain;
      for (int g = b * S::subs; g < (b + 1) * S::subs; ++g) {
        best.d[g] = now.d[g];
        best.k[g] = now.k[g];
      }
    }
    if (k >= n_ends - 1) pick_rows<S>(grid, scan, best, picks);
  }
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

// Calls `put(codes, out)` with every block. Several blocks at a time fill the lanes, the last one more than once if need
// be.
template <class S, class Put>
bool encode_rows(const float* values, kv_u64 n_blocks, kv_u8* out, const float* shares, int n_shares, const float* ends,
                 int n_ends, const Put& put) {
  const ScanGrid& grid = scan_grid<S::id>();
  bool fits = true;
  Scan<S> scan;
  Picks<S> picks;
  alignas(64) float scales[kLanes];
  for (kv_u64 first = 0; first < n_blocks; first += S::blocks) {
    const int n = n_blocks - first < S::blocks ? (int)(n_blocks - first) : S::blocks;
    const float* blocks[S::blocks];
    for (int b = 0; b < S::blocks; ++b) {
      blocks[b] = values + (first + (kv_u64)(b < n ? b : n - 1)) * 256;
      if (!(largest_of(blocks[b], 256) < kBeyondAll)) return false;
    }
    fill<S>(blocks, scan);
    scan_rows<S>(grid, scan);
    search_scales_of_rows<S>(grid, scan, shares, n_shares, scales);
    const Steps<S> steps = search_steps<S>(grid, scan, scales, ends, n_ends, picks);
    fits &= steps.fits;
    for (int b = 0; b < n; ++b) {
      RowCodes codes;
      codes_of_rows<S>(grid, scan, steps, picks, b * S::subs, codes);
      put(codes, out + (first + (kv_u64)b) * format_of(S::id).bytes);
    }
  }
  return fits;
}
