// Building FibQuant books: random numbers, rotations, nearest codewords of training vectors.
#include "../fibquant/householder.hpp"
#include "../fibquant/random.hpp"
#include "../fibquant/training.hpp"
#include "python.hpp"

namespace kv::bindings {

namespace {

constexpr kv_u64 kMostRows = 4096;
constexpr kv_u64 kMostValues = (kv_u64)1 << 32;
constexpr kv_u64 kSamplesAtOnce = 512;

template <class T, class Draw>
Result<T> draws(kv_u64 n, Draw draw) {
  if (n > kMostValues) invalid("fib_draws: too many");
  T* out;
  auto array = new_array<T>({(size_t)n}, &out);
  nb::gil_scoped_release release;
  for (kv_u64 i = 0; i < n; ++i) out[i] = draw();
  return array;
}

nb::object draw(kv_u64 seed, kv_u64 n, const std::string& what, double shape) {
  fib::Generator random(seed);
  if (what == "bits") return nb::cast(draws<kv_u64>(n, [&] { return random.bits(); }));
  if (what == "normal") return nb::cast(draws<double>(n, [&] { return random.normal(); }));
  if (what == "exponential") return nb::cast(draws<double>(n, [&] { return random.exponential(); }));
  if (what == "gamma" && shape > 0) return nb::cast(draws<double>(n, [&] { return random.gamma(shape); }));
  invalid("fib_draws: bits, normal, exponential or gamma of a positive shape expected");
}

Result<double> training_vectors(kv_u64 seed, kv_u32 d, kv_u32 k, kv_u64 n) {
  if (k == 0 || k >= d || n > kMostValues / k) invalid("fib_training_vectors: sizes");
  double* out;
  auto array = new_array<double>({(size_t)n, k}, &out);
  nb::gil_scoped_release release;
  fib::spherical_beta(seed, d, k, n, out);
  return array;
}

// The columns of Q, each a row of the result.
Result<double> haar_columns(kv_u64 seed, kv_u64 d, unsigned n_threads) {
  if (d == 0 || d > kMostRows) invalid("fib_haar_columns: size");
  double* out;
  auto array = new_array<double>({(size_t)d, (size_t)d}, &out);
  nb::gil_scoped_release release;
  fib::Generator random(seed);
  std::vector<double> a(d * d);
  for (double& value : a) value = random.normal();
  fib::Householder qr(a.data(), d);
  if (!qr.factorise(n_threads) || !qr.form(out, n_threads)) throw std::bad_alloc();
  return array;
}

nb::tuple nearest(const Array2<double>& samples, const Array2<double>& codewords, unsigned n_threads) {
  const kv_u64 n = samples.shape(0), n_codewords = codewords.shape(0);
  const kv_u32 k = (kv_u32)samples.shape(1);
  if (k == 0 || codewords.shape(1) != k || n_codewords == 0 || n_codewords > (kv_u64)1 << 32)
    invalid("fib_nearest_float64: shapes");
  kv_u32* cells;
  double* distances;
  auto cell_array = new_array<kv_u32>({(size_t)n}, &cells);
  auto distance_array = new_array<double>({(size_t)n}, &distances);
  struct NoScratch {};
  {
    nb::gil_scoped_release release;
    const fib::CodewordTree tree(codewords.data(), n_codewords, k);
    const kv_u64 pieces = (n + kSamplesAtOnce - 1) / kSamplesAtOnce;
    const bool done = run_pieces<NoScratch>(pieces, n_threads, [&](std::size_t piece, NoScratch&) {
      const kv_u64 first = piece * kSamplesAtOnce;
      for (kv_u64 i = first; i < std::min(n, first + kSamplesAtOnce); ++i) {
        const fib::Nearest nearest = tree.nearest(samples.data() + i * k);
        cells[i] = (kv_u32)nearest.cell;
        distances[i] = nearest.distance;
      }
    });
    if (!done) throw std::bad_alloc();
  }
  return nb::make_tuple(cell_array, distance_array);
}

}  // namespace

void bind_fibquant_build(nb::module_& m) {
  m.def("fib_draws", &draw, "seed"_a, "n"_a, "what"_a, "shape"_a = 0.0);
  m.def("fib_training_vectors", &training_vectors, "seed"_a, "d"_a, "k"_a, "n"_a);
  m.def("fib_haar_columns", &haar_columns, "seed"_a, "d"_a, "n_threads"_a = 1);
  m.def("fib_nearest_float64", &nearest, "samples"_a, "codewords"_a, "n_threads"_a = 1);
}

}  // namespace kv::bindings
