// The Python side of decode plans: payloads, outputs and RoPE tables.
#pragma once

#include "../payload.hpp"
#include "../rows.hpp"
#include "python.hpp"

namespace kv::bindings {

inline Output output_of(const nb::ndarray<nb::numpy, nb::ndim<3>, nb::device::cpu>& view, kv_u32 type) {
  if (type > kBfloat16) invalid("output dtype");
  if (view.itemsize() != (type == kFloat32 ? 4u : 2u)) invalid("output itemsize");
  for (size_t axis = 0; axis < 3; ++axis)
    if (view.stride(axis) < 0 && view.shape(axis) > 1) invalid("output with a negative stride");
  if (view.shape(2) > 1 && view.stride(2) != 1) invalid("output: the last axis must be contiguous");
  return {view.data(), view.shape(0), view.shape(1), view.shape(2), view.stride(0), view.stride(1),
          (OutputType)type};
}

// Sizes of what a plan refers to, for checks of its tables: shapes are rows of (heads, rows, channels) and (rows, pairs).
template <class Tables>
void size(Tables& tables, const Array1<kv_u64>& payload_bytes, const Array2<kv_u64>& output_shapes,
          const Array2<kv_u64>& rope_shapes) {
  if (output_shapes.shape(1) != 3 || rope_shapes.shape(1) != 2) invalid("plan: shapes of outputs or RoPE tables");
  for (size_t i = 0; i < payload_bytes.shape(0); ++i) tables.payloads.push_back({nullptr, payload_bytes.data()[i]});
  for (size_t i = 0; i < output_shapes.shape(0); ++i) {
    const kv_u64* shape = output_shapes.data() + 3 * i;
    tables.outputs.push_back({nullptr, shape[0], shape[1], shape[2], 0, 0, kFloat32});
  }
  for (size_t i = 0; i < rope_shapes.shape(0); ++i) {
    const kv_u64* shape = rope_shapes.data() + 2 * i;
    tables.ropes.push_back({nullptr, nullptr, shape[0], shape[1]});
  }
}

// The Python objects that a plan refers to, held while it runs.
struct PlanObjects {
  std::vector<Buffer> payloads;
  std::vector<nb::ndarray<nb::numpy, nb::ndim<3>, nb::device::cpu>> outputs;
  std::vector<Array2<float>> ropes;

  template <class Tables>
  void hold(Tables& tables, nb::sequence payload_list, nb::sequence output_list, nb::sequence types,
            nb::sequence rope_list) {
    for (nb::handle payload : payload_list) {
      payloads.emplace_back(payload);
      tables.payloads.push_back({payloads.back().bytes(), payloads.back().size()});
    }
    for (size_t i = 0, n = nb::len(output_list); i < n; ++i) {
      outputs.push_back(nb::cast<nb::ndarray<nb::numpy, nb::ndim<3>, nb::device::cpu>>(output_list[i]));
      tables.outputs.push_back(output_of(outputs.back(), nb::cast<kv_u32>(types[i])));
    }
    for (nb::handle pair : rope_list) {
      auto cos = nb::cast<Array2<float>>(pair[0]), sin = nb::cast<Array2<float>>(pair[1]);
      if (cos.shape(0) != sin.shape(0) || cos.shape(1) != sin.shape(1)) invalid("RoPE table: cos and sin differ");
      tables.ropes.push_back({cos.data(), sin.data(), cos.shape(0), cos.shape(1)});
      ropes.push_back(std::move(cos));
      ropes.push_back(std::move(sin));
    }
  }
};

// Rows of a structured array.
template <class T>
std::pair<const T*, kv_u64> rows_of(const Buffer& buffer) {
  return {(const T*)buffer.bytes(), buffer.size() / sizeof(T)};
}

}  // namespace kv::bindings
