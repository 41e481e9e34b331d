// KVR1: frequency tables, block encoder, blocks of plans.
#include "../kvr1/encoder.hpp"
#include "../kvr1/executor.hpp"
#include "encoders.hpp"
#include "plan.hpp"

namespace kv::bindings {

namespace {

void build_tables(kvr1::Tables* tables, const Array2<kv_u16>& frequencies) {
  if (frequencies.shape(0) != kvr1::kTables || frequencies.shape(1) != kvr1::kSymbols)
    invalid("frequency tables: 36 rows of 64 expected");
  new (tables) kvr1::Tables;
  if (!tables->build(frequencies.data()))
    invalid("frequency tables: rows of sum 2048 with an escape and no symbol alone expected");
}

Result<kv_u32> slots_of(const kvr1::Tables& tables) {
  kv_u32* slots;
  auto result = new_array<kv_u32>({kvr1::kTables, kvr1::kSlots}, &slots);
  std::copy_n(tables.slots, kvr1::kTables * kvr1::kSlots, slots);
  return result;
}

Result<kv_u32> compact_of(const kvr1::Tables& tables) {
  kv_u32* words;
  auto result = new_array<kv_u32>({kvr1::kCompactWords}, &words);
  tables.compact(words);
  return result;
}

std::unique_ptr<Locked<kvr1::BlockEncoder>> kvr1_encoder(const kvr1::Tables& tables, kv_u32 heads, kv_u32 head_dim, float unit,
                                    kv_u64 sink, kv_u32 sink_div, kv_u32 sink_classes, kv_u64 first_token,
                                    const Array1<kv_i32>& mean, const Array1<kv_u8>& rho, const Array1<kv_u8>& cls,
                                    bool wide) {
  if (heads == 0 || head_dim == 0) invalid("no channels");
  if (sink_div == 0 || sink_div > kvr1::kMaxSinkDiv) invalid("sink_div: 1 to 512");
  if (sink_classes >= kvr1::kSpreadClasses) invalid("sink_classes");
  if (!(unit > 0) || !std::isfinite(unit)) invalid("unit: positive and finite");
  const size_t n = (size_t)heads * head_dim;
  if (n > kMaxChannels || mean.shape(0) != n) invalid("statistics: one entry per channel expected");
  check_channels(n, rho, cls, kvr1::kSpreadClasses);
  for (size_t i = 0; i < n; ++i)
    if (std::abs((kv_i64)mean.data()[i]) >= kValueLimit) invalid("mean out of range");
  const kvr1::BlockEncoder::Geometry geometry{heads, head_dim, (double)unit, sink, sink_div, sink_classes,
                                                  first_token, wide && avx512_supported()};
  return locked(kvr1::BlockEncoder(geometry, mean.data(), rho.data(), cls.data(), tables));
}

// The tables that refer to nothing else of the plan. blocks: bytes of BLOCK_DTYPE rows, streams: of STREAM_DTYPE rows.
kvr1::PlanTables block_tables(const Buffer& blocks, const Buffer& streams, const Array1<kv_i32>& mean,
                              const Array1<kv_u8>& rho, const Array1<kv_u8>& classes, const Array1<kv_u32>& order) {
  if (rho.shape(0) != mean.shape(0) || classes.shape(0) != mean.shape(0)) invalid("plan: components differ in number");
  kvr1::PlanTables tables{};
  std::tie(tables.blocks, tables.n_blocks) = rows_of<kvr1::Block>(blocks);
  std::tie(tables.streams, tables.n_streams) = rows_of<kvr1::Stream>(streams);
  tables.mean = mean.data();
  tables.rho = rho.data();
  tables.classes = classes.data();
  tables.n_components = mean.shape(0);
  tables.order = order.data();
  tables.n_order = order.shape(0);
  return tables;
}

void check(const kvr1::PlanTables& tables) {
  for (kv_u64 i = 0; i < tables.n_blocks; ++i)
    if (const char* fault = kvr1::block_fault(tables, tables.blocks[i]))
      invalid("plan: block " + std::to_string(i) + ": " + fault + " out of range");
}

// For the kernels, which count the words of a payload in 32 bits.
constexpr kv_u64 kMaxDeviceBytes = 1ull << 32;

void check_blocks(nb::handle block_rows, nb::handle stream_rows, const Array1<kv_i32>& mean, const Array1<kv_u8>& rho,
                  const Array1<kv_u8>& classes, const Array1<kv_u32>& order, const Array1<kv_u64>& payload_bytes,
                  const Array2<kv_u64>& output_shapes, const Array2<kv_u64>& rope_shapes) {
  Buffer blocks(block_rows), streams(stream_rows);
  kvr1::PlanTables tables = block_tables(blocks, streams, mean, rho, classes, order);
  size(tables, payload_bytes, output_shapes, rope_shapes);
  check(tables);
  for (kv_u64 i = 0; i < tables.n_blocks; ++i)
    if (tables.payloads[tables.blocks[i].payload].n_bytes > kMaxDeviceBytes)
      invalid("plan: block " + std::to_string(i) + ": payload of more than 4 GiB, which devices do not decode");
}

// Returns one status a block.
Result<kv_u8> run_blocks(const kvr1::Tables& rans, nb::handle block_rows, nb::handle stream_rows,
                         const Array1<kv_i32>& mean, const Array1<kv_u8>& rho, const Array1<kv_u8>& classes,
                         const Array1<kv_u32>& order, nb::sequence payloads, nb::sequence outputs, nb::sequence types,
                         nb::sequence ropes, unsigned n_threads, int level) {
  if (!level_supported(level)) invalid("this CPU lacks the instruction set asked for");
  Buffer blocks(block_rows), streams(stream_rows);
  kvr1::PlanTables tables = block_tables(blocks, streams, mean, rho, classes, order);
  tables.tables = &rans;
  PlanObjects objects;
  objects.hold(tables, payloads, outputs, types, ropes);
  check(tables);
  kv_u8* status;
  auto result = new_array<kv_u8>({(size_t)tables.n_blocks}, &status);
  bool ok;
  {
    nb::gil_scoped_release release;
    ok = kvr1::run_blocks(tables, status, n_threads, level);
  }
  if (!ok) throw std::bad_alloc();
  return result;
}

}  // namespace

void bind_kvr1(nb::module_& m) {
  m.attr("BLOCK_BYTES") = sizeof(kvr1::Block);
  m.attr("STREAM_BYTES") = sizeof(kvr1::Stream);
  nb::class_<kvr1::Tables>(m, "RansTables")
      .def("__init__", &build_tables, "frequencies"_a)
      .def_prop_ro("slots", &slots_of, nb::rv_policy::automatic)
      .def_prop_ro("compact", &compact_of, nb::rv_policy::automatic);
  bind_encoder<kvr1::BlockEncoder>(m, "KVR1Encoder");
  // The encoder refers to the tables.
  m.def("kvr1_encoder", &kvr1_encoder, nb::keep_alive<0, 1>(), "tables"_a, "heads"_a, "head_dim"_a, "unit"_a, "sink"_a,
        "sink_div"_a, "sink_classes"_a, "first_token"_a, "mean"_a, "rho"_a, "cls"_a, "wide"_a = true);
  m.def("level_supported", &level_supported, "level"_a);
  m.def("check_blocks", &check_blocks, "blocks"_a, "streams"_a, "mean"_a, "rho"_a, "classes"_a, "order"_a,
        "payload_bytes"_a, "output_shapes"_a, "rope_shapes"_a);
  m.def("run_blocks", &run_blocks, "tables"_a, "blocks"_a, "streams"_a, "mean"_a, "rho"_a, "classes"_a, "order"_a,
        "payloads"_a, "outputs"_a, "types"_a, "ropes"_a, "n_threads"_a, "level"_a);
}

}  // namespace kv::bindings
