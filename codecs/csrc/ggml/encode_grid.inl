// Values that are a scale times a row of a grid. Part of encode_iq.inl.
//
// With a scale s, a row g and values x the error is |x|^2 - s (2 x.g - s |g|^2). What is in the brackets is the gain of
// a row. Rows of one class share |g|^2, and 2 x.g of the best of them is found once, for all scales.

// How rows get signs.
enum Signs {
  kFree,    // a bit for each value
  kEven8,   // an even number of negatives in each row of eight
  kEven4,   // the same in each two rows of four
  kShift,   // rows have signs, and 0.125 is added to or taken from all of their values: of a sub-block
  kShift8,  // the same, of each row
};

// kSubs sub-blocks of kSlots rows of kWidth values in a block. A scale is `unit d (first + step k)`, `k` below `count`.
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
