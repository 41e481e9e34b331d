// Block-quantised values of ggml's schemes.
#include "../ggml/pieces.hpp"
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

kv_u64 whole_blocks(const Buffer& blocks, const ggml::Format& format) {
  if (blocks.size() % format.bytes) invalid("not whole blocks");
  return blocks.size() / format.bytes;
}

Result<float> ggml_decode(kv_u32 scheme, nb::handle data, int level) {
  const ggml::Format format = checked_format(scheme);
  const ggml::Decode decode = ggml::decoder(scheme, checked_level(level));
  Buffer blocks(data);
  const kv_u64 n_blocks = whole_blocks(blocks, format);
  float* out;
  auto result = new_array<float>({(size_t)(n_blocks * format.values)}, &out);
  {
    nb::gil_scoped_release release;
    decode(blocks.bytes(), n_blocks, out);
  }
  return result;
}

// Bits of float16; None where a value leaves it.
nb::object ggml_decode_half(kv_u32 scheme, nb::handle data, int level) {
  const ggml::Format format = checked_format(scheme);
  const ggml::DecodeHalf decode = ggml::half_decoder(scheme, checked_level(level));
  Buffer blocks(data);
  const kv_u64 n_blocks = whole_blocks(blocks, format);
  kv_u16* out;
  auto result = new_array<kv_u16>({(size_t)(n_blocks * format.values)}, &out);
  bool fits;
  {
    nb::gil_scoped_release release;
    fits = decode(blocks.bytes(), n_blocks, out);
  }
  return fits ? nb::cast(result) : nb::none();
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

using Anything = nb::ndarray<nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using AnythingRead = nb::ndarray<nb::numpy, nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

OutputType checked_type(kv_u32 type, size_t itemsize) {
  if (type > kBfloat16 || itemsize != (type == kFloat32 ? 4u : 2u)) invalid("dtype");
  return (OutputType)type;
}

// Whether a value overflows the type of `out`, which takes them one after the other.
bool ggml_decode_values(kv_u32 scheme, nb::handle data, const Anything& out, kv_u32 type, unsigned n_threads,
                        int level) {
  const ggml::Format format = checked_format(scheme);
  level = checked_level(level);
  const ggml::Decode decode = ggml::decoder(scheme, level);
  if (decode == nullptr) invalid("scheme without a decoder");
  Buffer blocks(data);
  const kv_u64 n_blocks = blocks.size() / format.bytes;
  if (blocks.size() % format.bytes || out.shape(0) != n_blocks * format.values) invalid("sizes of rows and values");
  const ggml::Decoding decoding{format, decode, &narrow_of(level), checked_type(type, out.itemsize())};
  bool ok, overflow;
  {
    nb::gil_scoped_release release;
    ok = ggml::decode_values(decoding, blocks.bytes(), n_blocks, out.data(), n_threads, overflow);
  }
  if (!ok) throw std::bad_alloc();
  return overflow;
}

// The blocks, and the first value that is not finite and the first block whose scale leaves float16, -1 for none.
nb::tuple ggml_encode_values(kv_u32 scheme, const AnythingRead& x, kv_u32 type, unsigned n_threads, int level) {
  const ggml::Format format = checked_format(scheme);
  const ggml::Encode encode = ggml::encoder(scheme, checked_level(level));
  if (encode == nullptr) invalid("scheme without an encoder");
  const OutputType checked = checked_type(type, x.itemsize());
  if (x.shape(0) % format.values) invalid("not whole blocks");
  const kv_u64 n_blocks = x.shape(0) / format.values;
  kv_u8* out;
  auto result = new_array<kv_u8>({(size_t)(n_blocks * format.bytes)}, &out);
  ggml::Refused refused;
  bool ok;
  {
    nb::gil_scoped_release release;
    ok = ggml::encode_values(format, encode, checked, x.data(), n_blocks, out, n_threads, refused);
  }
  if (!ok) throw std::bad_alloc();
  return nb::make_tuple(result, refused.value, refused.block);
}

}  // namespace

void bind_ggml(nb::module_& m) {
  m.def("ggml_decode", &ggml_decode, "scheme"_a, "data"_a, "level"_a = -1);
  m.def("ggml_decode_half", &ggml_decode_half, "scheme"_a, "data"_a, "level"_a = -1);
  m.def("ggml_encode", &ggml_encode, "scheme"_a, "x"_a, "level"_a = -1);
  m.def("ggml_decode_values", &ggml_decode_values, "scheme"_a, "data"_a, "out"_a, "type"_a, "n_threads"_a,
        "level"_a = -1);
  m.def("ggml_encode_values", &ggml_encode_values, "scheme"_a, "x"_a, "type"_a, "n_threads"_a, "level"_a = -1);
}

}  // namespace kv::bindings
