// Random numbers of FibQuant books. FORMAT.md 11.3 and 11.4.
//
// As kvcodecs/fibquant/reference/generator.py, bit for bit: the same operations in the same order, with the C library's
// exp, log and pow.
#pragma once

#include <cmath>

#include "../lane.hpp"

namespace kv::fib {

// Edges of the 256 layers of a ziggurat, widest first, and the density at each.
struct Ziggurat {
  double x[257], f[257];

  template <class Density, class Inverse>
  Ziggurat(double r, double v, Density density, Inverse inverse) {
    x[0] = v / density(r);
    x[1] = r;
    for (int i = 2; i < 256; ++i) x[i] = inverse(v / x[i - 1] + density(x[i - 1]));
    x[256] = 0;
    for (int i = 0; i < 257; ++i) f[i] = density(x[i]);
  }
};

constexpr double kNormalR = 3.6541528853610088;
constexpr double kExponentialR = 7.69711747013104972;

inline double normal_density(double x) { return std::exp(-x * x / 2); }
inline double exponential_density(double x) { return std::exp(-x); }

inline const Ziggurat& normal_layers() {
  static const Ziggurat layers(kNormalR, 0.00492867323399, normal_density,
                               [](double y) { return std::sqrt(-2 * std::log(y)); });
  return layers;
}

inline const Ziggurat& exponential_layers() {
  static const Ziggurat layers(kExponentialR, 0.0039496598225815571993, exponential_density,
                               [](double y) { return -std::log(y); });
  return layers;
}

// ChaCha8 with a key that PCG32 makes of the seed.
class Generator {
 public:
  explicit Generator(kv_u64 seed) : normal_(normal_layers()), exponential_(exponential_layers()) {
    for (kv_u32& word : key_) {
      seed = seed * 6364136223846793005ull + 11634580027462260723ull;
      word = rotate((kv_u32)(((seed >> 18) ^ seed) >> 27), 32 - (kv_u32)(seed >> 59));
    }
  }

  kv_u64 bits() {
    if (next_ == 8) refill();
    return words_[next_++];
  }

  double uniform() { return (double)(bits() >> 11) * 0x1p-53; }
  double open_uniform() { return open(bits()); }

  double normal() {
    for (;;) {
      const kv_u64 b = bits();
      const unsigned layer = b & 255;
      const double u = 2 * one_to_two(b) - 3;
      const double x = u * normal_.x[layer];
      if (std::fabs(x) < normal_.x[layer + 1]) return x;
      if (layer == 0) return normal_tail(u < 0);
      if (edge(normal_, layer) < normal_density(x)) return x;
    }
  }

  double exponential() {
    for (;;) {
      const kv_u64 b = bits();
      const unsigned layer = b & 255;
      const double x = open(b) * exponential_.x[layer];
      if (x < exponential_.x[layer + 1]) return x;
      if (layer == 0) return kExponentialR - std::log(uniform());
      if (edge(exponential_, layer) < exponential_density(x)) return x;
    }
  }

  double gamma(double shape) {
    if (shape == 1) return exponential();
    if (shape >= 1) return large_gamma(shape);
    const double u = open_uniform();
    return large_gamma(shape + 1) * std::pow(u, 1 / shape);
  }

 private:
  static kv_u32 rotate(kv_u32 x, kv_u32 by) { return x << (by & 31) | x >> (-by & 31); }
  static double one_to_two(kv_u64 b) { return 1 + (double)(b >> 12) * 0x1p-52; }
  static double open(kv_u64 b) { return one_to_two(b) - (1 - 0x1p-53); }
  double edge(const Ziggurat& z, unsigned layer) { return z.f[layer + 1] + (z.f[layer] - z.f[layer + 1]) * uniform(); }

  double large_gamma(double shape) {
    const double d = shape - 1.0 / 3;
    const double c = 1 / std::sqrt(9 * d);
    for (;;) {
      const double x = normal();
      const double root = 1 + c * x;
      if (root <= 0) continue;
      const double v = root * root * root;
      const double u = open_uniform();
      const double square = x * x;
      if (u < 1 - 0.0331 * square * square) return d * v;
      if (std::log(u) < 0.5 * square + d * (1 - v + std::log(v))) return d * v;
    }
  }

  double normal_tail(bool negative) {
    double x = 1, y = 0;
    while (-2 * y < x * x) {
      x = std::log(open_uniform()) / kNormalR;
      y = std::log(open_uniform());
    }
    return negative ? x - kNormalR : kNormalR - x;
  }

  void refill() {
    const kv_u32 start[16] = {0x61707865, 0x3320646e,      0x79622d32,             0x6b206574, key_[0], key_[1],
                              key_[2],    key_[3],         key_[4],                key_[5],    key_[6], key_[7],
                              (kv_u32)block_, (kv_u32)(block_ >> 32), 0, 0};
    kv_u32 x[16];
    for (int i = 0; i < 16; ++i) x[i] = start[i];
    for (int round = 0; round < 4; ++round) {
      for (int i = 0; i < 4; ++i) quarter(x[i], x[4 + i], x[8 + i], x[12 + i]);
      for (int i = 0; i < 4; ++i) quarter(x[i], x[4 + (i + 1) % 4], x[8 + (i + 2) % 4], x[12 + (i + 3) % 4]);
    }
    for (int i = 0; i < 8; ++i)
      words_[i] = (kv_u64)(x[2 * i] + start[2 * i]) | (kv_u64)(x[2 * i + 1] + start[2 * i + 1]) << 32;
    ++block_;
    next_ = 0;
  }

  static void quarter(kv_u32& a, kv_u32& b, kv_u32& c, kv_u32& d) {
    a += b;
    d = rotate(d ^ a, 16);
    c += d;
    b = rotate(b ^ c, 12);
    a += b;
    d = rotate(d ^ a, 8);
    c += d;
    b = rotate(b ^ c, 7);
  }

  const Ziggurat& normal_;
  const Ziggurat& exponential_;
  kv_u32 key_[8];
  kv_u64 block_ = 0, words_[8];
  unsigned next_ = 8;
};

// n vectors of k values: the first values of random unit vectors of d.
inline void spherical_beta(kv_u64 seed, kv_u32 d, kv_u32 k, kv_u64 n, double* out) {
  Generator random(seed);
  for (kv_u64 i = 0; i < n; ++i, out += k) {
    const double a = random.gamma(k / 2.0);
    const double b = random.gamma((d - k) / 2.0);
    double squares = 0;
    for (kv_u32 j = 0; j < k; ++j) {
      out[j] = random.normal();
      squares += out[j] * out[j];
    }
    const double length = std::sqrt(squares);
    const double radius = std::sqrt(a / (a + b));
    for (kv_u32 j = 0; j < k; ++j) out[j] = radius * (out[j] / length);
  }
}

}  // namespace kv::fib
