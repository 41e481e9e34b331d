// What encoders and decoders of FibQuant share: the codewords and the rotation of a book. FORMAT.md, FibQuant.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "search.hpp"

namespace kv::fib {

constexpr kv_u32 kMostDim = 16384, kMostHaarDim = 4096, kMostBlockDim = 256, kMostCodewords = 1u << 20;
constexpr kv_u32 kMostValues = 1u << 20;  // of a token: heads * head_dim, as in kvcodecs/spec.py

class Codewords {
 public:
  // n rows of k values.
  Codewords(const float* values, kv_u32 n, kv_u32 k) : n_(n), k_(k), values_(values, values + (kv_u64)n * k) {
    scored_.reserve((kv_u64)n * (k + 1));
    for (kv_u32 i = 0; i < n; ++i) {
      const float* const c = values + (kv_u64)i * k;
      double squared = 0;
      for (kv_u32 j = 0; j < k; ++j) squared += (double)c[j] * c[j];
      scored_.push_back((float)(-squared / 2));
      scored_.insert(scored_.end(), c, c + k);
    }
  }

  kv_u32 n() const { return n_; }
  kv_u32 k() const { return k_; }
  const float* values() const { return values_.data(); }
  // Rows of a bias -|c|^2 / 2 and the codeword: of all codewords, the nearest has the largest bias + t . c.
  const float* scored() const { return scored_.data(); }
  // Of many codewords; null of a few. Made when an encoder first asks for it.
  const Tree* tree() const {
    if (n_ <= kFewCodewords) return nullptr;
    std::call_once(*once_, [this] { tree_ = std::make_unique<Tree>(scored_.data(), n_, k_); });
    return tree_.get();
  }

 private:
  kv_u32 n_, k_;
  std::vector<float> values_, scored_;
  std::unique_ptr<std::once_flag> once_ = std::make_unique<std::once_flag>();
  mutable std::unique_ptr<Tree> tree_;
};

enum Rotation : kv_u32 { kHaar = 0, kHadamard = 1 };

struct Book {
  Rotation rotation;
  kv_u32 d;
  std::vector<float> rotation_data;  // haar: [d][d]; hadamard: [2][d] signs
  Codewords codewords;

  kv_u32 blocks() const { return d / codewords.k(); }
  kv_u32 index_bits() const {
    kv_u32 bits = 1;
    while ((1u << bits) < codewords.n()) ++bits;
    return bits;
  }
  kv_u32 index_bytes() const { return (blocks() * index_bits() + 7) / 8; }
};

}  // namespace kv::fib
