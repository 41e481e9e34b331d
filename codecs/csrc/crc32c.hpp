// CRC-32C (Castagnoli, reflected polynomial 0x82F63B78), the checksum of frames and records.
//
// The crc32 instruction takes three cycles and one can start in each: three runs of bytes side by side keep it busy.
// Their remainders are joined by moving one past the bytes of the next, a product modulo the polynomial that tables
// give. Without the instruction: eight bytes a step from tables ("slicing by 8"). All tables are made at compile time.
#pragma once

#include <array>
#include <cstddef>
#include <cstring>

#include "lane.hpp"
#include "simd.hpp"

namespace kv {
namespace crc {

constexpr kv_u32 kPolynomial = 0x82F63B78u;

using Table = std::array<kv_u32, 256>;

// The product of two polynomials modulo kPolynomial; bit 31 is the coefficient of x^0.
constexpr kv_u32 product(kv_u32 a, kv_u32 b) {
  kv_u32 sum = 0;
  for (kv_u32 bit = 1u << 31; bit != 0; bit >>= 1) {
    if (a & bit) sum ^= b;
    b = (b >> 1) ^ (b & 1 ? kPolynomial : 0);
  }
  return sum;
}

// x^n modulo kPolynomial.
constexpr kv_u32 power_of_x(kv_u64 n) {
  kv_u32 result = 1u << 31, square = 1u << 30;
  for (; n != 0; n >>= 1) {
    if (n & 1) result = product(result, square);
    square = product(square, square);
  }
  return result;
}

// Entry v: v << shift, times `factor`. A product is linear, so that the entries of single bits give all.
constexpr Table multiples(kv_u32 shift, kv_u32 factor) {
  Table table{};
  for (kv_u32 v = 1; v < 256; ++v) {
    const kv_u32 rest = v & (v - 1);
    table[v] = rest != 0 ? table[rest] ^ table[v ^ rest] : product(v << shift, factor);
  }
  return table;
}

// kSlices[i][v]: the remainder of byte v with i zero bytes behind it.
constexpr std::array<Table, 8> kSlices = {
    multiples(0, power_of_x(8)),  multiples(0, power_of_x(16)), multiples(0, power_of_x(24)),
    multiples(0, power_of_x(32)), multiples(0, power_of_x(40)), multiples(0, power_of_x(48)),
    multiples(0, power_of_x(56)), multiples(0, power_of_x(64)),
};

inline kv_u32 load32(const kv_u8* p) {
  return (kv_u32)p[0] | (kv_u32)p[1] << 8 | (kv_u32)p[2] << 16 | (kv_u32)p[3] << 24;
}

// Both take and return the remainder itself: without the inversion before and after.
inline kv_u32 update_portable(kv_u32 state, const kv_u8* p, std::size_t n) {
  for (; n >= 8; n -= 8, p += 8) {
    const kv_u32 a = state ^ load32(p), b = load32(p + 4);
    state = kSlices[7][a & 0xFF] ^ kSlices[6][a >> 8 & 0xFF] ^ kSlices[5][a >> 16 & 0xFF] ^ kSlices[4][a >> 24] ^
            kSlices[3][b & 0xFF] ^ kSlices[2][b >> 8 & 0xFF] ^ kSlices[1][b >> 16 & 0xFF] ^ kSlices[0][b >> 24];
  }
  for (; n > 0; --n, ++p) state = state >> 8 ^ kSlices[0][(state ^ *p) & 0xFF];
  return state;
}

#if KV_X86
#define KV_SSE42 __attribute__((target("sse4.2")))

inline bool sse42_supported() { return __builtin_cpu_supports("sse4.2"); }

// Tables that move a remainder past kBytes zero bytes.
template <std::size_t kBytes>
struct Past {
  static constexpr std::array<Table, 4> kTables = {
      multiples(0, power_of_x(8 * kBytes)),
      multiples(8, power_of_x(8 * kBytes)),
      multiples(16, power_of_x(8 * kBytes)),
      multiples(24, power_of_x(8 * kBytes)),
  };
  static kv_u32 move(kv_u32 state) {
    return kTables[0][state & 0xFF] ^ kTables[1][state >> 8 & 0xFF] ^ kTables[2][state >> 16 & 0xFF] ^
           kTables[3][state >> 24];
  }
};

inline kv_u64 load64(const kv_u8* p) {
  kv_u64 word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

// As many times three runs of kRun bytes as there are.
template <std::size_t kRun>
KV_SSE42 inline kv_u32 update_runs(kv_u32 state, const kv_u8*& p, std::size_t& n) {
  static_assert(kRun % 8 == 0);
  for (; n >= 3 * kRun; n -= 3 * kRun, p += 3 * kRun) {
    kv_u64 a = state, b = 0, c = 0;
    for (std::size_t i = 0; i < kRun; i += 8) {
      a = _mm_crc32_u64(a, load64(p + i));
      b = _mm_crc32_u64(b, load64(p + kRun + i));
      c = _mm_crc32_u64(c, load64(p + 2 * kRun + i));
    }
    state = Past<kRun>::move(Past<kRun>::move((kv_u32)a) ^ (kv_u32)b) ^ (kv_u32)c;
  }
  return state;
}

KV_SSE42 inline kv_u32 update_sse42(kv_u32 state, const kv_u8* p, std::size_t n) {
  state = update_runs<2048>(state, p, n);
  state = update_runs<128>(state, p, n);
  for (; n >= 8; n -= 8, p += 8) state = (kv_u32)_mm_crc32_u64(state, load64(p));
  for (; n > 0; --n, ++p) state = _mm_crc32_u8(state, *p);
  return state;
}
#endif

}  // namespace crc

// The CRC-32C of bytes whose beginning has the CRC-32C `crc` (0: no bytes) and goes on with these.
inline kv_u32 crc32c(kv_u32 crc, const kv_u8* bytes, std::size_t n, bool portable = false) {
#if KV_X86
  if (!portable && crc::sse42_supported()) return ~crc::update_sse42(~crc, bytes, n);
#endif
  (void)portable;
  return ~crc::update_portable(~crc, bytes, n);
}

}  // namespace kv
