// QR factors by Householder reflections, for random rotations. FORMAT.md 11.3.
//
// Every column goes through the same operations in the same order however columns are grouped and shared out among
// threads; sums have 32 partial sums, whatever the CPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "../simd.hpp"
#include "../threads.hpp"
#include "float64x4.hpp"

namespace kv::fib {

constexpr kv_u64 kPanel = 32;         // reflections that a column goes through while it is in the cache
constexpr kv_u64 kColumnsAtOnce = 8;  // of a thread

// Element i goes to partial sum i % 32; these are added pairwise.
KV_CLONES static double dot(const double* a, const double* b, kv_u64 n) {
  Float64x4 s[8] = {};
  kv_u64 i = 0;
  for (; i + 32 <= n; i += 32)
    for (int v = 0; v < 8; ++v) s[v] += load4(a + i + 4 * v) * load4(b + i + 4 * v);
  double sums[32];
  for (int v = 0; v < 8; ++v) store4(sums + 4 * v, s[v]);
  for (kv_u64 l = 0; i < n; ++i, ++l) sums[l] += a[i] * b[i];
  for (int half = 16; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) sums[l] += sums[l + half];
  return sums[0];
}

KV_CLONES static void subtract_multiple(double* x, double by, const double* v, kv_u64 n) {
  kv_u64 i = 0;
  for (; i + 4 <= n; i += 4) store4(x + i, load4(x + i) - by * load4(v + i));
  for (; i < n; ++i) x[i] -= by * v[i];
}

class Householder {
 public:
  // a: d columns of d values; what is below the diagonal becomes the reflections' vectors.
  Householder(double* a, kv_u64 d) : a_(a), d_(d), factor_(d), sign_(d) {}

  bool factorise(unsigned n_threads) {
    for (kv_u64 first = 0; first < d_; first += kPanel) {
      const kv_u64 last = std::min(d_, first + kPanel);
      for (kv_u64 j = first; j < last; ++j) {
        for (kv_u64 i = first; i < j; ++i) reflect(i, column(j));
        make(j);
      }
      if (!each_column(last, n_threads, [&](kv_u64 j) {
            for (kv_u64 i = first; i < last; ++i) reflect(i, column(j));
          }))
        return false;
    }
    return true;
  }

  // q: d columns of d values, those of Q, negated where the diagonal of R is.
  bool form(double* q, unsigned n_threads) const {
    std::fill(q, q + d_ * d_, 0.0);
    for (kv_u64 j = 0; j < d_; ++j) q[j * d_ + j] = 1;
    for (kv_u64 last = d_; last > 0;) {
      const kv_u64 first = (last - 1) / kPanel * kPanel;
      if (!each_column(first, n_threads, [&](kv_u64 j) {
            for (kv_u64 i = std::min(j + 1, last); i-- > first;) reflect(i, q + j * d_);
          }))
        return false;
      last = first;
    }
    for (kv_u64 j = 0; j < d_; ++j)
      for (kv_u64 i = 0; i < d_; ++i) q[j * d_ + i] *= sign_[j];
    return true;
  }

 private:
  struct NoScratch {};

  double* column(kv_u64 j) const { return a_ + j * d_; }

  void make(kv_u64 j) {
    double* v = column(j) + j;
    const kv_u64 n = d_ - j;
    const double diagonal = -std::copysign(std::sqrt(dot(v, v, n)), v[0]);
    sign_[j] = std::copysign(1.0, diagonal);
    v[0] -= diagonal;
    const double squares = dot(v, v, n);
    factor_[j] = squares > 0 ? 2 / squares : 0;
  }

  void reflect(kv_u64 i, double* x) const {
    const double* v = column(i) + i;
    subtract_multiple(x + i, factor_[i] * dot(v, x + i, d_ - i), v, d_ - i);
  }

  template <class Work>
  bool each_column(kv_u64 first, unsigned n_threads, Work work) const {
    const kv_u64 pieces = (d_ - first + kColumnsAtOnce - 1) / kColumnsAtOnce;
    return run_pieces<NoScratch>(pieces, n_threads, [&](std::size_t piece, NoScratch&) {
      const kv_u64 start = first + piece * kColumnsAtOnce;
      for (kv_u64 j = start; j < std::min(d_, start + kColumnsAtOnce); ++j) work(j);
    });
  }

  double* a_;
  kv_u64 d_;
  std::vector<double> factor_, sign_;
};

}  // namespace kv::fib
