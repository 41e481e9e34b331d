// Four float64 at once, for builders; the compiler splits them where registers are narrower. All give the same bits.
#pragma once

#include <cstring>

#include "../lane.hpp"

namespace kv::fib {

typedef double Float64x4 __attribute__((vector_size(32)));
typedef long long Int64x4 __attribute__((vector_size(32)));

inline __attribute__((always_inline)) Float64x4 load4(const double* p) {
  Float64x4 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline __attribute__((always_inline)) void store4(double* p, Float64x4 v) { std::memcpy(p, &v, sizeof v); }

}  // namespace kv::fib
