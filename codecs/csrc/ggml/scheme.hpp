// The block schemes of ggml: numbers, block sizes. Layouts: FORMAT.md section 10.
#pragma once

#include "../lane.hpp"

namespace kv::ggml {

// ggml's own numbers of tensor types. Q2_0 has two forms under one number there; the one of 128 values gets its own.
enum Scheme : kv_u8 {
  kF16 = 1, kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ5_1 = 7, kQ8_0 = 8,
  kQ2_K = 10, kQ3_K = 11, kQ4_K = 12, kQ5_K = 13, kQ6_K = 14, kQ8_K = 15,
  kIQ2_XXS = 16, kIQ2_XS = 17, kIQ3_XXS = 18, kIQ1_S = 19, kIQ4_NL = 20, kIQ3_S = 21, kIQ2_S = 22, kIQ4_XS = 23,
  kIQ1_M = 29, kTQ1_0 = 34, kTQ2_0 = 35, kQ1_0 = 41, kQ2_0 = 42, kQ2_0_128 = 170,
};

struct Format {
  kv_u32 values;  // of a block; 0: no such scheme
  kv_u32 bytes;
};

inline constexpr kv_u32 kMaxBlockValues = 256, kMaxBlockBytes = 292;

constexpr Format format_of(kv_u32 scheme) {
  switch (scheme) {
    case kF16: return {1, 2};
    case kQ4_0: return {32, 18};
    case kQ4_1: return {32, 20};
    case kQ5_0: return {32, 22};
    case kQ5_1: return {32, 24};
    case kQ8_0: return {32, 34};
    case kQ2_K: return {256, 84};
    case kQ3_K: return {256, 110};
    case kQ4_K: return {256, 144};
    case kQ5_K: return {256, 176};
    case kQ6_K: return {256, 210};
    case kQ8_K: return {256, 292};
    case kIQ2_XXS: return {256, 66};
    case kIQ2_XS: return {256, 74};
    case kIQ3_XXS: return {256, 98};
    case kIQ1_S: return {256, 50};
    case kIQ4_NL: return {32, 18};
    case kIQ3_S: return {256, 110};
    case kIQ2_S: return {256, 82};
    case kIQ4_XS: return {256, 136};
    case kIQ1_M: return {256, 56};
    case kTQ1_0: return {256, 54};
    case kTQ2_0: return {256, 66};
    case kQ1_0: return {128, 18};
    case kQ2_0: return {64, 18};
    case kQ2_0_128: return {128, 34};
    default: return {0, 0};
  }
}

}  // namespace kv::ggml
