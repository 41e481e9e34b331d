// Float tensors on their way in: check against a limit, float16 to float32.
#include "../half.hpp"
#include "../simd.hpp"
#include "python.hpp"

namespace kv::bindings {

namespace {

KV_CLONES static bool all_below(const float* x, size_t n, float limit) {
  kv_i32 fine = 1;
  for (size_t i = 0; i < n; ++i) fine &= (kv_i32)(std::fabs(x[i]) < limit);
  return fine != 0;
}

// Flat index of the first value whose magnitude is not below `limit` (NaN included), or -1.
kv_i64 find_beyond(const Array3<float>& x, float limit) {
  nb::gil_scoped_release release;
  const float* values = x.data();
  const size_t n = x.size(), stride = 4096;
  for (size_t begin = 0; begin < n; begin += stride) {
    const size_t end = std::min(n, begin + stride);
    const bool fine = all_below(values + begin, end - begin, limit);
    for (size_t i = begin; !fine && i < end; ++i)
      if (!(std::fabs(values[i]) < limit)) return (kv_i64)i;
  }
  return -1;
}

KV_CLONES static void widen(const kv_u16* __restrict x, size_t n, float* __restrict out) {
  for (size_t i = 0; i < n; ++i) out[i] = from_float16(x[i]);
}

// Bits of float16 to float32.
Result<float> widen_float16(const Array3<kv_u16>& x) {
  float* out;
  auto result = new_array<float>({x.shape(0), x.shape(1), x.shape(2)}, &out);
  nb::gil_scoped_release release;
  widen(x.data(), x.size(), out);
  return result;
}

}  // namespace

void bind_tensor(nb::module_& m) {
  m.def("find_beyond", &find_beyond, "x"_a, "limit"_a);
  m.def("widen_float16", &widen_float16, "x"_a);
}

}  // namespace kv::bindings
