// Stored bytes: reading from the front with every read checked, writing varints. Host only.
#pragma once

#include <string>
#include <vector>

#include "lane.hpp"

namespace kv {

// Errors of stored bytes; they become kvcodecs.errors.Truncated, Corrupt and InvalidArgument.
struct Fault {
  const char* kind;
  std::string message;
};

struct Cursor {
  const kv_u8* bytes;
  kv_u64 size;
  kv_u64 offset;
  const char* what;

  kv_u8 byte() {
    if (offset >= size) throw Fault{"Truncated", std::string(what) + " ends after " + std::to_string(size) + " bytes"};
    return bytes[offset++];
  }
  kv_u64 varint() {
    kv_u64 value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const kv_u8 b = byte();
      if (shift == 63 && b > 1) break;
      value |= (kv_u64)(b & 0x7F) << shift;
      if (b < 0x80) return value;
    }
    throw Fault{"Corrupt", std::string(what) + ": a varint before byte " + std::to_string(offset) +
                               " does not fit 64 bits"};
  }
  kv_i64 zigzag() {
    const kv_u64 v = varint();
    return (kv_i64)(v >> 1) ^ -(kv_i64)(v & 1);
  }
};

inline void append_varint(std::vector<kv_u8>& out, kv_u64 value) {
  for (; value >= 0x80; value >>= 7) out.push_back((kv_u8)(value | 0x80));
  out.push_back((kv_u8)value);
}

}  // namespace kv
