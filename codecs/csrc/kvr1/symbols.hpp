// KVR1: classes and the symbols of frequency tables. FORMAT.md section 9. No STL, for NVRTC: the GPU's kernel includes it.
#pragma once

#include "../lane.hpp"

namespace kv::kvr1 {

constexpr kv_u32 kStates = 32;         // interleaved rANS states of a block: two AVX-512 vectors, one GPU warp
constexpr kv_u32 kTables = 36;
constexpr kv_u32 kSymbols = 64;        // 0 is the escape, s stands for s - kZeroSymbol
constexpr kv_i32 kZeroSymbol = 32;
constexpr kv_u32 kSlotBits = 11;
constexpr kv_u32 kSlots = 1u << kSlotBits;
constexpr kv_u32 kSpreadClasses = 88;
constexpr kv_u32 kLowBitsFrom = 24;    // classes from here on leave low bits to the state
constexpr kv_u32 kLastShiftTables = 32;
constexpr kv_u32 kMaxSinkDiv = 512;    // a table's symbol times scale then stays below 2^30
constexpr kv_u32 kLeastState = 1u << 16;
constexpr kv_u64 kMaxDistance = 1ull << 30;  // |residual * scale|, so that a prediction plus it fits 32 bits
constexpr kv_u64 kHeadBytes = 1 + 4 * kStates;  // of a payload, before the words
constexpr kv_u32 kStepWords = 2 * kStates;   // that one step may read, escapes apart

KV_HD kv_u32 shift_of(kv_u32 cls) { return cls < kLowBitsFrom ? 0 : (cls - kLowBitsFrom + 4) >> 2; }
KV_HD kv_u32 table_of(kv_u32 cls) { return cls < kTables ? cls : kLastShiftTables + (cls & 3); }
KV_HD kv_u32 sink_class(kv_u32 cls, kv_u32 sink_classes) {
  return cls + sink_classes < kSpreadClasses ? cls + sink_classes : kSpreadClasses - 1;
}

// What a slot of a table means, in one word: value in bits 26 to 31 (signed), kSlotEscapes, slot - start in bits 11 to 21,
// frequency in 0 to 10. Bits 22 to 25 are 0 but for the escape, so that the value comes out times up to 16 by one shift.
constexpr kv_u32 kSlotEscapesBit = 22;
constexpr kv_u32 kSlotEscapes = 1u << kSlotEscapesBit;
KV_HD kv_u32 slot_frequency(kv_u32 slot) { return slot & (kSlots - 1); }
KV_HD kv_u32 slot_offset(kv_u32 slot) { return slot >> kSlotBits & (kSlots - 1); }
constexpr kv_u32 kSlotValueShift = 26;
constexpr kv_u32 kMaxScaleShift = 4;
KV_HD kv_i32 slot_value(kv_u32 slot) { return (kv_i32)slot >> kSlotValueShift; }

// The same in less room, for the shared memory of a GPU: the symbol of each slot as a byte, table after table, then a word
// for each symbol: frequency in bits 0 to 10, start from bit 16. The rows of the latter are one word apart, so that the
// likely symbols of different tables lie in different banks.
constexpr kv_u32 kCompactRow = kSymbols + 1;
constexpr kv_u32 kCompactSymbols = kTables * kSlots / 4;  // first of those words
constexpr kv_u32 kCompactWords = kCompactSymbols + kTables * kCompactRow;

}  // namespace kv::kvr1
