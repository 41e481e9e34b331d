// FibQuant's inverse rotations of four vectors at once, by a warp. The CPU's order of operations, FORMAT.md section 11.
#pragma once

#include "floats.hpp"
#include "place.hpp"

namespace kv::gpu {

constexpr kv_u32 kTogether = 4;  // vectors, so that what is read of a rotation serves all of them

// One channel of vectors that are decoded together.
struct alignas(16) Together {
  float of[kTogether];
};

template <kv_u32 kOutputs>
KV_DEVICE void add_products(Together (&sums)[kOutputs], const float* row, Together g) {
  KV_UNROLL
  for (kv_u32 m = 0; m < kOutputs; ++m) {
    const float q = load(row + 32 * m);
    KV_UNROLL
    for (kv_u32 t = 0; t < kTogether; ++t) sums[m].of[t] = add(sums[m].of[t], multiply(q, g.of[t]));
  }
}

template <kv_u32 kOutputs>
KV_DEVICE void set_products(Together (&sums)[kOutputs], const float* row, Together g) {
  KV_UNROLL
  for (kv_u32 m = 0; m < kOutputs; ++m) {
    const float q = load(row + 32 * m);
    KV_UNROLL
    for (kv_u32 t = 0; t < kTogether; ++t) sums[m].of[t] = multiply(q, g.of[t]);
  }
}

// Outputs first, first + 32, ... of a lane: sums over sub-blocks of k rows, each a sum of its own.
template <kv_u32 kOutputs>
KV_DEVICE void haar_outputs(const float* matrix, kv_u32 d, kv_u32 k, const Together* g, Together* v, kv_u32 first,
                            bool within) {
  const float* row = fixed(matrix + first);
  Together sums[kOutputs];
  KV_UNROLL
  for (kv_u32 m = 0; m < kOutputs; ++m) {
    KV_UNROLL
    for (kv_u32 t = 0; t < kTogether; ++t) sums[m].of[t] = -0.0f;  // what leaves any number as it is
  }
  KV_ROLLED
  for (kv_u32 i = 0; i < d;) {
    Together part[kOutputs];
    set_products(part, row, g[i]);
    row += d;
    KV_ROLLED
    for (const kv_u32 stop = i++ + k; i < stop; ++i, row += d) add_products(part, row, g[i]);
    KV_UNROLL
    for (kv_u32 m = 0; m < kOutputs; ++m) {
      KV_UNROLL
      for (kv_u32 t = 0; t < kTogether; ++t) sums[m].of[t] = add(sums[m].of[t], part[m].of[t]);
    }
  }
  KV_UNROLL
  for (kv_u32 m = 0; m < kOutputs; ++m)
    if (within) v[first + 32 * m] = sums[m];
}

// v = Q^T g; `v` is other memory.
KV_DEVICE void haar_inverse(const float* matrix, kv_u32 d, kv_u32 k, const Together* g, Together* v) {
  KV_EACH_LANE(i) {
    kv_u32 first = 0;
    KV_ROLLED
    for (; first + 64 <= d; first += 64) haar_outputs<2>(matrix, d, k, g, v, first + i, true);
    // Lanes beyond the last output do as the last.
    KV_ROLLED
    for (; first < d; first += 32) {
      const bool within = first + i < d;
      haar_outputs<1>(matrix, d, k, g, v, within ? first + i : d - 1, within);
    }
  }
}

// Each lane's value for the lane whose number differs in bit `h`, and back.
KV_DEVICE void exchange(const PerLane<Together>& own, kv_u32 h, PerLane<Together>& other) {
#if defined(__CUDACC_RTC__)
  KV_UNROLL
  for (kv_u32 t = 0; t < kTogether; ++t) other.value.of[t] = __shfl_xor_sync(0xFFFFFFFFu, own.value.of[t], h);
#else
  for (kv_u32 i = 0; i < 32; ++i) other[i] = own[i ^ h];
#endif
}

KV_DEVICE float negated(float value, bool really) {
  FloatBits f;
  f.value = value;
  f.bits ^= (kv_u32)really << 31;
  return f.value;
}

// Sums and differences of pairs that are 1, 2, 4 ... apart, below `n` values; kRows to a lane, at most 32 kRows in all.
template <kv_u32 kRows>
KV_DEVICE void transform_rows(Together* x, kv_u32 n, float factor) {
  PerLane<Together> rows[kRows];
  KV_EACH_LANE(i) {
    KV_UNROLL
    for (kv_u32 r = 0; r < kRows; ++r) rows[r][i] = i < n ? x[32 * r + i] : Together{};
  }
  KV_ROLLED
  for (kv_u32 h = 1; h < 32 && h < n; h *= 2) {
    KV_UNROLL
    for (kv_u32 r = 0; r < kRows; ++r) {
      PerLane<Together> other;
      exchange(rows[r], h, other);
      KV_EACH_LANE(i) {
        KV_UNROLL
        for (kv_u32 t = 0; t < kTogether; ++t)
          rows[r][i].of[t] = add(other[i].of[t], negated(rows[r][i].of[t], (i & h) != 0));
      }
    }
  }
  KV_EACH_LANE(i) {
    KV_UNROLL
    for (kv_u32 h = 1; h < kRows; h *= 2) {
      KV_UNROLL
      for (kv_u32 r = 0; r < kRows; ++r) {
        if (r & h) continue;
        KV_UNROLL
        for (kv_u32 t = 0; t < kTogether; ++t) {
          const float a = rows[r][i].of[t], b = rows[r + h][i].of[t];
          rows[r][i].of[t] = add(a, b);
          rows[r + h][i].of[t] = subtract(a, b);
        }
      }
    }
    KV_UNROLL
    for (kv_u32 r = 0; r < kRows; ++r) {
      KV_UNROLL
      for (kv_u32 t = 0; t < kTogether; ++t) rows[r][i].of[t] = multiply(rows[r][i].of[t], factor);
      if (i < n) x[32 * r + i] = rows[r][i];
    }
  }
}

// The Walsh-Hadamard transform of `n` values, a power of two, times `factor`.
KV_DEVICE void transform(Together* x, kv_u32 n, float factor) {
  if (n == 64) return transform_rows<2>(x, n, factor);
  if (n <= 32) return transform_rows<1>(x, n, factor);
  KV_ROLLED
  for (kv_u32 first = 0; first < n; first += 128) transform_rows<4>(x + first, n, n == 128 ? factor : 1.0f);
  for (kv_u32 h = 128; h < n; h *= 2) {
    sync_warp();
    const float last = 2 * h == n ? factor : 1.0f;
    KV_EACH_LANE(i) {
      KV_ROLLED
      for (kv_u32 p = i; p < n / 2; p += 32) {
        Together* pair = x + (2 * (p & ~(h - 1)) + (p & (h - 1)));
        const Together a = pair[0], b = pair[h];
        Together sum, difference;
        KV_UNROLL
        for (kv_u32 t = 0; t < kTogether; ++t) {
          sum.of[t] = multiply(add(a.of[t], b.of[t]), last);
          difference.of[t] = multiply(subtract(a.of[t], b.of[t]), last);
        }
        pair[0] = sum;
        pair[h] = difference;
      }
    }
  }
}

// In place. `signs` are two rows of d; `n` is the largest power of two that d has room for.
KV_DEVICE void hadamard_inverse(const float* signs, kv_u32 d, kv_u32 n, float factor, Together* x) {
  for (kv_u32 round = 2; round-- > 0;) {
    if (n < d) {
      transform(x + (d - n), n, factor);
      sync_warp();
    }
    transform(x, n, factor);
    sync_warp();
    KV_EACH_LANE(i) {
      KV_ROLLED
      for (kv_u32 c = i; c < d; c += 32) {
        const float sign = load(signs + round * d + c);
        Together value = x[c];
        KV_UNROLL
        for (kv_u32 t = 0; t < kTogether; ++t) value.of[t] = multiply(value.of[t], sign);
        x[c] = value;
      }
    }
    sync_warp();
  }
}

}  // namespace kv::gpu
