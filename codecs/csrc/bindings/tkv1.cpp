// TKV1: block encoder, stream layout, lanes of plans.
#include "../encoder.hpp"
#include "../executor.hpp"
#include "../stream_layout.hpp"
#include "encoders.hpp"
#include "plan.hpp"

namespace kv::bindings {

namespace {

// Within these limits no model ever reaches a probability that the coder cannot take (lane.hpp).
void check_prior(const Array1<kv_u32>& prior) {
  if (prior.shape(0) != kPriorWords) invalid("prior table: 7056 words expected");
  bool fine = true;
  for (size_t i = 0; i < kPriorWords; ++i) {
    const kv_u32 fast = prior.data()[i] & 0xFFFF, slow = prior.data()[i] >> 16;
    fine &= fast >= 64 && fast <= 65472 && slow >= 64 && slow <= 65472;
  }
  if (!fine) invalid("prior table: a model outside [64, 65472]");
}

std::unique_ptr<Locked<BlockEncoder>> new_block_encoder(const Array1<kv_u32>& prior, kv_u32 heads, kv_u32 head_dim, kv_u32 width,
                                   float unit, kv_u64 sink, kv_u32 sink_div, kv_u64 first_token,
                                   const Array1<kv_i32>& mean, const Array1<kv_u8>& rho, const Array1<kv_u8>& cls) {
  check_prior(prior);
  if (heads == 0 || head_dim == 0 || width == 0 || width % 2 || head_dim % width) invalid("lane width");
  if (sink_div == 0 || sink_div >= 1u << 24) invalid("sink_div: 1 to 2^24 - 1");
  if (!(unit > 0) || !std::isfinite(unit)) invalid("unit: positive and finite");
  const size_t n = (size_t)heads * head_dim;
  if (n > kMaxChannels || mean.shape(0) != n) invalid("statistics: one entry per channel expected");
  check_channels(n, rho, cls, kClasses);
  for (size_t i = 0; i < n; ++i)
    if (std::abs((kv_i64)mean.data()[i]) >= kValueLimit) invalid("mean out of range");
  const BlockEncoder::Geometry geometry{heads, head_dim, width, (double)unit, sink, sink_div, first_token};
  return locked(BlockEncoder(geometry, mean.data(), rho.data(), cls.data(), prior.data()));
}

StreamParams stream_params(const Array1<kv_u32>& prior, kv_u32 heads, kv_u32 head_dim, double step, kv_u64 sink,
                               kv_u32 sink_div, const Array1<kv_i64>& mean, const Array1<kv_u8>& rho,
                               const Array1<kv_u8>& cls) {
  check_prior(prior);
  const size_t n = (size_t)heads * head_dim;
  if (n == 0 || n > kMaxChannels || mean.shape(0) != n) invalid("statistics: one entry per channel expected");
  check_channels(n, rho, cls, kClasses);
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
    ok = encode_stream_block(p, prior.data(), y.data(), y.shape(1), first_token, y.shape(1), out);
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
  Status status;
  {
    nb::gil_scoped_release release;
    status = decode_stream_block(p, prior.data(), buffer.bytes(), buffer.size(), first_token, n_tokens, n_tokens, y);
  }
  if (status != kOk) throw Fault{"Corrupt", "block at token " + std::to_string(first_token) +
                                                    ": a residual of 2^24 or more"};
  return array;
}

void rotate(nb::ndarray<double, nb::numpy, nb::ndim<3>, nb::c_contig, nb::device::cpu> y, double theta,
            kv_u64 first_token, double sign) {
  nb::gil_scoped_release release;
  rotate_theta(y.data(), (kv_u32)y.shape(0), y.shape(1), (kv_u32)y.shape(2), theta, first_token, sign);
}

// The tables that refer to nothing else of the plan. lanes: bytes of LANE_DTYPE rows, channels: of CHANNEL_DTYPE rows.
PlanTables lane_tables(const Array1<kv_u32>& prior, const Buffer& lanes, const Buffer& channels,
                       const Array1<kv_u8>& classes) {
  check_prior(prior);
  PlanTables tables{};
  std::tie(tables.lanes, tables.n_lanes) = rows_of<Lane>(lanes);
  std::tie(tables.channels, tables.n_channels) = rows_of<Channel>(channels);
  tables.classes = classes.data();
  tables.n_classes = classes.shape(0);
  tables.prior = prior.data();
  return tables;
}

void check(const PlanTables& tables) {
  for (kv_u64 i = 0; i < tables.n_lanes; ++i)
    if (const char* fault = lane_fault(tables, tables.lanes[i]))
      invalid("plan: lane " + std::to_string(i) + ": " + fault + " out of range");
}

void check_lanes(const Array1<kv_u32>& prior, nb::handle lane_rows, nb::handle channel_rows,
                 const Array1<kv_u8>& classes, const Array1<kv_u64>& payload_bytes,
                 const Array2<kv_u64>& output_shapes, const Array2<kv_u64>& rope_shapes) {
  Buffer lanes(lane_rows), channels(channel_rows);
  PlanTables tables = lane_tables(prior, lanes, channels, classes);
  size(tables, payload_bytes, output_shapes, rope_shapes);
  check(tables);
}

// Returns one status a lane.
Result<kv_u8> run_lanes(const Array1<kv_u32>& prior, nb::handle lane_rows, nb::handle channel_rows,
                        const Array1<kv_u8>& classes, nb::sequence payloads, nb::sequence outputs, nb::sequence types,
                        nb::sequence ropes, unsigned n_threads, bool wide) {
  Buffer lanes(lane_rows), channels(channel_rows);
  PlanTables tables = lane_tables(prior, lanes, channels, classes);
  PlanObjects objects;
  objects.hold(tables, payloads, outputs, types, ropes);
  check(tables);
  kv_u8* status;
  auto result = new_array<kv_u8>({(size_t)tables.n_lanes}, &status);
  bool ok;
  {
    nb::gil_scoped_release release;
    ok = run_plan(tables, status, n_threads, wide && avx512_supported());
  }
  if (!ok) throw std::bad_alloc();
  return result;
}

}  // namespace

void bind_tkv1(nb::module_& m) {
  m.attr("LANE_BYTES") = sizeof(Lane);
  m.attr("CHANNEL_BYTES") = sizeof(Channel);
  m.attr("WIDE") = avx512_supported();
  bind_encoder<BlockEncoder>(m, "BlockEncoder");
  m.def("block_encoder", &new_block_encoder, "prior"_a, "heads"_a, "head_dim"_a, "width"_a, "unit"_a, "sink"_a,
        "sink_div"_a, "first_token"_a, "mean"_a, "rho"_a, "cls"_a);
  m.def("stream_encode", &stream_encode, "prior"_a, "step"_a, "sink"_a, "sink_div"_a, "mean"_a, "rho"_a, "cls"_a,
        "first_token"_a, "y"_a);
  m.def("stream_decode", &stream_decode, "prior"_a, "heads"_a, "head_dim"_a, "step"_a, "sink"_a, "sink_div"_a,
        "mean"_a, "rho"_a, "cls"_a, "first_token"_a, "n_tokens"_a, "data"_a);
  m.def("rotate", &rotate, "y"_a, "theta"_a, "first_token"_a, "sign"_a);
  m.def("check_lanes", &check_lanes, "prior"_a, "lanes"_a, "channels"_a, "classes"_a, "payload_bytes"_a,
        "output_shapes"_a, "rope_shapes"_a);
  m.def("run_lanes", &run_lanes, "prior"_a, "lanes"_a, "channels"_a, "classes"_a, "payloads"_a, "outputs"_a, "types"_a,
        "ropes"_a, "n_threads"_a, "wide"_a = true);
}

}  // namespace kv::bindings
