// Block-quantised values of ggml's schemes.
#include "../ggml/rows.hpp"
#include "encoders.hpp"
#include "plan.hpp"

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
  Buffer blocks(data);
  const kv_u64 n_blocks = blocks.size() / format.bytes;
  if (blocks.size() % format.bytes || out.shape(0) != n_blocks * format.values) invalid("sizes of rows and values");
  const ggml::Decoding decoding(scheme, checked_type(type, out.itemsize()), level);
  if (decoding.decode == nullptr) invalid("scheme without a decoder");
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

std::unique_ptr<Locked<ggml::RowEncoder>> row_encoder(kv_u32 scheme, kv_u32 heads, kv_u32 head_dim) {
  const ggml::Format format = checked_format(scheme);
  if (ggml::encoder(scheme, best_level()) == nullptr || ggml::decoder(scheme, best_level()) == nullptr)
    invalid("scheme without an encoder");
  if (heads == 0 || head_dim == 0 || (kv_u64)heads * head_dim > kMaxChannels) invalid("channels");
  if ((kv_u64)heads * head_dim % format.values) invalid("rows are not whole blocks");
  return locked(ggml::RowEncoder({heads, head_dim, scheme}));
}

void push_rows(Locked<ggml::RowEncoder>& locked, const Array3<float>& x, unsigned n_threads) {
  const auto& g = locked.encoder.geometry();
  if (x.shape(0) != g.heads || x.shape(2) != g.head_dim) invalid("row encoder: [heads][tokens][head_dim] expected");
  if (!locked.with([&](ggml::RowEncoder& e) { return e.push(x.data(), x.shape(1), n_threads); }))
    invalid("the scale of a block leaves float16");
}

void resume_rows(Locked<ggml::RowEncoder>& locked, nb::handle data, double max_error, double sum_squares,
                 kv_u64 n_values) {
  Buffer rows(data);
  if (rows.size() % locked.encoder.row_bytes()) invalid("row encoder: not whole rows");
  locked.with([&](ggml::RowEncoder& e) { e.resume(rows.bytes(), rows.size(), {max_error, sum_squares, n_values}); });
}

// blocks: bytes of BLOCK_DTYPE rows, streams: bytes of STREAM_DTYPE rows. Returns one status a block.
Result<kv_u8> run_row_blocks(nb::handle block_rows, nb::handle stream_rows, const Array1<kv_u32>& order,
                             nb::sequence payloads, nb::sequence outputs, nb::sequence types, nb::sequence ropes,
                             unsigned n_threads, int level) {
  level = checked_level(level);
  Buffer blocks(block_rows), streams(stream_rows);
  ggml::RowTables tables{};
  std::tie(tables.blocks, tables.n_blocks) = rows_of<RowBlock>(blocks);
  std::tie(tables.streams, tables.n_streams) = rows_of<ggml::RowStream>(streams);
  tables.order = order.data();
  tables.n_order = order.shape(0);
  PlanObjects objects;
  objects.hold(tables, payloads, outputs, types, ropes);
  for (kv_u64 i = 0; i < tables.n_blocks; ++i)
    if (const char* fault = ggml::row_block_fault(tables, tables.blocks[i]))
      invalid("plan: block " + std::to_string(i) + ": " + fault + " out of range");
  kv_u8* status;
  auto result = new_array<kv_u8>({(size_t)tables.n_blocks}, &status);
  bool ok;
  {
    nb::gil_scoped_release release;
    ok = ggml::run_row_blocks(tables, status, n_threads, level);
  }
  if (!ok) throw std::bad_alloc();
  return result;
}

}  // namespace

void bind_ggml(nb::module_& m) {
  m.def("ggml_decode", &ggml_decode, "scheme"_a, "data"_a, "level"_a = -1);
  m.def("ggml_decode_half", &ggml_decode_half, "scheme"_a, "data"_a, "level"_a = -1);
  m.def("ggml_encode", &ggml_encode, "scheme"_a, "x"_a, "level"_a = -1);
  m.def("ggml_decode_values", &ggml_decode_values, "scheme"_a, "data"_a, "out"_a, "type"_a, "n_threads"_a,
        "level"_a = -1);
  m.attr("ROW_BLOCK_BYTES") = sizeof(RowBlock);
  m.attr("ROW_STREAM_BYTES") = sizeof(ggml::RowStream);
  using L = Locked<ggml::RowEncoder>;
  nb::class_<L>(m, "RowEncoder")
      .def("push", &push_rows, "x"_a, "n_threads"_a = 1)
      .def("resume", &resume_rows, "rows"_a, "max_error"_a, "sum_squares"_a, "n_values"_a)
      .def("payload", [](L& l) { return to_bytes(l.with([](ggml::RowEncoder& e) { return e.payload(); })); })
      .def_prop_ro("n_tokens", [](L& l) { return l.with([](ggml::RowEncoder& e) { return e.n_tokens(); }); })
      .def_prop_ro("error", [](L& l) {
        const ErrorSums sums = l.with([](ggml::RowEncoder& e) { return e.error(); });
        return nb::make_tuple(sums.max_error, sums.sum_squares, sums.n_values);
      });
  m.def("row_encoder", &row_encoder, "scheme"_a, "heads"_a, "head_dim"_a);
  m.def("run_row_blocks", &run_row_blocks, "blocks"_a, "streams"_a, "order"_a, "payloads"_a, "outputs"_a, "types"_a,
        "ropes"_a, "n_threads"_a, "level"_a);
  m.def("ggml_encode_values", &ggml_encode_values, "scheme"_a, "x"_a, "type"_a, "n_threads"_a, "level"_a = -1);
}

}  // namespace kv::bindings
