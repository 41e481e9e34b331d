// The grids of the IQ schemes as their encoders walk them: rows of equal norm, and of equal sum where rows have signs,
// are together. Of each such class only the row with the largest product with some values can be the nearest to them,
// whatever the scale.
#pragma once

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "tables.hpp"

namespace kv::ggml {

struct ScanGrid {
  static constexpr int kMaxClasses = 64, kMaxRows = 2048;

  int n_classes = 0;
  int end[kMaxClasses];                    // of each class, in the order of `row`
  float norm[kMaxClasses], sum[kMaxClasses];  // of its rows
  kv_u16 row[kMaxRows];
  kv_u8 low[kMaxRows], high[kMaxRows];  // the halves of a row as numbers with digits in `levels`, the first one lowest
  float levels[8];

  template <class T, std::size_t kRows, std::size_t kWidth, std::size_t kLevels>
  ScanGrid(const T (&grid)[kRows][kWidth], const int (&digits)[kLevels], bool sums) {
    static_assert(kRows <= kMaxRows);
    std::map<std::pair<int, int>, std::vector<kv_u16>> classes;
    for (std::size_t r = 0; r < kRows; ++r) {
      int norm_of = 0, sum_of = 0;
      for (int v : grid[r]) {
        norm_of += v * v;
        sum_of += v;
      }
      classes[{norm_of, sums ? sum_of : 0}].push_back((kv_u16)r);
    }
    int n = 0;
    for (const auto& [key, rows] : classes) {
      norm[n_classes] = (float)key.first;
      sum[n_classes] = (float)key.second;
      for (kv_u16 r : rows) {
        row[n] = r;
        low[n] = half_of(grid[r], digits, (int)(kWidth / 2));
        high[n] = half_of(grid[r] + kWidth / 2, digits, (int)(kWidth / 2));
        ++n;
      }
      end[n_classes++] = n;
    }
    for (std::size_t i = 0; i < kLevels; ++i) levels[i] = (float)digits[i];
  }

 private:
  template <class T, std::size_t kLevels>
  static kv_u8 half_of(const T* values, const int (&digits)[kLevels], int n) {
    int number = 0;
    for (int i = n; i-- > 0;) {
      const auto digit = std::find(digits, digits + kLevels, values[i]) - digits;
      number = number * (int)kLevels + (int)digit;
    }
    return (kv_u8)number;
  }
};

// Built when the first block of a scheme is encoded.
template <kv_u32 kScheme>
inline const ScanGrid& scan_grid() {
  constexpr int kIQ2[] = {8, 25, 43}, kIQ1[] = {-1, 0, 1};
  constexpr int kXXS[] = {4, 12, 20, 28, 36, 44, 52, 62}, kS[] = {1, 3, 5, 7, 9, 11, 13, 15};
  static const ScanGrid grid = [&] {
    if constexpr (kScheme == kIQ2_XXS) return ScanGrid(kTables.iq2_xxs, kIQ2, false);
    if constexpr (kScheme == kIQ2_XS) return ScanGrid(kTables.iq2_xs, kIQ2, false);
    if constexpr (kScheme == kIQ2_S) return ScanGrid(kTables.iq2_s, kIQ2, false);
    if constexpr (kScheme == kIQ3_XXS) return ScanGrid(kTables.iq3_xxs, kXXS, false);
    if constexpr (kScheme == kIQ3_S) return ScanGrid(kTables.iq3_s, kS, false);
    if constexpr (kScheme == kIQ1_S || kScheme == kIQ1_M) return ScanGrid(kTables.iq1, kIQ1, true);
  }();
  return grid;
}

}  // namespace kv::ggml
