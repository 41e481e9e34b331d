#include "attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "../threads.hpp"

namespace kv::attention {

namespace {

constexpr double kLog2e = 1.4426950408889634074;
constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr kv_u64 kTileFloats = 16384;   // of K or V, where the rows of a tile can be as few
constexpr kv_u64 kTilesUntilFold = 64;
constexpr double kWorkOfThread = 4e6;   // multiplications; for fewer, starting a thread does not pay

// Heads whose channels are whole blocks.
kv_u32 bundle_of(const Operand& x, kv_u32 dim) {
  return x.decode == nullptr ? 1 : x.format.values / std::gcd(x.format.values, dim);
}

// Rows of some heads as floats.
struct Loaded {
  const float* data;
  kv_i64 head_stride;
  kv_u64 row_stride;
};

// Rows [first, first + n) of `bundle` heads from `head` on: where they are, or in `out`. `row` is room for one.
Loaded load(const Operand& x, kv_u32 dim, kv_u32 head, kv_u32 bundle, kv_u64 first, kv_u32 n, bool in_place, float* out,
            float* row) {
  const kv_u64 stride = padded(dim), row_stride = stride * bundle;
  if (x.decode == nullptr) {
    const float* from = x.values + (kv_i64)head * x.head_stride + (kv_i64)first * x.row_stride;
    if (in_place && stride == dim && x.row_stride >= 0)
      return {from, x.head_stride, (kv_u64)x.row_stride};
    for (kv_u32 t = 0; t < n; ++t)
      for (kv_u32 h = 0; h < bundle; ++h)
        std::memcpy(out + t * row_stride + h * stride, from + (kv_i64)h * x.head_stride + (kv_i64)t * x.row_stride,
                    dim * sizeof(float));
    return {out, (kv_i64)stride, row_stride};
  }
  const kv_u64 n_blocks = (kv_u64)bundle * dim / x.format.values;
  const kv_u8* from = x.blocks + first * x.row_bytes + (kv_u64)head * dim / x.format.values * x.format.bytes;
  for (kv_u32 t = 0; t < n; ++t, from += x.row_bytes) {
    float* const to = out + t * row_stride;
    if (stride == dim) {
      x.decode(from, n_blocks, to);
      continue;
    }
    x.decode(from, n_blocks, row);
    for (kv_u32 h = 0; h < bundle; ++h) std::memcpy(to + h * stride, row + (kv_u64)h * dim, dim * sizeof(float));
  }
  return {out, (kv_i64)stride, row_stride};
}

}  // namespace

Attention::Attention(const Geometry& geometry, const float* q, const kv_i32* order, const Range* ranges, int level)
    : geometry_(geometry), level_(level), kernel_(&kernel_of(level)), slots_(padded(geometry.rows)),
      ranges_(ranges, ranges + geometry.rows), reordered_(order != nullptr) {
  make_panels();
  shape_ = {geometry.k_dim, geometry.v_dim, padded(geometry.k_dim), padded(geometry.v_dim), panels_.data(),
            (kv_u32)panels_.size(), ranges_.data(), geometry.scale * kLog2e};
  make_queries(tensor_order_, q, nullptr);
  if (reordered_) make_queries(coded_order_, q, order);
}

void Attention::make_panels() {
  const kv_u32 lanes = kernel_->lanes;
  for (kv_u32 at = 0; at < geometry_.rows;) {
    const kv_u32 left = geometry_.rows - at;
    kv_u32 width = 0;
    if (left >= 2 * lanes)
      width = 2 * lanes;
    else if (left > lanes / 2)
      width = lanes;
    const kv_u32 n = width ? std::min(width, left) : left;
    panels_.push_back({at, n, width});
    at += n;
  }
}

void Attention::make_queries(Queries& queries, const float* q, const kv_i32* order) const {
  const kv_u64 stride = shape_.k_stride, n_heads = geometry_.heads;
  queries.as_given.assign(n_heads * geometry_.rows * stride, 0.0f);
  queries.scaled.assign(n_heads * slots_ * stride, 0.0f);
  queries.largest.assign(n_heads * panels_.size() * stride, 0.0f);
  for (kv_u64 h = 0; h < n_heads; ++h)
    for (std::size_t p = 0; p < panels_.size(); ++p) {
      const Panel& panel = panels_[p];
      float* const scaled = queries.scaled.data() + (h * slots_ + panel.first) * stride;
      float* const largest = queries.largest.data() + (h * panels_.size() + p) * stride;
      for (kv_u32 r = 0; r < panel.n; ++r) {
        const kv_u64 row = h * geometry_.rows + panel.first + r;
        const float* const from = q + row * geometry_.k_dim;
        for (kv_u32 d = 0; d < geometry_.k_dim; ++d) {
          const float value = from[order == nullptr ? d : (kv_u32)order[d]];
          const float product = (float)((double)value * shape_.factor);
          queries.as_given[row * stride + d] = value;
          scaled[panel.width ? (kv_u64)d * panel.width + r : r * stride + d] = product;
          largest[d] = std::max(largest[d], std::fabs(product));
        }
      }
    }
}

// Memory that lasts, and is only ever written by its owner.
void Attention::prepare(Worker& w, const Rows& rows) const {
  const kv_u64 heads = geometry_.heads;
  if (w.max.data() == nullptr) {
    w.scores.assign(kTileRows * kMaxWidth, 0.0f);
    w.rest.assign(kTileRows * kMaxWidth, 0.0f);
    w.scale.assign(kMaxWidth, 0.0f);
    w.largest.assign(shape_.k_stride, 0.0f);
    w.sum.assign(heads * slots_, 0.0f);
    w.out.assign(heads * geometry_.rows * shape_.v_stride, 0.0f);
    w.all_max.assign(heads * slots_, kNothing);
    w.all_sum.assign(heads * slots_, 0.0);
    w.all_out.assign(heads * geometry_.rows * shape_.v_stride, 0.0f);
    w.max.assign(heads * slots_, kNothing);
  }
  // What lies behind the channels of a row stays zero: of K, it counts.
  w.k.assign((kv_u64)kTileRows * rows.bundle * shape_.k_stride, 0.0f);
  w.v.assign((kv_u64)rows.tile * rows.bundle * shape_.v_stride, 0.0f);
  w.row.resize((kv_u64)rows.bundle * std::max(geometry_.k_dim, geometry_.v_dim));
  w.cos.resize((kv_u64)rows.tile * rows.rotation.n_pairs);
  w.sin.resize((kv_u64)rows.tile * rows.rotation.n_pairs);
}

bool Attention::add(const Operand& k, const Operand& v, kv_u64 n_rows, kv_i64 first_position, const Rotation& rotation,
                    unsigned n_threads) {
  if (n_rows == 0 || geometry_.rows == 0) return true;
  const kv_u32 bundle = std::lcm(bundle_of(k, geometry_.k_dim), bundle_of(v, geometry_.v_dim));
  kv_u32 tile = kTileRows;
  while (tile > kRowStep && (kv_u64)tile * bundle * std::max(shape_.k_stride, shape_.v_stride) > kTileFloats) tile /= 2;
  const Rows rows{k, v, rotation, first_position, bundle, tile};
  const double work = (double)n_rows * geometry_.heads * (geometry_.k_dim + geometry_.v_dim) * (geometry_.rows + 4.0);
  const kv_u64 most = std::min<kv_u64>((n_rows + tile - 1) / tile, (kv_u64)(work / kWorkOfThread) + 1);
  const kv_u64 n_pieces = std::max<kv_u64>(std::min<kv_u64>(n_threads, most), 1);
  struct Nothing {};
  try {
    while (workers_.size() < n_pieces) workers_.push_back(std::make_unique<Worker>());
    const kv_u64 n_tiles = (n_rows + tile - 1) / tile;
    return run_pieces<Nothing>(n_pieces, (unsigned)n_pieces, [&](std::size_t i, Nothing&) {
      Worker& worker = *workers_[i];
      prepare(worker, rows);
      run(worker, rows, n_tiles * i / n_pieces * tile, std::min(n_tiles * (i + 1) / n_pieces * tile, n_rows));
    });
  } catch (const std::bad_alloc&) {
    return false;
  }
}

bool Attention::seen(kv_i64 first, kv_i64 last) const {
  for (const Range& range : ranges_)
    if (range.first <= last && range.last >= first) return true;
  return false;
}

void Attention::run(Worker& w, const Rows& rows, kv_u64 begin, kv_u64 end) const {
  const kv_u32 n_pairs = rows.rotation.n_pairs, half = geometry_.k_dim / 2;
  const Queries& queries = reordered_ && rows.k.decode != nullptr ? coded_order_ : tensor_order_;
  const Scratch scratch{w.scores.data(), w.rest.data(), w.scale.data(), w.largest.data()};
  const kv_u64 q_stride = shape_.k_stride;
  for (kv_u64 at = begin; at < end; at += rows.tile) {
    const kv_u32 n = (kv_u32)std::min<kv_u64>(rows.tile, end - at);
    const kv_i64 position = rows.first_position + (kv_i64)at;
    if (!seen(position, position + n - 1)) continue;
    if (n_pairs > 0)
      kernel_->angles(rows.rotation.inv_freq, n_pairs, rows.rotation.scaling, position, n, w.cos.data(), w.sin.data());
    for (kv_u32 first = 0; first < geometry_.heads; first += rows.bundle) {
      // Reads of K go on to a multiple of some rows.
      const bool in_place = n % kRowStep == 0 && n_pairs == 0;
      const Loaded k =
          load(rows.k, geometry_.k_dim, first, rows.bundle, at, n, in_place, w.k.data(), w.row.data());
      const Loaded v = load(rows.v, geometry_.v_dim, first, rows.bundle, at, n, true, w.v.data(), w.row.data());
      for (kv_u32 i = 0; i < rows.bundle; ++i) {
        const kv_u64 h = first + i;
        const Tile tile{k.data + (kv_i64)i * k.head_stride, v.data + (kv_i64)i * v.head_stride,
                        k.row_stride, v.row_stride, n, position};
        if (n_pairs > 0)
          kernel_->rotate(w.k.data() + i * shape_.k_stride, k.row_stride, n, half, n_pairs, w.cos.data(), w.sin.data());
        kernel_->attend(shape_,
                        {queries.as_given.data() + h * geometry_.rows * q_stride,
                         queries.scaled.data() + h * slots_ * q_stride,
                         queries.largest.data() + h * panels_.size() * q_stride},
                        {w.max.data() + h * slots_, w.sum.data() + h * slots_,
                         w.out.data() + h * geometry_.rows * shape_.v_stride},
                        tile, scratch);
      }
    }
    if (++w.n_tiles >= kTilesUntilFold + w.n_folds) fold(w);
  }
}

// The sums of the last tiles go to those of all. The more there were, the more tiles at a time.
void Attention::fold(Worker& w) const {
  for (kv_u64 h = 0; h < geometry_.heads; ++h)
    for (kv_u64 r = 0; r < geometry_.rows; ++r) {
      const kv_u64 slot = h * slots_ + r;
      if (w.max[slot] == kNothing) continue;
      const float scale = w.all_max[slot] == kNothing ? 0.0f : std::exp2(w.all_max[slot] - w.max[slot]);
      w.all_max[slot] = w.max[slot];
      w.all_sum[slot] = w.all_sum[slot] * scale + w.sum[slot];
      w.sum[slot] = 0;
      float* const all = w.all_out.data() + (h * geometry_.rows + r) * shape_.v_stride;
      float* const out = w.out.data() + (h * geometry_.rows + r) * shape_.v_stride;
      for (kv_u32 c = 0; c < geometry_.v_dim; ++c) {
        all[c] = all[c] * scale + out[c];
        out[c] = 0;
      }
    }
  w.n_tiles = 0;
  ++w.n_folds;
}

void Attention::result(float* out) const {
  std::vector<double> sums(geometry_.v_dim);
  for (kv_u64 h = 0; h < geometry_.heads; ++h)
    for (kv_u64 r = 0; r < geometry_.rows; ++r, out += geometry_.v_dim) {
      const kv_u64 slot = h * slots_ + r, at = (h * geometry_.rows + r) * shape_.v_stride;
      float most = kNothing;
      for (const auto& w : workers_)
        if (w->max.data() != nullptr && !(w->max[slot] <= most)) most = w->max[slot];
      double total = 0;
      std::fill(sums.begin(), sums.end(), 0.0);
      for (const auto& w : workers_) {
        if (w->max.data() == nullptr) continue;
        // Nothing seen: no weight. What is not a number stays so.
        const double now = w->max[slot] == kNothing ? 0.0 : std::exp2((double)w->max[slot] - most);
        const double before = w->all_max[slot] == kNothing ? 0.0 : std::exp2((double)w->all_max[slot] - most);
        total += now * w->sum[slot] + before * w->all_sum[slot];
        for (kv_u32 c = 0; c < geometry_.v_dim; ++c) sums[c] += now * w->out[at + c] + before * w->all_out[at + c];
      }
      for (kv_u32 c = 0; c < geometry_.v_dim; ++c) out[c] = total == 0 ? 0.0f : (float)(sums[c] / total);
    }
}

}  // namespace kv::attention
