// Block-quantised values of ggml's schemes.
#include "../ggml/decode.hpp"
#include "../ggml/encode.hpp"
#include "python.hpp"

namespace kv::bindings {

namespace {

int checked_level(int level) {
  if (level < 0) return best_level();
  if (!level_supported(level)) invalid("this CPU lacks the instruction set asked for");
  return level;
}

ggml::Format checked_format(kv_u32 scheme) {
  const ggml::Format format = ggml::format_of(scheme);
  if (format.values == 0) invalid("scheme " + std::to_string(scheme));
  return format;
}

Result<float> ggml_decode(kv_u32 scheme, nb::handle data, int level) {
  const ggml::Format format = checked_format(scheme);
  const ggml::Decode decode = ggml::decoder(scheme, checked_level(level));
  if (decode == nullptr) invalid("scheme without a decoder");
  Buffer blocks(data);
  if (blocks.size() % format.bytes) invalid("not whole blocks");
  const kv_u64 n_blocks = blocks.size() / format.bytes;
  float* out;
  auto result = new_array<float>({(size_t)(n_blocks * format.values)}, &out);
  {
    nb::gil_scoped_release release;
    decode(blocks.bytes(), n_blocks, out);
  }
  return result;
}

// None where a scale leaves float16.
nb::object ggml_encode(kv_u32 scheme, const Array1<float>& x, int level) {
  const ggml::Format format = checked_format(scheme);
  const ggml::Encode encode = ggml::encoder(scheme, checked_level(level));
  if (encode == nullptr) invalid("scheme without an encoder");
  if (x.shape(0) % format.values) invalid("not whole blocks");
  const kv_u64 n_blocks = x.shape(0) / format.values;
  kv_u8* out;
  auto result = new_array<kv_u8>({(size_t)(n_blocks * format.bytes)}, &out);
  bool fits;
  {
    nb::gil_scoped_release release;
    fits = encode(x.data(), n_blocks, out);
  }
  return fits ? nb::cast(result) : nb::none();
}

}  // namespace

void bind_ggml(nb::module_& m) {
  m.def("ggml_decode", &ggml_decode, "scheme"_a, "data"_a, "level"_a = -1);
  m.def("ggml_encode", &ggml_encode, "scheme"_a, "x"_a, "level"_a = -1);
}

}  // namespace kv::bindings
