// What the block encoders of all codecs offer to Python.
#pragma once

#include <nanobind/stl/unique_ptr.h>

#include <memory>
#include <mutex>
#include <utility>

#include "../error_sums.hpp"
#include "python.hpp"

namespace kv::bindings {

// An encoder and its lock: calls work without the GIL, so that two threads may meet in one encoder. The lock is taken
// after the GIL is given up, and given up before the GIL is taken again.
template <class Encoder>
struct Locked {
  Encoder encoder;
  mutable std::mutex mutex;

  explicit Locked(Encoder&& e) : encoder(std::move(e)) {}

  template <class Work>
  auto with(Work work) {
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex);
    return work(encoder);
  }
};

template <class Encoder>
std::unique_ptr<Locked<Encoder>> locked(Encoder&& encoder) {
  return std::make_unique<Locked<Encoder>>(std::move(encoder));
}

template <class Encoder>
void push(Locked<Encoder>& locked, const Array3<float>& x, unsigned n_threads) {
  const auto& g = locked.encoder.geometry();
  if (x.shape(0) != g.heads || x.shape(2) != g.head_dim) invalid("block encoder: [heads][tokens][head_dim] expected");
  if (!locked.with([&](Encoder& e) { return e.push(x.data(), x.shape(1), n_threads); }))
    invalid("a value or residual is beyond 2^24 units: the step is too small");
}

// What all encoders offer.
template <class Encoder>
void bind_encoder(nb::module_& m, const char* name) {
  using L = Locked<Encoder>;
  nb::class_<L>(m, name)
      .def("push", &push<Encoder>, "x"_a, "n_threads"_a = 1)
      .def("payload", [](L& l) { return to_bytes(l.with([](Encoder& e) { return e.payload(); })); })
      .def_prop_ro("n_tokens", [](L& l) { return l.with([](Encoder& e) { return e.n_tokens(); }); })
      .def_prop_rw(
          "error",
          [](L& l) {
            const ErrorSums sums = l.with([](Encoder& e) { return e.error(); });
            return nb::make_tuple(sums.max_error, sums.sum_squares, sums.n_values);
          },
          [](L& l, const std::tuple<double, double, kv_u64>& sums) {
            l.with([&](Encoder& e) { e.set_error({std::get<0>(sums), std::get<1>(sums), std::get<2>(sums)}); });
          });
}

}  // namespace kv::bindings
