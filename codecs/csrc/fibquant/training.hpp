// Nearest codewords in float64, for Lloyd's algorithm: exact, by a k-d tree. FORMAT.md 11.4.
#pragma once

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "../simd.hpp"
#include "float64x4.hpp"

namespace kv::fib {

struct Nearest {
  double distance = std::numeric_limits<double>::infinity();
  kv_u64 cell = 0;
};

// Codewords in groups of four, value by value: c[group][j][4]. Distances are squares added from left to right; among
// equals the lowest cell wins.
KV_CLONES static void look_at_groups(const double* x, kv_u32 k, const double* c, const long long* cells,
                                     kv_u64 n_groups, Nearest& nearest) {
  Float64x4 best = nearest.distance - Float64x4{};
  Int64x4 where = Int64x4{} + (long long)nearest.cell;
  for (kv_u64 g = 0; g < n_groups; ++g, cells += 4) {
    Float64x4 sum = {};
    for (kv_u32 j = 0; j < k; ++j, c += 4) {
      const Float64x4 difference = x[j] - load4(c);
      sum += difference * difference;
    }
    Int64x4 cell;
    std::memcpy(&cell, cells, sizeof cell);
    const Int64x4 nearer = (sum < best) | ((sum == best) & (cell < where));
    best = nearer ? sum : best;
    where = nearer ? cell : where;
  }
  for (int l = 0; l < 4; ++l)
    if (best[l] < nearest.distance || (best[l] == nearest.distance && (kv_u64)where[l] < nearest.cell))
      nearest = {best[l], (kv_u64)where[l]};
}

// A box is passed over if its distance is greater than that of a codeword. Rounding is monotonic, and both distances
// are summed alike: no computed distance of a box is above that of a codeword inside, and the search is exact.
class CodewordTree {
 public:
  CodewordTree(const double* codewords, kv_u64 n, kv_u32 k) : codewords_(codewords), k_(k), order_(n) {
    std::iota(order_.begin(), order_.end(), (kv_u64)0);
    build(0, n);
  }

  Nearest nearest(const double* x) const {
    Nearest found;
    visit(0, x, found);
    return found;
  }

 private:
  static constexpr kv_u64 kLeaf = 16;

  struct Node {
    kv_u64 first_group, n_groups;  // no groups: a node with two children
    kv_u64 children[2];
  };

  kv_u64 build(kv_u64 first, kv_u64 last) {
    const kv_u64 node = nodes_.size();
    nodes_.push_back({});
    const kv_u32 axis = add_box(first, last);
    if (last - first <= kLeaf) {
      nodes_[node].first_group = cells_.size() / 4;
      nodes_[node].n_groups = (last - first + 3) / 4;
      for (; first < last; first += 4) add_group(first, std::min(last, first + 4));
      return node;
    }
    const kv_u64 middle = first + (last - first) / 2;
    std::nth_element(order_.begin() + first, order_.begin() + middle, order_.begin() + last,
                     [&](kv_u64 a, kv_u64 b) { return codewords_[a * k_ + axis] < codewords_[b * k_ + axis]; });
    const kv_u64 left = build(first, middle), right = build(middle, last);
    nodes_[node].children[0] = left;
    nodes_[node].children[1] = right;
    return node;
  }

  // The bounds of some codewords; returns the widest axis.
  kv_u32 add_box(kv_u64 first, kv_u64 last) {
    double widest = -1;
    kv_u32 axis = 0;
    for (kv_u32 j = 0; j < k_; ++j) {
      double low = codewords_[order_[first] * k_ + j], high = low;
      for (kv_u64 i = first + 1; i < last; ++i) {
        low = std::min(low, codewords_[order_[i] * k_ + j]);
        high = std::max(high, codewords_[order_[i] * k_ + j]);
      }
      boxes_.push_back(low);
      boxes_.push_back(high);
      if (high - low > widest) {
        widest = high - low;
        axis = j;
      }
    }
    return axis;
  }

  // The last group of a leaf is filled up with what is never nearest.
  void add_group(kv_u64 first, kv_u64 last) {
    for (kv_u32 j = 0; j < k_; ++j)
      for (kv_u64 i = first; i < first + 4; ++i)
        groups_.push_back(i < last ? codewords_[order_[i] * k_ + j] : std::numeric_limits<double>::infinity());
    for (kv_u64 i = first; i < first + 4; ++i)
      cells_.push_back(i < last ? (long long)order_[i] : std::numeric_limits<long long>::max());
  }

  double box_distance(kv_u64 node, const double* x) const {
    const double* box = boxes_.data() + node * 2 * k_;
    double sum = 0;
    for (kv_u32 j = 0; j < k_; ++j) {
      const double outside = std::max(std::max(box[2 * j] - x[j], x[j] - box[2 * j + 1]), 0.0);
      sum += outside * outside;
    }
    return sum;
  }

  void visit(kv_u64 at, const double* x, Nearest& found) const {
    const Node& node = nodes_[at];
    if (node.n_groups > 0) {
      look_at_groups(x, k_, groups_.data() + node.first_group * 4 * k_, cells_.data() + node.first_group * 4,
                     node.n_groups, found);
      return;
    }
    const double left = box_distance(node.children[0], x), right = box_distance(node.children[1], x);
    const int nearer = right < left;
    if (std::min(left, right) <= found.distance) visit(node.children[nearer], x, found);
    if (std::max(left, right) <= found.distance) visit(node.children[1 - nearer], x, found);
  }

  const double* codewords_;
  kv_u32 k_;
  std::vector<kv_u64> order_;
  std::vector<Node> nodes_;
  std::vector<double> boxes_, groups_;
  std::vector<long long> cells_;
};

}  // namespace kv::fib
