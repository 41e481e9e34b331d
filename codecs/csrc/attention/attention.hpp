// Attention over stored rows in one pass, however many there are: tiles of them are decoded into a few kilobytes, and
// each query row keeps the running maximum of its scores, the sum of its weights and the sum of weighted V rows.
#pragma once

#include <memory>
#include <vector>

#include "../aligned.hpp"
#include "../ggml/decode.hpp"
#include "kernel.hpp"

namespace kv::attention {

// Successive rows of K or V: blocks of a scheme, or floats.
struct Operand {
  ggml::Decode decode = nullptr;  // null: floats
  ggml::Format format{};
  const kv_u8* blocks = nullptr;  // row after row, of all heads
  kv_u64 row_bytes = 0;
  const float* values = nullptr;  // [heads][rows][channels]; strides in elements, that of channels is 1
  kv_i64 head_stride = 0, row_stride = 0;
};

// Frequencies that K is rotated with on the way; none: as it is.
struct Rotation {
  const float* inv_freq = nullptr;
  kv_u32 n_pairs = 0;
  float scaling = 1;
};

class Attention {
 public:
  struct Geometry {
    kv_u32 heads;  // of K and V
    kv_u32 rows;   // query rows of each of them
    kv_u32 k_dim, v_dim;
    double scale;
  };

  // q: [heads][rows][k_dim]. order: the tensor channel of each coded one, which rows of blocks are in; null: the same.
  // ranges: what each query row sees.
  Attention(const Geometry& geometry, const float* q, const kv_i32* order, const Range* ranges, int level);

  const Geometry& geometry() const { return geometry_; }
  int level() const { return level_; }

  // Goes on with successive rows. The result depends on the number of threads by rounding alone. False: out of memory,
  // and the object is of no use any more.
  bool add(const Operand& k, const Operand& v, kv_u64 n_rows, kv_i64 first_position, const Rotation& rotation,
           unsigned n_threads);

  // [heads][rows][v_dim]; zeros for query rows that saw nothing.
  void result(float* out) const;

 private:
  // Query rows in the channel order of some source of K.
  struct Queries {
    Aligned<float> as_given, scaled, largest;
  };
  // What one thread has seen. Sums go up by tiles, and now and then to those of all: long sums of small numbers would
  // lose what is added.
  struct Worker {
    Aligned<float> k, v, row, cos, sin, scores, rest, scale, largest;
    Aligned<float> max, sum, out;
    Aligned<float> all_max, all_out;
    Aligned<double> all_sum;
    kv_u64 n_tiles = 0, n_folds = 0;
  };
  struct Rows {
    const Operand& k;
    const Operand& v;
    const Rotation& rotation;
    kv_i64 first_position;
    kv_u32 bundle;  // heads that are decoded together: whole blocks of both
    kv_u32 tile;
  };

  void make_panels();
  void make_queries(Queries& queries, const float* q, const kv_i32* order) const;
  void prepare(Worker& worker, const Rows& rows) const;
  void run(Worker& worker, const Rows& rows, kv_u64 begin, kv_u64 end) const;
  bool seen(kv_i64 first, kv_i64 last) const;
  void fold(Worker& worker) const;

  Geometry geometry_;
  int level_;
  const Kernel* kernel_;
  Shape shape_;
  kv_u64 slots_;  // query rows of a head, padded
  std::vector<Panel> panels_;
  std::vector<Range> ranges_;
  Queries tensor_order_, coded_order_;
  bool reordered_;
  std::vector<std::unique_ptr<Worker>> workers_;
};

}  // namespace kv::attention
