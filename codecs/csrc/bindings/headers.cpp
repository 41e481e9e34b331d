// Varints of stream headers and files.
#include "python.hpp"

namespace kv::bindings {

namespace {

nb::tuple read_zigzags(nb::handle data, kv_u64 offset, kv_u64 count) {
  Buffer buffer(data);
  Cursor cursor{buffer.bytes(), buffer.size(), offset, "stream header"};
  if (count > buffer.size()) throw Fault{"Truncated", "stream header: fewer bytes than channels"};
  kv_i64* values;
  auto array = new_array<kv_i64>({count}, &values);
  for (kv_u64 i = 0; i < count; ++i) values[i] = cursor.zigzag();
  return nb::make_tuple(array, cursor.offset);
}

nb::bytes write_zigzags(const Array1<kv_i64>& values) {
  std::vector<kv_u8> out;
  for (size_t i = 0; i < values.shape(0); ++i) {
    const kv_i64 v = values.data()[i];
    append_varint(out, ((kv_u64)v << 1) ^ (kv_u64)(v >> 63));
  }
  return to_bytes(out);
}

// The per-channel part of a `.tkv` header: mean, class and AR coefficient, interleaved. FORMAT.md section 6.
nb::tuple read_tkv_channels(nb::handle data, kv_u64 offset, kv_u64 count, bool ar) {
  Buffer buffer(data);
  Cursor cursor{buffer.bytes(), buffer.size(), offset, "TKV1 header"};
  if (count > buffer.size()) throw Fault{"Truncated", "TKV1 header: fewer bytes than channels"};
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
  Cursor cursor{buffer.bytes(), buffer.size(), offset, "lane entries"};
  if (count > buffer.size()) throw Fault{"Truncated", "lane entries: fewer bytes than lanes"};
  kv_u64* rows;
  auto array = new_array<kv_u64>({count, 2}, &rows);
  for (kv_u64 i = 0; i < count; ++i) {
    const kv_u64 n = cursor.varint();
    if (n > cursor.size - cursor.offset)
      throw Fault{"Truncated", "lane entry " + std::to_string(i) + ": " + std::to_string(n) + " bytes, " +
                                   std::to_string(cursor.size - cursor.offset) + " left"};
    rows[2 * i] = cursor.offset;
    rows[2 * i + 1] = n;
    cursor.offset += n;
  }
  return nb::make_tuple(array, cursor.offset);
}

}  // namespace

void bind_headers(nb::module_& m) {
  m.def("read_zigzags", &read_zigzags, "data"_a, "offset"_a, "count"_a);
  m.def("write_zigzags", &write_zigzags, "values"_a);
  m.def("read_tkv_channels", &read_tkv_channels, "data"_a, "offset"_a, "count"_a, "ar"_a);
  m.def("scan_entries", &scan_entries, "data"_a, "offset"_a, "count"_a);
}

}  // namespace kv::bindings
