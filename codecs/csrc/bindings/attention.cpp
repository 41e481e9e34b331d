// Attention over rows of K and V.
#include "../attention/attention.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <optional>

#include "python.hpp"

namespace kv::bindings {

namespace {

using attention::Attention;
using attention::Operand;
using attention::Range;
using attention::Rotation;

constexpr kv_u64 kMaxHeads = 1u << 16, kMaxDim = 1u << 16, kMaxRows = 1u << 24;
constexpr kv_i64 kMaxPosition = (kv_i64)1 << 53;
constexpr kv_i64 kMaxRotated = 1 << 24;  // the last that is exact in float32
constexpr unsigned kMaxThreads = 4096;

// Two threads of Python may meet in one object: calls work without the GIL.
class Shared {
 public:
  Shared(const Attention::Geometry& geometry, const float* q, const kv_i32* order, const Range* ranges, int level)
      : attention_(geometry, q, order, ranges, level) {}

  const Attention::Geometry& geometry() const { return attention_.geometry(); }
  int level() const { return attention_.level(); }

  bool add(const Operand& k, const Operand& v, kv_u64 n_rows, kv_i64 first_position, const Rotation& rotation,
           unsigned n_threads) {
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    return attention_.add(k, v, n_rows, first_position, rotation, n_threads);
  }
  void result(float* out) {
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    attention_.result(out);
  }

 private:
  Attention attention_;
  std::mutex mutex_;
};

std::unique_ptr<Shared> attention_over(const Array3<float>& q, kv_u64 v_dim, double scale, const Array1<kv_i64>& first,
                                       const Array1<kv_i64>& last, const std::optional<Array1<kv_i32>>& order,
                                       int level) {
  const kv_u64 heads = q.shape(0), rows = q.shape(1), k_dim = q.shape(2);
  if (heads == 0 || heads > kMaxHeads || rows > kMaxRows) invalid("attention: heads or query rows");
  if (k_dim == 0 || k_dim > kMaxDim || v_dim == 0 || v_dim > kMaxDim) invalid("attention: channels");
  if (!std::isfinite(scale)) invalid("attention: scale");
  if (first.shape(0) != rows || last.shape(0) != rows) invalid("attention: one range for each query row expected");
  if (level < 0) level = best_level();
  if (!level_supported(level)) invalid("this CPU lacks the instruction set asked for");
  std::vector<Range> ranges(rows);
  for (kv_u64 i = 0; i < rows; ++i) ranges[i] = {first.data()[i], last.data()[i]};
  if (order) {
    if (order->shape(0) != k_dim) invalid("attention: order of another number of channels");
    std::vector<bool> met(k_dim);
    for (kv_u64 i = 0; i < k_dim; ++i) {
      const kv_i32 channel = order->data()[i];
      if (channel < 0 || (kv_u64)channel >= k_dim || met[channel]) invalid("attention: order is no permutation");
      met[channel] = true;
    }
  }
  const Attention::Geometry geometry{(kv_u32)heads, (kv_u32)rows, (kv_u32)k_dim, (kv_u32)v_dim, scale};
  return std::make_unique<Shared>(geometry, q.data(), order ? order->data() : nullptr, ranges.data(), level);
}

// What Python hands over as K or V, held while it is read.
struct Source {
  Operand operand;
  kv_u64 n_rows = 0;
  std::optional<Buffer> blocks;
  std::optional<nb::ndarray<const float, nb::numpy, nb::ndim<3>, nb::device::cpu>> values;

  Source(nb::handle data, kv_u32 scheme, const Attention::Geometry& g, kv_u32 dim, int level) {
    if (scheme == 0) {
      values = nb::cast<nb::ndarray<const float, nb::numpy, nb::ndim<3>, nb::device::cpu>>(data);
      if (values->shape(0) != g.heads || values->shape(2) != dim) invalid("attention: [heads][rows][channels] expected");
      if (values->shape(1) > 0 && values->shape(2) > 1 && values->stride(2) != 1) invalid("attention: the last axis must be contiguous");
      n_rows = values->shape(1);
      operand.values = values->data();
      operand.head_stride = values->stride(0);
      operand.row_stride = values->stride(1);
      return;
    }
    operand.format = ggml::format_of(scheme);
    operand.decode = operand.format.values == 0 ? nullptr : ggml::decoder(scheme, level);
    if (operand.decode == nullptr) invalid("scheme " + std::to_string(scheme));
    const kv_u64 channels = (kv_u64)g.heads * dim;
    if (channels % operand.format.values) invalid("attention: rows are not whole blocks");
    operand.row_bytes = channels / operand.format.values * operand.format.bytes;
    blocks.emplace(data);
    if (blocks->size() % operand.row_bytes) invalid("attention: not whole rows");
    n_rows = blocks->size() / operand.row_bytes;
    operand.blocks = blocks->bytes();
  }
};

void add(Shared& shared, nb::handle k, kv_u32 k_scheme, nb::handle v, kv_u32 v_scheme, kv_i64 first_position,
         const std::optional<Array1<float>>& inv_freq, float scaling, unsigned n_threads) {
  const Attention::Geometry& g = shared.geometry();
  const Source keys(k, k_scheme, g, g.k_dim, shared.level()), values(v, v_scheme, g, g.v_dim, shared.level());
  if (keys.n_rows != values.n_rows) invalid("attention: K and V of different numbers of rows");
  if (keys.n_rows > (kv_u64)kMaxPosition || first_position > kMaxPosition || first_position < -kMaxPosition)
    invalid("attention: position");
  Rotation rotation;
  if (inv_freq && keys.n_rows > 0) {
    rotation = {inv_freq->data(), (kv_u32)inv_freq->shape(0), scaling};
    if (inv_freq->shape(0) > g.k_dim / 2) invalid("attention: more RoPE pairs than half of the channels");
    const kv_i64 last = first_position + (kv_i64)keys.n_rows - 1;
    if (first_position < 0 || last > kMaxRotated) invalid("attention: positions beyond those that RoPE rotates exactly");
    for (size_t i = 0; i < inv_freq->shape(0); ++i)
      if (!std::isfinite((float)last * inv_freq->data()[i])) invalid("attention: a RoPE angle overflows float32");
  }
  if (!shared.add(keys.operand, values.operand, keys.n_rows, first_position, rotation,
                  std::clamp(n_threads, 1u, kMaxThreads)))
    throw std::bad_alloc();
}

Result<float> result(Shared& shared) {
  const Attention::Geometry& g = shared.geometry();
  float* out;
  auto array = new_array<float>({g.heads, g.rows, g.v_dim}, &out);
  shared.result(out);
  return array;
}

}  // namespace

void bind_attention(nb::module_& m) {
  nb::class_<Shared>(m, "Attention")
      .def("add", &add, "k"_a, "k_scheme"_a, "v"_a, "v_scheme"_a, "first_position"_a, "inv_freq"_a.none(), "scaling"_a,
           "n_threads"_a)
      .def("result", &result);
  m.def("attention", &attention_over, "q"_a, "v_dim"_a, "scale"_a, "first"_a, "last"_a, "order"_a.none(),
        "level"_a = -1);
}

}  // namespace kv::bindings
