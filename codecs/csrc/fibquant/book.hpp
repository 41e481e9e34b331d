// What encoders and decoders of FibQuant share: the codewords and the rotation of a book. FORMAT.md, FibQuant.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "search.hpp"

namespace kv::fib {

constexpr kv_u32 kMostDim = 16384, kMostHaarDim = 4096, kMostBlockDim = 256, kMostCodewords = 1u << 20;
constexpr kv_u32 kMostValues = 1u << 20;  // of a token: heads * head_dim, as in kvcodecs/spec.py

class Codewords {
 public:
  // n rows of k values.
  Codewords(const float* values, kv_u32 n, kv_u32 k) : n_(n), k_(k), values_(values, values + (kv_u64)n * k) {}

  kv_u32 n() const { return n_; }
  kv_u32 k() const { return k_; }
  const float* values() const { return values_.data(); }
  // Made when an encoder first asks for it.
  const Finder& finder() const {
    std::call_once(*once_, [this] { finder_ = std::make_unique<Finder>(values_.data(), n_, k_); });
    return *finder_;
  }

 private:
  kv_u32 n_, k_;
  std::vector<float> values_;
  std::unique_ptr<std::once_flag> once_ = std::make_unique<std::once_flag>();
  mutable std::unique_ptr<Finder> finder_;
};

enum Rotation : kv_u32 { kHaar = 0, kHadamard = 1 };

struct Book {
  Book(Rotation kind, kv_u32 dimensions, std::vector<float> data, Codewords all)
      : rotation(kind), d(dimensions), rotation_data(std::move(data)), codewords(std::move(all)),
        blocks(d / codewords.k()) {
    while ((1u << index_bits) < codewords.n()) ++index_bits;
    index_bytes = (blocks * index_bits + 7) / 8;
  }

  Rotation rotation;
  kv_u32 d;
  std::vector<float> rotation_data;  // haar: [d][d]; hadamard: [2][d] signs
  Codewords codewords;
  kv_u32 blocks;  // codewords of a vector
  kv_u32 index_bits = 1, index_bytes;
};

}  // namespace kv::fib
