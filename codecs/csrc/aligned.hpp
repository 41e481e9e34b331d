// Arrays for vector loads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>

namespace kv {

// An array that starts at a cache line, so that no vector of it crosses one. Grows without initialising.
template <class T>
class Aligned {
 public:
  T* resize(std::size_t n) {
    if (n > capacity_) {
      const std::size_t capacity = std::max(n, 2 * size_);
      std::unique_ptr<unsigned char[]> larger(new unsigned char[capacity * sizeof(T) + kLine]);
      T* const first = (T*)(((std::size_t)larger.get() + kLine - 1) / kLine * kLine);
      std::copy(data_, data_ + size_, first);
      bytes_ = std::move(larger);
      data_ = first;
      capacity_ = capacity;
    }
    size_ = n;
    return data_;
  }
  template <class U>
  void assign(const U* from, std::size_t n) {
    size_ = 0;
    std::copy(from, from + n, resize(n));
  }
  void assign(std::size_t n, T value) {
    size_ = 0;
    std::fill_n(resize(n), n, value);
  }

  T* data() { return data_; }
  const T* data() const { return data_; }
  T& operator[](std::size_t i) { return data_[i]; }
  const T& operator[](std::size_t i) const { return data_[i]; }

 private:
  static constexpr std::size_t kLine = 64;

  std::unique_ptr<unsigned char[]> bytes_;
  T* data_ = nullptr;
  std::size_t size_ = 0, capacity_ = 0;
};

}  // namespace kv
