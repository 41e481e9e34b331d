#include "tables.hpp"

namespace kv::ggml {

namespace {

// The bytes of kvcodecs/ggml/grids.bin; CMakeLists.txt makes the list.
constexpr kv_u8 kPacked[] = {
#include "grids.inc"
};

struct Unpacker {
  kv_u32 next = 0;

  template <class T, kv_u32 kEntries, kv_u32 kWidth>
  constexpr void fill(T (&grid)[kEntries][kWidth], kv_u32 bits, const int* levels) {
    const kv_u32 per_byte = 8 / bits;
    for (kv_u32 i = 0; i < kEntries * kWidth; ++i) {
      const kv_u32 code = kPacked[next + i / per_byte] >> i % per_byte * bits & ((1u << bits) - 1);
      grid[i / kWidth][i % kWidth] = (T)levels[code];
    }
    next += kEntries * kWidth / per_byte;
  }
};

constexpr Tables unpack() {
  // A code above the last level, which the file does not have, does not compile.
  constexpr int iq2[] = {8, 25, 43}, iq1[] = {-1, 0, 1};
  constexpr int iq3_xxs[] = {4, 12, 20, 28, 36, 44, 52, 62}, iq3_s[] = {1, 3, 5, 7, 9, 11, 13, 15};
  Tables tables{};
  Unpacker unpacker;
  unpacker.fill(tables.iq2_xxs, 2, iq2);
  unpacker.fill(tables.iq2_xs, 2, iq2);
  unpacker.fill(tables.iq2_s, 2, iq2);
  unpacker.fill(tables.iq1, 2, iq1);
  unpacker.fill(tables.iq3_xxs, 4, iq3_xxs);
  unpacker.fill(tables.iq3_s, 4, iq3_s);
  for (kv_u32 i = 0; i < 128; ++i) {
    kv_u32 ones = 0;
    for (kv_u32 bit = 0; bit < 7; ++bit) ones += i >> bit & 1;
    tables.signs[i] = (kv_u8)(i | (ones & 1) << 7);
  }
  return tables;
}

static_assert(sizeof kPacked == 9216, "grids.bin");

}  // namespace

extern constexpr Tables kTables = unpack();

}  // namespace kv::ggml
