#include "search.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace kv::fib {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Above this a look at the boxes first is faster than one at all codewords.
constexpr kv_u32 few(kv_u32 k) { return k <= 4 ? 512 : 2048; }

// Halves the range along the axis on which it is widest, until it is a leaf.
void split(const float* values, kv_u32 k, kv_u32* first, kv_u32* last, kv_u64 leaf, std::vector<kv_u32*>& ends) {
  if ((kv_u64)(last - first) <= leaf) {
    ends.push_back(last);
    return;
  }
  const auto value = [&](kv_u32 id, kv_u32 axis) { return values[(kv_u64)id * k + axis]; };
  kv_u32 widest = 0;
  double most = -1;
  for (kv_u32 axis = 0; axis < k; ++axis) {
    double sum = 0, squares = 0;
    for (const kv_u32* id = first; id < last; ++id) {
      const double x = value(*id, axis);
      sum += x;
      squares += x * x;
    }
    const double spread = squares - sum * sum / (double)(last - first);
    if (spread > most) most = spread, widest = axis;
  }
  kv_u32* const middle = first + (last - first) / 2;
  std::nth_element(first, middle, last, [&](kv_u32 a, kv_u32 b) {
    const float x = value(a, widest), y = value(b, widest);
    return x < y || (x == y && a < b);
  });
  split(values, k, first, middle, leaf, ends);
  split(values, k, middle, last, leaf, ends);
}

}  // namespace

Finder::Finder(const float* values, kv_u32 n, kv_u32 dimensions) : k(dimensions) {
  std::vector<kv_u32> order(n);
  std::iota(order.begin(), order.end(), 0u);
  std::vector<kv_u32*> ends;
  if (n > few(k)) {
    split(values, k, order.data(), order.data() + n, std::max<kv_u64>(kGroup, (kv_u64)std::sqrt((double)n)), ends);
    n_leaves = (kv_u32)((ends.size() + kGroup - 1) / kGroup * kGroup);
    low.assign((kv_u64)k * n_leaves, kInfinity);
    high.assign((kv_u64)k * n_leaves, -kInfinity);
  } else {
    ends.push_back(order.data() + n);
  }
  kv_u32* first = order.data();
  float least = 0;
  std::size_t largest = 0;
  for (kv_u32 leaf = 0; leaf < ends.size(); ++leaf) {
    first_group.push_back((kv_u32)(ids.size() / kGroup));
    std::sort(first, ends[leaf]);
    largest = std::max<std::size_t>(largest, ends[leaf] - first + kGroup);
    while (first < ends[leaf]) {
      const kv_u64 at = groups.size(), many = std::min<kv_u64>(kGroup, ends[leaf] - first);
      groups.resize(at + (kv_u64)(1 + k) * kGroup, 0.0f);
      for (kv_u64 i = 0; i < kGroup; ++i) {
        ids.push_back(i < many ? first[i] : n);
        if (i >= many) {
          groups[at + i] = -kInfinity;  // never the nearest
          continue;
        }
        double squared = 0;
        for (kv_u64 j = 0; j < k; ++j) {
          const float x = values[(kv_u64)first[i] * k + j];
          groups[at + (1 + j) * kGroup + i] = x;
          squared += (double)x * x;
          if (n_leaves == 0) continue;
          low[j * n_leaves + leaf] = std::min(low[j * n_leaves + leaf], x);
          high[j * n_leaves + leaf] = std::max(high[j * n_leaves + leaf], x);
        }
        groups[at + i] = (float)(-squared / 2);
        least = std::min(least, groups[at + i]);
      }
      first += many;
    }
  }
  n_groups = (kv_u32)(ids.size() / kGroup);
  first_group.resize(n_leaves + 1, n_groups);
  reach = std::sqrt(-2 * least) * 1.000001f;
  room = n_leaves == 0 ? (std::size_t)n_groups * kGroup : n_leaves + largest;
}

}  // namespace kv::fib
