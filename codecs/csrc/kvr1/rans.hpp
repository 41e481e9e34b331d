// KVR1: frequency tables as they are looked up, and the words of a payload. FORMAT.md section 9.
//
// The coder knows components and residuals only: not heads, channels or tokens, nor what a residual is predicted from.
#pragma once

#include <cstring>

#include "symbols.hpp"

namespace kv::kvr1 {

// What coding a symbol takes, in one word: its start from bit 16, kEscapes, its frequency in bits 0 to 10.
constexpr kv_u32 kEscapes = 1u << 15;

// The frozen frequencies as decoders and encoders look them up. A symbol of frequency 0 is coded as the escape.
struct Tables {
  alignas(64) kv_u32 slots[kTables * kSlots];
  alignas(64) kv_u32 symbols[kTables * kSymbols];
  alignas(64) float inverse[kTables * kSymbols];  // 1 / frequency, a little less

  // Frequencies [kTables][kSymbols], each row 2048 in all, no symbol alone, escapes possible. False: they are not.
  bool build(const kv_u16* frequencies) {
    for (kv_u32 t = 0; t < kTables; ++t, frequencies += kSymbols) {
      kv_u32 start = 0;
      if (frequencies[0] == 0) return false;
      for (kv_u32 s = 0; s < kSymbols; ++s) {
        const kv_u32 f = frequencies[s];
        if (f >= kSlots || f > kSlots - start) return false;
        const kv_u32 coded = f > 0 ? f : frequencies[0];
        symbols[t * kSymbols + s] = f > 0 && s > 0 ? f | start << 16 : coded | kEscapes;
        // So that x * inverse, x < 2^21 f, is never above the quotient and less than one below it.
        inverse[t * kSymbols + s] = (float)(1.0 / coded * (1.0 - 1.5 / (1 << 23)));
        for (kv_u32 i = 0; i < f; ++i)
          slots[t * kSlots + start + i] =
              ((kv_u32)(s - kZeroSymbol) << kSlotValueShift) | (s == 0 ? kSlotEscapes : 0) | i << kSlotBits | f;
        start += f;
      }
      if (start != kSlots) return false;
    }
    return true;
  }

  // What decoding needs of the tables, kCompactWords of it.
  void compact(kv_u32* words) const {
    kv_u8* bytes = (kv_u8*)words;
    for (kv_u32 i = 0; i < kTables * kSlots; ++i) bytes[i] = (kv_u8)(slot_value(slots[i]) + kZeroSymbol);
    words += kCompactSymbols;
    for (kv_u32 t = 0; t < kTables; ++t, words += kCompactRow) {
      for (kv_u32 s = 0; s < kSymbols; ++s) words[s] = symbols[t * kSymbols + s] & ~kEscapes;
      words[kSymbols] = 0;
    }
  }
};

inline kv_u32 load_word(const kv_u8* at) {
  kv_u16 word;
  std::memcpy(&word, at, 2);
  return word;
}

// The words of a payload as a decoder reads them. Steps read without looking as long as `next` is not past `safe`;
// near the end reading goes on in a copy with zeros behind it, so that no byte outside the payload is touched. There
// `safe` is the end itself: past it, more was read than there is.
class Words {
 public:
  const kv_u8* next = nullptr;
  const kv_u8* safe = nullptr;

  void start(const kv_u8* bytes, kv_u64 n_bytes) {
    next = bytes;
    end_ = bytes + n_bytes;
    staged_ = false;
    if (n_bytes < kRoom)
      stage();
    else
      safe = end_ - kRoom;
  }

  // To be called when next > safe. False: more was read than there is.
  bool go_on() { return !staged_ && stage(); }

  // After a fault: zeros without end.
  void park() {
    static constexpr kv_u8 kZeros[2 * kRoom] = {};
    next = safe = end_ = kZeros;
    staged_ = true;
  }

  bool word(kv_u32& value) {
    if (end_ - next < 2) return false;
    value = load_word(next);
    next += 2;
    return true;
  }

  bool at_end() const { return next == end_; }
  bool overrun() const { return next > end_; }

 private:
  // Bytes a step may touch: its words, and the vector loads that begin at the last of them.
  static constexpr kv_u64 kRoom = 2 * (kStepWords + kStates);

  bool stage() {
    if (next > end_) return false;
    const kv_u64 left = (kv_u64)(end_ - next);
    std::memset(tail_, 0, sizeof tail_);
    std::memcpy(tail_, next, left);
    next = tail_;
    safe = end_ = tail_ + left;
    staged_ = true;
    return true;
  }

  const kv_u8* end_ = nullptr;
  bool staged_ = false;
  kv_u8 tail_[2 * kRoom];
};

// An escaped value: a word of 15 bits, and if its highest bit is set a second one. False: the words have ended.
inline bool read_escape(Words& words, kv_i32& value) {
  kv_u32 low, high = 0;
  if (!words.word(low)) return false;
  if ((low & 0x8000) && !words.word(high)) return false;
  const kv_u32 z = (low & 0x7FFF) | high << 15;
  value = (kv_i32)(z >> 1) ^ -(kv_i32)(z & 1);
  return true;
}

}  // namespace kv::kvr1
