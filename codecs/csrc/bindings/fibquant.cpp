// FibQuant: books, vectors to norms and indices and back, frames.
#include <cmath>
#include <optional>

#include <nanobind/stl/optional.h>

#include "../fibquant/executor.hpp"
#include "plan.hpp"

namespace kv::bindings {

namespace {

using fib::Book;

int checked_level(int level) {
  if (level < 0) return best_level();
  if (!level_supported(level)) invalid("this CPU lacks the instruction set asked for");
  return level;
}

void check_finite(const float* values, kv_u64 n, const char* what) {
  for (kv_u64 i = 0; i < n; ++i)
    if (!std::isfinite(values[i])) invalid(std::string(what) + ": entry " + std::to_string(i) + " is not finite");
}

void make_book(Book* book, kv_u32 rotation, const Array2<float>& data, const Array2<float>& codewords) {
  const kv_u64 d = data.shape(1), n = codewords.shape(0), k = codewords.shape(1);
  if (rotation > fib::kHadamard) invalid("book: rotation " + std::to_string(rotation));
  if (d < 2 || d > (rotation == fib::kHaar ? fib::kMostHaarDim : fib::kMostDim)) invalid("book: dimensions");
  if (data.shape(0) != (rotation == fib::kHaar ? d : 2)) invalid("book: shape of the rotation");
  if (k == 0 || k > fib::kMostBlockDim || d % k) invalid("book: dimensions of a codeword");
  if (n < 2 || n > fib::kMostCodewords) invalid("book: number of codewords");
  const kv_u64 n_data = data.shape(0) * d;
  check_finite(data.data(), n_data, "book: rotation");
  check_finite(codewords.data(), n * k, "book: codewords");
  if (rotation == fib::kHadamard)
    for (kv_u64 i = 0; i < n_data; ++i)
      if (std::fabs(data.data()[i]) != 1.0f) invalid("book: sign " + std::to_string(i) + " is not 1 or -1");
  new (book) Book((fib::Rotation)rotation, (kv_u32)d, std::vector<float>(data.data(), data.data() + n_data),
                  fib::Codewords(codewords.data(), (kv_u32)n, (kv_u32)k));
}

using Shown = nb::ndarray<nb::numpy, const float>;

Shown rotation_data(const Book& book) {
  const std::size_t shape[] = {book.rotation_data.size() / book.d, book.d};
  return Shown(book.rotation_data.data(), 2, shape, nb::handle());
}

Shown codewords(const Book& book) {
  const std::size_t shape[] = {book.codewords.n(), book.codewords.k()};
  return Shown(book.codewords.values(), 2, shape, nb::handle());
}

// State, norms, indices, and the largest error and the sum of squared ones of the vectors that are coded.
nb::tuple fib_encode(const Book& book, const Array3<float>& x, std::optional<Array1<float>> mean,
                     std::optional<Array1<float>> scale, const Array2<kv_u8>& keep, unsigned n_threads, int level) {
  const kv_u64 heads = x.shape(0), n = x.shape(1);
  if (x.shape(2) != book.d) invalid("fib_encode: vectors of " + std::to_string(book.d) + " values expected");
  if (keep.shape(0) != heads || keep.shape(1) != n) invalid("fib_encode: shape of keep");
  if (mean.has_value() != scale.has_value()) invalid("fib_encode: means without scales");
  if (mean && (mean->shape(0) != heads * book.d || scale->shape(0) != heads * book.d))
    invalid("fib_encode: one mean and one scale a channel expected");
  level = checked_level(level);
  kv_u8 *state, *indices;
  kv_u16* norms;
  auto states = new_array<kv_u8>({(size_t)heads, (size_t)n}, &state);
  auto all_norms = new_array<kv_u16>({(size_t)heads, (size_t)n}, &norms);
  auto all_indices = new_array<kv_u8>({(size_t)heads, (size_t)n, (size_t)book.index_bytes}, &indices);
  const fib::Encoding encoding{&book,       x.data(), heads, n,     mean ? mean->data() : nullptr,
                               scale ? scale->data() : nullptr, keep.data(), state, norms, indices};
  ErrorSums error;
  bool ok;
  {
    nb::gil_scoped_release release;
    ok = fib::encode(encoding, n_threads, level, error);
  }
  if (!ok) throw std::bad_alloc();
  return nb::make_tuple(states, all_norms, all_indices, error.max_error, error.sum_squares);
}

// The values, and the first vector that is none, or -1.
nb::tuple fib_decode(const Book& book, const Array1<kv_u16>& norms, const Array2<kv_u8>& indices, unsigned n_threads,
                     int level) {
  const kv_u64 n = norms.shape(0);
  if (indices.shape(0) != n || indices.shape(1) != book.index_bytes) invalid("fib_decode: shape of the indices");
  level = checked_level(level);
  float* out;
  auto values = new_array<float>({(size_t)n, (size_t)book.d}, &out);
  kv_i64 bad;
  bool ok;
  {
    nb::gil_scoped_release release;
    ok = fib::decode_vectors(book, norms.data(), indices.data(), n, out, n_threads, level, bad);
  }
  if (!ok) throw std::bad_alloc();
  return nb::make_tuple(values, bad);
}

Result<kv_u32> fib_nearest(const Book& book, const Array2<float>& points, int level) {
  if (points.shape(1) != book.codewords.k()) invalid("fib_nearest: dimensions of the points");
  level = checked_level(level);
  kv_u32* out;
  auto result = new_array<kv_u32>({(size_t)points.shape(0)}, &out);
  {
    nb::gil_scoped_release release;
    fib::Search search;
    search.start(book.codewords);
    fib::kernels_of(level).nearest(search, points.data(), points.shape(0), out);
  }
  return result;
}

kv_u32 fib_check_payload(nb::handle data, kv_u64 n_vectors, kv_u32 index_bytes, kv_u32 head_dim) {
  Buffer payload(data);
  if (n_vectors >= (kv_u64)1 << 40 || index_bytes > fib::kMostValues * 4 || head_dim > fib::kMostValues)
    invalid("fib_check_payload: sizes");
  fib::Parts parts;
  return fib::check_payload(payload.bytes(), payload.size(), n_vectors, index_bytes, head_dim, parts);
}

// A plan's tables, as Python has them. blocks: bytes of rows.BLOCK_DTYPE, streams: bytes of fib::Stream.
struct PlanTables {
  fib::Tables tables{};
  std::vector<nb::object> books;
  Buffer blocks, streams;

  PlanTables(nb::sequence book_list, nb::handle block_rows, nb::handle stream_rows, const Array1<kv_u32>& order,
             const Array1<float>& channels)
      : blocks(block_rows), streams(stream_rows) {
    for (nb::handle book : book_list) {
      books.push_back(nb::borrow(book));
      tables.books.push_back(nb::cast<const Book*>(book));
      if (tables.books.back() == nullptr) invalid("plan: no book");
    }
    std::tie(tables.blocks, tables.n_blocks) = rows_of<RowBlock>(blocks);
    std::tie(tables.streams, tables.n_streams) = rows_of<fib::Stream>(streams);
    tables.order = order.data();
    tables.n_order = order.shape(0);
    tables.channels = channels.data();
    tables.n_channels = channels.shape(0);
  }

  void check() const {
    for (kv_u64 i = 0; i < tables.n_blocks; ++i)
      if (const char* fault = fib::block_fault(tables, tables.blocks[i]))
        invalid("plan: block " + std::to_string(i) + ": " + fault + " out of range");
  }
};

void check_fib_blocks(nb::sequence books, nb::handle block_rows, nb::handle stream_rows, const Array1<kv_u32>& order,
                      const Array1<float>& channels, const Array1<kv_u64>& payload_bytes,
                      const Array2<kv_u64>& output_shapes, const Array2<kv_u64>& rope_shapes) {
  PlanTables plan(books, block_rows, stream_rows, order, channels);
  size(plan.tables, payload_bytes, output_shapes, rope_shapes);
  plan.check();
  // For the kernels, which number vectors in 32 bits.
  for (kv_u64 i = 0; i < plan.tables.n_blocks; ++i) {
    const RowBlock& b = plan.tables.blocks[i];
    if ((kv_u64)plan.tables.streams[b.stream].heads * b.n_tokens >> 32)
      invalid("plan: block " + std::to_string(i) + ": 2^32 vectors or more, which devices do not decode");
  }
}

// Returns one status a block.
Result<kv_u8> run_fib_blocks(nb::sequence books, nb::handle block_rows, nb::handle stream_rows,
                             const Array1<kv_u32>& order, const Array1<float>& channels, nb::sequence payloads,
                             nb::sequence outputs, nb::sequence types, nb::sequence ropes, unsigned n_threads,
                             int level) {
  level = checked_level(level);
  PlanTables plan(books, block_rows, stream_rows, order, channels);
  fib::Tables& tables = plan.tables;
  PlanObjects objects;
  objects.hold(tables, payloads, outputs, types, ropes);
  plan.check();
  kv_u8* status;
  auto result = new_array<kv_u8>({(size_t)tables.n_blocks}, &status);
  bool ok;
  {
    nb::gil_scoped_release release;
    ok = fib::run_blocks(tables, status, n_threads, level);
  }
  if (!ok) throw std::bad_alloc();
  return result;
}

}  // namespace

void bind_fibquant(nb::module_& m) {
  nb::class_<Book>(m, "FibBook")
      .def("__init__", &make_book, "rotation"_a, "rotation_data"_a, "codewords"_a)
      .def_prop_ro("rotation", [](const Book& b) { return (kv_u32)b.rotation; })
      .def_prop_ro("rotation_data", &rotation_data, nb::rv_policy::reference_internal)
      .def_prop_ro("codewords", &codewords, nb::rv_policy::reference_internal)
      .def_prop_ro("d", [](const Book& b) { return b.d; })
      .def_prop_ro("k", [](const Book& b) { return b.codewords.k(); })
      .def_prop_ro("n_codewords", [](const Book& b) { return b.codewords.n(); })
      .def_prop_ro("index_bits", [](const Book& b) { return b.index_bits; })
      .def_prop_ro("index_bytes", [](const Book& b) { return b.index_bytes; });
  m.attr("FIB_STREAM_BYTES") = sizeof(fib::Stream);
  m.def("fib_encode", &fib_encode, "book"_a, "x"_a, "mean"_a.none(), "scale"_a.none(), "keep"_a, "n_threads"_a,
        "level"_a = -1);
  m.def("fib_decode", &fib_decode, "book"_a, "norms"_a, "indices"_a, "n_threads"_a = 1, "level"_a = -1);
  m.def("fib_nearest", &fib_nearest, "book"_a, "points"_a, "level"_a = -1);
  m.def("fib_check_payload", &fib_check_payload, "payload"_a, "n_vectors"_a, "index_bytes"_a, "head_dim"_a);
  m.def("check_fib_blocks", &check_fib_blocks, "books"_a, "blocks"_a, "streams"_a, "order"_a, "channels"_a,
        "payload_bytes"_a, "output_shapes"_a, "rope_shapes"_a);
  m.def("run_fib_blocks", &run_fib_blocks, "books"_a, "blocks"_a, "streams"_a, "order"_a, "channels"_a, "payloads"_a,
        "outputs"_a, "types"_a, "ropes"_a, "n_threads"_a, "level"_a);
}

}  // namespace kv::bindings
