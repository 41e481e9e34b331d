#include "search.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace kv::fib {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Halves the range along the axis on which it is widest, until it is a leaf.
void split(const float* scored, kv_u32 k, kv_u32* first, kv_u32* last, kv_u64 leaf, std::vector<kv_u32*>& ends) {
  if ((kv_u64)(last - first) <= leaf) {
    ends.push_back(last);
    return;
  }
  const auto value = [&](kv_u32 id, kv_u32 axis) { return scored[(kv_u64)id * (k + 1) + 1 + axis]; };
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
  split(scored, k, first, middle, leaf, ends);
  split(scored, k, middle, last, leaf, ends);
}

}  // namespace

Tree::Tree(const float* scored, kv_u32 n, kv_u32 k) {
  std::vector<kv_u32> order(n);
  std::iota(order.begin(), order.end(), 0u);
  std::vector<kv_u32*> ends;
  split(scored, k, order.data(), order.data() + n, std::max<kv_u64>(kGroup, (kv_u64)std::sqrt((double)n)), ends);
  n_leaves = (kv_u32)((ends.size() + kGroup - 1) / kGroup * kGroup);
  low.assign((kv_u64)k * n_leaves, kInfinity);
  high.assign((kv_u64)k * n_leaves, -kInfinity);
  kv_u32* first = order.data();
  for (kv_u32 leaf = 0; leaf < n_leaves; ++leaf) {
    first_group.push_back((kv_u32)(ids.size() / kGroup));
    if (leaf >= ends.size()) continue;
    std::sort(first, ends[leaf]);
    for (; first < ends[leaf]; first += std::min<std::ptrdiff_t>(kGroup, ends[leaf] - first)) {
      const kv_u64 group = groups.size(), many = std::min<std::ptrdiff_t>(kGroup, ends[leaf] - first);
      groups.resize(group + (kv_u64)(1 + k) * kGroup, 0.0f);
      for (kv_u64 i = 0; i < kGroup; ++i) {
        ids.push_back(i < many ? first[i] : n);
        if (i >= many) groups[group + i] = -kInfinity;
        for (kv_u64 j = 0; i < many && j <= k; ++j)
          groups[group + j * kGroup + i] = scored[(kv_u64)first[i] * (k + 1) + j];
        for (kv_u64 j = 0; i < many && j < k; ++j) {
          const float x = scored[(kv_u64)first[i] * (k + 1) + 1 + j];
          low[j * n_leaves + leaf] = std::min(low[j * n_leaves + leaf], x);
          high[j * n_leaves + leaf] = std::max(high[j * n_leaves + leaf], x);
        }
      }
    }
    largest = std::max(largest, (kv_u32)(ids.size() / kGroup) - first_group.back());
  }
  first_group.push_back((kv_u32)(ids.size() / kGroup));
  float least = 0;
  for (kv_u32 i = 0; i < n; ++i) least = std::min(least, scored[(kv_u64)i * (k + 1)]);
  reach = std::sqrt(-2 * least) * 1.000001f;
}

}  // namespace kv::fib
