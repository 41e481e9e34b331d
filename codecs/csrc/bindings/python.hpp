// What all bindings share: arrays, buffers, errors. Bindings check and convert only; everything heavy runs without the
// GIL, and the Python callers own the documentation.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <string>
#include <vector>

#include "../cursor.hpp"
#include "../lane.hpp"

namespace kv::bindings {

namespace nb = nanobind;
using namespace nb::literals;

// Each file of this folder adds its part of the module.
void bind_attention(nb::module_& m);
void bind_checksum(nb::module_& m);
void bind_fibquant(nb::module_& m);
void bind_fibquant_build(nb::module_& m);
void bind_ggml(nb::module_& m);
void bind_headers(nb::module_& m);
void bind_kvr1(nb::module_& m);
void bind_memory(nb::module_& m);
void bind_statistics(nb::module_& m);
void bind_tensor(nb::module_& m);
void bind_tkv1(nb::module_& m);

[[noreturn]] inline void invalid(const std::string& message) { throw Fault{"InvalidArgument", message}; }

// As in kvcodecs/spec.py.
constexpr kv_u64 kMaxChannels = 1u << 20;

template <class T>
using Array1 = nb::ndarray<const T, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Array2 = nb::ndarray<const T, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using Array3 = nb::ndarray<const T, nb::numpy, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
template <class T>
using Result = nb::ndarray<nb::numpy, T>;

template <class T>
Result<T> new_array(std::initializer_list<size_t> shape, T** data) {
  size_t n = 1;
  for (size_t s : shape)
    if (__builtin_mul_overflow(n, s, &n)) throw std::bad_alloc();
  *data = new T[n > 0 ? n : 1];
  nb::capsule owner(*data, [](void* p) noexcept { delete[] (T*)p; });
  return Result<T>(*data, shape.size(), shape.begin(), owner);
}

inline nb::bytes to_bytes(const std::vector<kv_u8>& v) { return nb::bytes((const char*)v.data(), v.size()); }

// A read-only buffer, held as long as this object lives.
class Buffer {
 public:
  explicit Buffer(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  Buffer(Buffer&& other) noexcept : view_(other.view_) { other.view_.obj = nullptr; }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (view_.obj != nullptr) PyBuffer_Release(&view_);
  }
  const kv_u8* bytes() const { return (const kv_u8*)view_.buf; }
  kv_u64 size() const { return (kv_u64)view_.len; }

 private:
  Py_buffer view_{};
};

// Statistics of n channels as an encoder takes them.
inline void check_channels(size_t n, const Array1<kv_u8>& rho, const Array1<kv_u8>& cls, kv_u32 n_classes) {
  if (rho.shape(0) != n || cls.shape(0) != n) invalid("statistics: one entry per channel expected");
  for (size_t i = 0; i < n; ++i)
    if (rho.data()[i] > 15 || cls.data()[i] >= n_classes) invalid("statistics: rho or class out of range");
}

}  // namespace kv::bindings
