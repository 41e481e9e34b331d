// Stream statistics.
#include "../statistics.hpp"
#include "python.hpp"

namespace kv::bindings {

namespace {

template <class T>
void check_chunk(const Statistics& s, const Array3<T>& x) {
  if (x.shape(0) != s.heads() || x.shape(2) != s.head_dim())
    invalid("statistics: [heads][tokens][head_dim] of the stream expected");
}

template <class T>
void add_mean(Statistics& s, const Array3<T>& x) {
  check_chunk(s, x);
  if (s.has_mean()) invalid("statistics: the mean is finished");
  nb::gil_scoped_release release;
  s.add_mean(x.data(), x.shape(1));
}

template <class T>
void add_moments(Statistics& s, const Array3<T>& x) {
  check_chunk(s, x);
  if (!s.has_mean()) invalid("statistics: finish_mean comes first");
  nb::gil_scoped_release release;
  s.add_moments(x.data(), x.shape(1));
}

nb::tuple finish_statistics(const Statistics& s, double step, double mean_unit, bool ar, bool pairs,
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

void bind_statistics(nb::module_& m) {
  nb::class_<Statistics>(m, "Statistics")
      .def("__init__",
           [](Statistics* s, kv_u32 heads, kv_u32 head_dim, kv_u64 left_out) {
             if (heads == 0 || head_dim == 0 || (kv_u64)heads * head_dim > kMaxChannels) invalid("statistics: size");
             new (s) Statistics(heads, head_dim, left_out);
           },
           "heads"_a, "head_dim"_a, "left_out"_a = 0)
      .def("add_mean", &add_mean<float>, "x"_a)
      .def("add_mean", &add_mean<double>, "x"_a)
      .def("finish_mean", &Statistics::finish_mean)
      .def("add_moments", &add_moments<float>, "x"_a)
      .def("add_moments", &add_moments<double>, "x"_a)
      .def("finish", &finish_statistics, "step"_a, "mean_unit"_a, "ar"_a, "pairs"_a,
           "class_of_one"_a = 8, "n_classes"_a = (int)kClasses)
      .def_prop_ro("sum_squares", &Statistics::sum_squares)
      .def_prop_ro("largest", &Statistics::largest)
      .def_prop_ro("n_tokens", &Statistics::n_tokens);
}

}  // namespace kv::bindings
