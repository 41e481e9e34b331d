// The frozen grids of the IQ schemes, expanded. FORMAT.md section 10.5.
#pragma once

#include "../lane.hpp"

namespace kv::ggml {

struct Tables {
  // Magnitudes.
  kv_u8 iq2_xxs[256][8];
  kv_u8 iq2_xs[512][8];
  kv_u8 iq2_s[1024][8];
  signed char iq1[2048][8];  // -1, 0, 1
  kv_u8 iq3_xxs[256][4];
  kv_u8 iq3_s[512][4];
  kv_u8 signs[128];  // bit i: value i is negative
};

// What the codes of iq4_nl and iq4_xs stand for.
inline constexpr signed char kIQ4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                               1,    13,   25,  38,  53,  69,  89,  113};

// Part of the core, expanded by the compiler: always there.
extern const Tables kTables;

}  // namespace kv::ggml
