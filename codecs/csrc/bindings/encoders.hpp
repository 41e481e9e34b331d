// What the block encoders of all codecs offer to Python.
#pragma once

#include "../quantiser.hpp"
#include "python.hpp"

namespace kv::bindings {

template <class Encoder>
void push(Encoder& encoder, const Array3<float>& x, unsigned n_threads) {
  const auto& g = encoder.geometry();
  if (x.shape(0) != g.heads || x.shape(2) != g.head_dim) invalid("block encoder: [heads][tokens][head_dim] expected");
  bool ok;
  {
    nb::gil_scoped_release release;
    ok = encoder.push(x.data(), x.shape(1), n_threads);
  }
  if (!ok) invalid("a value or residual is beyond 2^24 units: the step is too small");
}

// What both encoders offer.
template <class Encoder>
void bind_encoder(nb::module_& m, const char* name) {
  nb::class_<Encoder>(m, name)
      .def("push", &push<Encoder>, "x"_a, "n_threads"_a = 1)
      .def("payload",
           [](const Encoder& e) {
             std::vector<kv_u8> bytes;
             {
               nb::gil_scoped_release release;
               bytes = e.payload();
             }
             return to_bytes(bytes);
           })
      .def_prop_ro("n_tokens", &Encoder::n_tokens)
      .def_prop_rw(
          "error",
          [](const Encoder& e) {
            const ErrorSums sums = e.error();
            return nb::make_tuple(sums.max_error, sums.sum_squares, sums.n_values);
          },
          [](Encoder& e, const std::tuple<double, double, kv_u64>& sums) {
            e.set_error({std::get<0>(sums), std::get<1>(sums), std::get<2>(sums)});
          });
}

}  // namespace kv::bindings
