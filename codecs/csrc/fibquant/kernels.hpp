// The arithmetic of FibQuant on vectors in the lanes of SIMD registers, compiled for every instruction set in
// kernels.cpp. All levels give the same bits.
#pragma once

#include "../aligned.hpp"
#include "../simd.hpp"
#include "book.hpp"

namespace kv::fib {

// Vectors that are worked on together. Their arrays are [values of a vector][kLanes].
constexpr kv_u32 kLanes = 16;

// A search for nearest codewords, with room of its own. Of one thread.
class Search {
 public:
  void start(const Codewords& codewords) {
    finder = &codewords.finder();
    room = room_.resize(finder->room);
  }
  const Finder* finder = nullptr;
  float* room = nullptr;

 private:
  Aligned<float> room_;
};

// kLanes vectors on their way.
class Batch {
 public:
  // Before each use: books may differ in size.
  void fit(const Book& book) {
    const std::size_t n = (std::size_t)book.d * kLanes;
    a = a_.resize(n);
    b = b_.resize(n);
    rows = rows_.resize(n);
    index = index_.resize(book.blocks * (std::size_t)kLanes);
  }
  float* a = nullptr;  // [d][kLanes] each
  float* b = nullptr;
  float* rows = nullptr;    // [kLanes][d]
  kv_u32* index = nullptr;  // [blocks][kLanes]
  kv_u16 norms[kLanes] = {};  // float16
  kv_u8 failed[kLanes] = {};  // after encoding: 0, or the reason why the vector cannot be coded

 private:
  Aligned<float> a_, b_, rows_;
  Aligned<kv_u32> index_;
};

struct Kernels {
  // Norms and indices of kLanes vectors.
  void (*encode)(const Book& book, const Search& search, const float* const* vectors, Batch& batch);
  // Norms and indices to `rows`. Every index is below the number of codewords.
  void (*decode)(const Book& book, Batch& batch);
  // Nearest codeword of each of n points of k values.
  void (*nearest)(const Search& search, const float* points, kv_u64 n, kv_u32* index);
};

const Kernels& kernels_of(int level);

}  // namespace kv::fib
