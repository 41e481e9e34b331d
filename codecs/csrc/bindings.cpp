// Python bindings of the core: checks and conversions only. Everything heavy runs without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "cursor.hpp"
#include "encoder.hpp"
#include "executor.hpp"
#include "kvr1/encoder.hpp"
#include "kvr1/executor.hpp"
#include "quantiser.hpp"
#include "statistics.hpp"
#include "stream_layout.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

void translate_fault(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const kv::Fault& fault) {
    const nb::object type = nb::module_::import_("kvcodecs.errors").attr(fault.kind);
    PyErr_SetString(type.ptr(), fault.message.c_str());
  }
}

[[noreturn]] void invalid(const std::string& message) { throw kv::Fault{"InvalidArgument", message}; }

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

nb::bytes to_bytes(const std::vector<kv_u8>& v) { return nb::bytes((const char*)v.data(), v.size()); }

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

// ---------------------------------------------------------------- reading varints

nb::tuple read_zigzags(nb::handle data, kv_u64 offset, kv_u64 count) {
  Buffer buffer(data);
  kv::Cursor cursor{buffer.bytes(), buffer.size(), offset, "stream header"};
  if (count > buffer.size()) throw kv::Fault{"Truncated", "stream header: fewer bytes than channels"};
  kv_i64* values;
  auto array = new_array<kv_i64>({count}, &values);
  for (kv_u64 i = 0; i < count; ++i) values[i] = cursor.zigzag();
  return nb::make_tuple(array, cursor.offset);
}

nb::bytes write_zigzags(const Array1<kv_i64>& values) {
  std::vector<kv_u8> out;
  for (size_t i = 0; i < values.shape(0); ++i) {
    const kv_i64 v = values.data()[i];
    kv::append_varint(out, ((kv_u64)v << 1) ^ (kv_u64)(v >> 63));
  }
  return to_bytes(out);
}

// The per-channel part of a `.tkv` header: mean, class and AR coefficient, interleaved. FORMAT.md section 6.
nb::tuple read_tkv_channels(nb::handle data, kv_u64 offset, kv_u64 count, bool ar) {
  Buffer buffer(data);
  kv::Cursor cursor{buffer.bytes(), buffer.size(), offset, "TKV1 header"};
  if (count > buffer.size()) throw kv::Fault{"Truncated", "TKV1 header: fewer bytes than channels"};
  kv_i64* mean;
  kv_u8 *cls, *rho;
  auto means = new_array<kv_i64>({count}, &mean);
  auto classes = new_array<kv_u8>({count}, &cls);
  auto rhos = new_array<kv_u8>({count}, &rho);
  for (kv_u64 i = 0; i < count; ++i) {
    mean[i] = cursor.zigzag();
    cls[i] = cursor.byte() & 0x7F;
    rho[i] = ar ? std::min<kv_u8>(cursor.byte(), 15) : 0;
  }
  return nb::make_tuple(means, classes, rhos, cursor.offset);
}

// `count` entries of varint length + bytes: rows (offset, length), and the offset behind the last.
nb::tuple scan_entries(nb::handle data, kv_u64 offset, kv_u64 count) {
  Buffer buffer(data);
  kv::Cursor cursor{buffer.bytes(), buffer.size(), offset, "lane entries"};
  if (count > buffer.size()) throw kv::Fault{"Truncated", "lane entries: fewer bytes than lanes"};
  kv_u64* rows;
  auto array = new_array<kv_u64>({count, 2}, &rows);
  for (kv_u64 i = 0; i < count; ++i) {
    const kv_u64 n = cursor.varint();
    if (n > cursor.size - cursor.offset)
      throw kv::Fault{"Truncated", "lane entry " + std::to_string(i) + ": " + std::to_string(n) + " bytes, " +
                                   std::to_string(cursor.size - cursor.offset) + " left"};
    rows[2 * i] = cursor.offset;
    rows[2 * i + 1] = n;
    cursor.offset += n;
  }
  return nb::make_tuple(array, cursor.offset);
}

// ---------------------------------------------------------------- encoder

// Within these limits no model ever reaches a probability that the coder cannot take (lane.hpp).
void check_prior(const Array1<kv_u32>& prior) {
  if (prior.shape(0) != kv::kPriorWords) invalid("prior table: 7056 words expected");
  bool fine = true;
  for (size_t i = 0; i < kv::kPriorWords; ++i) {
    const kv_u32 fast = prior.data()[i] & 0xFFFF, slow = prior.data()[i] >> 16;
    fine &= fast >= 64 && fast <= 65472 && slow >= 64 && slow <= 65472;
  }
  if (!fine) invalid("prior table: a model outside [64, 65472]");
}

void check_channels(size_t n, const Array1<kv_u8>& rho, const Array1<kv_u8>& cls, kv_u32 n_classes = kv::kClasses) {
  if (rho.shape(0) != n || cls.shape(0) != n) invalid("statistics: one entry per channel expected");
  for (size_t i = 0; i < n; ++i)
    if (rho.data()[i] > 15 || cls.data()[i] >= n_classes) invalid("statistics: rho or class out of range");
}

kv::BlockEncoder new_block_encoder(const Array1<kv_u32>& prior, kv_u32 heads, kv_u32 head_dim, kv_u32 width,
                                   float unit, kv_u64 sink, kv_u32 sink_div, kv_u64 first_token,
                                   const Array1<kv_i32>& mean, const Array1<kv_u8>& rho, const Array1<kv_u8>& cls) {
  check_prior(prior);
  if (heads == 0 || head_dim == 0 || width == 0 || width % 2 || head_dim % width) invalid("lane width");
  if (sink_div == 0 || sink_div >= 1u << 24) invalid("sink_div: 1 to 2^24 - 1");
  if (!(unit > 0) || !std::isfinite(unit)) invalid("unit: positive and finite");
  const size_t n = (size_t)heads * head_dim;
  if (n > kMaxChannels || mean.shape(0) != n) invalid("statistics: one entry per channel expected");
  check_channels(n, rho, cls);
  for (size_t i = 0; i < n; ++i)
    if (std::abs((kv_i64)mean.data()[i]) >= kv::kValueLimit) invalid("mean out of range");
  const kv::BlockEncoder::Geometry geometry{heads, head_dim, width, (double)unit, sink, sink_div, first_token};
  return kv::BlockEncoder(geometry, mean.data(), rho.data(), cls.data(), prior.data());
}

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

// ---------------------------------------------------------------- KVR1

void build_tables(kv::kvr1::Tables* tables, const Array2<kv_u16>& frequencies) {
  if (frequencies.shape(0) != kv::kvr1::kTables || frequencies.shape(1) != kv::kvr1::kSymbols)
    invalid("frequency tables: 36 rows of 64 expected");
  new (tables) kv::kvr1::Tables;
  if (!tables->build(frequencies.data()))
    invalid("frequency tables: rows of sum 2048 with an escape and no symbol alone expected");
}

kv::kvr1::BlockEncoder kvr1_encoder(const kv::kvr1::Tables& tables, kv_u32 heads, kv_u32 head_dim, float unit,
                                    kv_u64 sink, kv_u32 sink_div, kv_u32 sink_classes, kv_u64 first_token,
                                    const Array1<kv_i32>& mean, const Array1<kv_u8>& rho, const Array1<kv_u8>& cls) {
  if (heads == 0 || head_dim == 0) invalid("no channels");
  if (sink_div == 0 || sink_div > kv::kvr1::kMaxSinkDiv) invalid("sink_div: 1 to 512");
  if (sink_classes >= kv::kvr1::kSpreadClasses) invalid("sink_classes");
  if (!(unit > 0) || !std::isfinite(unit)) invalid("unit: positive and finite");
  const size_t n = (size_t)heads * head_dim;
  if (n > kMaxChannels || mean.shape(0) != n) invalid("statistics: one entry per channel expected");
  check_channels(n, rho, cls, kv::kvr1::kSpreadClasses);
  for (size_t i = 0; i < n; ++i)
    if (std::abs((kv_i64)mean.data()[i]) >= kv::kValueLimit) invalid("mean out of range");
  const kv::kvr1::BlockEncoder::Geometry geometry{heads, head_dim, (double)unit, sink, sink_div, sink_classes,
                                                  first_token};
  return kv::kvr1::BlockEncoder(geometry, mean.data(), rho.data(), cls.data(), tables);
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
            const kv::ErrorSums sums = e.error();
            return nb::make_tuple(sums.max_error, sums.sum_squares, sums.n_values);
          },
          [](Encoder& e, const std::tuple<double, double, kv_u64>& sums) {
            e.set_error({std::get<0>(sums), std::get<1>(sums), std::get<2>(sums)});
          });
}

// ---------------------------------------------------------------- stream layout

kv::StreamParams stream_params(const Array1<kv_u32>& prior, kv_u32 heads, kv_u32 head_dim, double step, kv_u64 sink,
                               kv_u32 sink_div, const Array1<kv_i64>& mean, const Array1<kv_u8>& rho,
                               const Array1<kv_u8>& cls) {
  check_prior(prior);
  const size_t n = (size_t)heads * head_dim;
  if (n == 0 || n > kMaxChannels || mean.shape(0) != n) invalid("statistics: one entry per channel expected");
  check_channels(n, rho, cls);
  if (sink_div == 0) invalid("sink_div: at least 1");
  return {heads, head_dim, step, sink, sink_div, mean.data(), rho.data(), cls.data()};
}

nb::bytes stream_encode(const Array1<kv_u32>& prior, double step, kv_u64 sink, kv_u32 sink_div,
                        const Array1<kv_i64>& mean, const Array1<kv_u8>& rho, const Array1<kv_u8>& cls,
                        kv_u64 first_token, const Array3<double>& y) {
  const auto p = stream_params(prior, (kv_u32)y.shape(0), (kv_u32)y.shape(2), step, sink, sink_div, mean, rho, cls);
  std::vector<kv_u8> out;
  bool ok;
  {
    nb::gil_scoped_release release;
    ok = kv::encode_stream_block(p, prior.data(), y.data(), y.shape(1), first_token, y.shape(1), out);
  }
  if (!ok) invalid("a residual of 2^24 steps or more: the step is too small");
  return to_bytes(out);
}

Result<double> stream_decode(const Array1<kv_u32>& prior, kv_u32 heads, kv_u32 head_dim, double step, kv_u64 sink,
                             kv_u32 sink_div, const Array1<kv_i64>& mean, const Array1<kv_u8>& rho,
                             const Array1<kv_u8>& cls, kv_u64 first_token, kv_u64 n_tokens, nb::handle data) {
  const auto p = stream_params(prior, heads, head_dim, step, sink, sink_div, mean, rho, cls);
  Buffer buffer(data);
  double* y;
  auto array = new_array<double>({heads, n_tokens, head_dim}, &y);
  kv::Status status;
  {
    nb::gil_scoped_release release;
    status = kv::decode_stream_block(p, prior.data(), buffer.bytes(), buffer.size(), first_token, n_tokens, n_tokens, y);
  }
  if (status != kv::kOk) throw kv::Fault{"Corrupt", "block at token " + std::to_string(first_token) +
                                                    ": a residual of 2^24 or more"};
  return array;
}

void rotate(nb::ndarray<double, nb::numpy, nb::ndim<3>, nb::c_contig, nb::device::cpu> y, double theta,
            kv_u64 first_token, double sign) {
  nb::gil_scoped_release release;
  kv::rotate_theta(y.data(), (kv_u32)y.shape(0), y.shape(1), (kv_u32)y.shape(2), theta, first_token, sign);
}

// ---------------------------------------------------------------- plan

kv::Output output_of(const nb::ndarray<nb::numpy, nb::ndim<3>, nb::device::cpu>& view, kv_u32 type) {
  if (type > kv::kBfloat16) invalid("output dtype");
  if (view.itemsize() != (type == kv::kFloat32 ? 4u : 2u)) invalid("output itemsize");
  for (size_t axis = 0; axis < 3; ++axis)
    if (view.stride(axis) < 0 && view.shape(axis) > 1) invalid("output with a negative stride");
  if (view.shape(2) > 1 && view.stride(2) != 1) invalid("output: the last axis must be contiguous");
  return {view.data(), view.shape(0), view.shape(1), view.shape(2), view.stride(0), view.stride(1),
          (kv::OutputType)type};
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

// lanes: bytes of LANE_DTYPE rows, channels: bytes of CHANNEL_DTYPE rows. Returns one status a lane.
Result<kv_u8> run_lanes(const Array1<kv_u32>& prior, nb::handle lane_rows, nb::handle channel_rows,
                        const Array1<kv_u8>& classes, nb::sequence payloads, nb::sequence outputs, nb::sequence types,
                        nb::sequence ropes, unsigned n_threads, bool wide) {
  check_prior(prior);
  Buffer lanes(lane_rows), channels(channel_rows);
  kv::PlanTables tables{};
  std::tie(tables.lanes, tables.n_lanes) = rows_of<kv::Lane>(lanes);
  std::tie(tables.channels, tables.n_channels) = rows_of<kv::Channel>(channels);
  tables.classes = classes.data();
  tables.n_classes = classes.shape(0);
  tables.prior = prior.data();
  PlanObjects objects;
  objects.hold(tables, payloads, outputs, types, ropes);
  for (kv_u64 i = 0; i < tables.n_lanes; ++i)
    if (const char* fault = kv::lane_fault(tables, tables.lanes[i]))
      invalid("plan: lane " + std::to_string(i) + ": " + fault + " out of range");
  kv_u8* status;
  auto result = new_array<kv_u8>({(size_t)tables.n_lanes}, &status);
  bool ok;
  {
    nb::gil_scoped_release release;
    ok = kv::run_plan(tables, status, n_threads, wide && kv::avx512_supported());
  }
  if (!ok) throw std::bad_alloc();
  return result;
}

// blocks: bytes of BLOCK_DTYPE rows, streams: bytes of STREAM_DTYPE rows. Returns one status a block.
Result<kv_u8> run_blocks(const kv::kvr1::Tables& rans, nb::handle block_rows, nb::handle stream_rows,
                         const Array1<kv_i32>& mean, const Array1<kv_u8>& rho, const Array1<kv_u8>& classes,
                         const Array1<kv_u32>& order, nb::sequence payloads, nb::sequence outputs, nb::sequence types,
                         nb::sequence ropes, unsigned n_threads, int level) {
  if (!kv::kvr1::level_supported(level)) invalid("this CPU lacks the instruction set asked for");
  if (rho.shape(0) != mean.shape(0) || classes.shape(0) != mean.shape(0)) invalid("plan: components differ in number");
  Buffer blocks(block_rows), streams(stream_rows);
  kv::kvr1::PlanTables tables{};
  tables.tables = &rans;
  std::tie(tables.blocks, tables.n_blocks) = rows_of<kv::kvr1::Block>(blocks);
  std::tie(tables.streams, tables.n_streams) = rows_of<kv::kvr1::Stream>(streams);
  tables.mean = mean.data();
  tables.rho = rho.data();
  tables.classes = classes.data();
  tables.n_components = mean.shape(0);
  tables.order = order.data();
  tables.n_order = order.shape(0);
  PlanObjects objects;
  objects.hold(tables, payloads, outputs, types, ropes);
  for (kv_u64 i = 0; i < tables.n_blocks; ++i)
    if (const char* fault = kv::kvr1::block_fault(tables, tables.blocks[i]))
      invalid("plan: block " + std::to_string(i) + ": " + fault + " out of range");
  kv_u8* status;
  auto result = new_array<kv_u8>({(size_t)tables.n_blocks}, &status);
  bool ok;
  {
    nb::gil_scoped_release release;
    ok = kv::kvr1::run_blocks(tables, status, n_threads, level);
  }
  if (!ok) throw std::bad_alloc();
  return result;
}

// ---------------------------------------------------------------- mapped memory

// Drop the pages of a file mapping that hold these bytes from this process: they stay in the page cache, and the
// next access maps them again. Reading a large range thus holds no more than what it works on. Only for views of a
// file mapping: anywhere else this would lose data.
void release_pages(nb::handle data) {
  if (!PyMemoryView_Check(data.ptr()) || !PyMemoryView_GET_BUFFER(data.ptr())->readonly)
    invalid("release_pages: a read-only memoryview of a file mapping expected");
#if defined(__unix__) || defined(__APPLE__)
  Buffer buffer(data);
  const std::uintptr_t page = (std::uintptr_t)sysconf(_SC_PAGESIZE);
  const std::uintptr_t begin = (std::uintptr_t)buffer.bytes() / page * page;
  const std::uintptr_t end = ((std::uintptr_t)buffer.bytes() + buffer.size() + page - 1) / page * page;
  if (begin < end) madvise((void*)begin, end - begin, MADV_DONTNEED);
#else
  (void)data;
#endif
}

KV_CLONES bool all_below(const float* x, size_t n, float limit) {
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

template <class T>
void check_chunk(const kv::Statistics& s, const Array3<T>& x) {
  if (x.shape(0) != s.heads() || x.shape(2) != s.head_dim())
    invalid("statistics: [heads][tokens][head_dim] of the stream expected");
}

template <class T>
void add_mean(kv::Statistics& s, const Array3<T>& x) {
  check_chunk(s, x);
  if (s.has_mean()) invalid("statistics: the mean is finished");
  nb::gil_scoped_release release;
  s.add_mean(x.data(), x.shape(1));
}

template <class T>
void add_moments(kv::Statistics& s, const Array3<T>& x) {
  check_chunk(s, x);
  if (!s.has_mean()) invalid("statistics: finish_mean comes first");
  nb::gil_scoped_release release;
  s.add_moments(x.data(), x.shape(1));
}

nb::tuple finish_statistics(const kv::Statistics& s, double step, double mean_unit, bool ar, bool pairs,
                            int class_of_one, int n_classes) {
  if (class_of_one < 0 || n_classes < 1 || n_classes > 256) invalid("statistics: classes");
  if (!s.has_mean()) invalid("statistics: finish_mean comes first");
  const size_t n_channels = (size_t)s.heads() * s.head_dim();
  kv_i64* mean;
  kv_u8 *rho, *cls;
  auto means = new_array<kv_i64>({n_channels}, &mean);
  auto rhos = new_array<kv_u8>({n_channels}, &rho);
  auto classes = new_array<kv_u8>({n_channels}, &cls);
  s.finish(step, mean_unit, ar, pairs, class_of_one, n_classes, mean, rho, cls);
  return nb::make_tuple(means, rhos, classes);
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "C++ core of kvcodecs; its Python callers check shapes and own the documentation.";
  nb::register_exception_translator(translate_fault);
  nb::set_leak_warnings(false);

  m.attr("LANE_BYTES") = sizeof(kv::Lane);
  m.attr("CHANNEL_BYTES") = sizeof(kv::Channel);
  m.attr("BLOCK_BYTES") = sizeof(kv::kvr1::Block);
  m.attr("STREAM_BYTES") = sizeof(kv::kvr1::Stream);
  m.attr("WIDE") = kv::avx512_supported();

  m.def("read_zigzags", &read_zigzags, "data"_a, "offset"_a, "count"_a);
  m.def("write_zigzags", &write_zigzags, "values"_a);
  m.def("read_tkv_channels", &read_tkv_channels, "data"_a, "offset"_a, "count"_a, "ar"_a);
  m.def("scan_entries", &scan_entries, "data"_a, "offset"_a, "count"_a);
  m.def("find_beyond", &find_beyond, "x"_a, "limit"_a);
  m.def("release_pages", &release_pages, "data"_a);

  nb::class_<kv::Statistics>(m, "Statistics")
      .def("__init__",
           [](kv::Statistics* s, kv_u32 heads, kv_u32 head_dim) {
             if (heads == 0 || head_dim == 0 || (kv_u64)heads * head_dim > kMaxChannels) invalid("statistics: size");
             new (s) kv::Statistics(heads, head_dim);
           },
           "heads"_a, "head_dim"_a)
      .def("add_mean", &add_mean<float>, "x"_a)
      .def("add_mean", &add_mean<double>, "x"_a)
      .def("finish_mean", &kv::Statistics::finish_mean)
      .def("add_moments", &add_moments<float>, "x"_a)
      .def("add_moments", &add_moments<double>, "x"_a)
      .def("finish", &finish_statistics, "step"_a, "mean_unit"_a, "ar"_a, "pairs"_a,
           "class_of_one"_a = 8, "n_classes"_a = (int)kv::kClasses)
      .def_prop_ro("sum_squares", &kv::Statistics::sum_squares)
      .def_prop_ro("largest", &kv::Statistics::largest)
      .def_prop_ro("n_tokens", &kv::Statistics::n_tokens);

  bind_encoder<kv::BlockEncoder>(m, "BlockEncoder");
  m.def("block_encoder", &new_block_encoder, "prior"_a, "heads"_a, "head_dim"_a, "width"_a, "unit"_a, "sink"_a,
        "sink_div"_a, "first_token"_a, "mean"_a, "rho"_a, "cls"_a);

  m.def("stream_encode", &stream_encode, "prior"_a, "step"_a, "sink"_a, "sink_div"_a, "mean"_a, "rho"_a, "cls"_a,
        "first_token"_a, "y"_a);
  m.def("stream_decode", &stream_decode, "prior"_a, "heads"_a, "head_dim"_a, "step"_a, "sink"_a, "sink_div"_a,
        "mean"_a, "rho"_a, "cls"_a, "first_token"_a, "n_tokens"_a, "data"_a);
  m.def("rotate", &rotate, "y"_a, "theta"_a, "first_token"_a, "sign"_a);
  nb::class_<kv::kvr1::Tables>(m, "RansTables").def("__init__", &build_tables, "frequencies"_a);
  bind_encoder<kv::kvr1::BlockEncoder>(m, "KVR1Encoder");
  // The encoder refers to the tables.
  m.def("kvr1_encoder", &kvr1_encoder, nb::keep_alive<0, 1>(), "tables"_a, "heads"_a, "head_dim"_a, "unit"_a, "sink"_a,
        "sink_div"_a, "sink_classes"_a, "first_token"_a, "mean"_a, "rho"_a, "cls"_a);
  m.def("level_supported", &kv::kvr1::level_supported, "level"_a);
  m.def("run_blocks", &run_blocks, "tables"_a, "blocks"_a, "streams"_a, "mean"_a, "rho"_a, "classes"_a, "order"_a,
        "payloads"_a, "outputs"_a, "types"_a, "ropes"_a, "n_threads"_a, "level"_a);
  m.def("run_lanes", &run_lanes, "prior"_a, "lanes"_a, "channels"_a, "classes"_a, "payloads"_a, "outputs"_a, "types"_a,
        "ropes"_a, "n_threads"_a, "wide"_a = true);
}
