// Encoders of the IQ schemes. The searches: FORMAT.md section 10.6.
namespace kv::ggml {
namespace {
namespace KV_GGML_LEVEL {

#include "encode_search.inl"
#include "encode_iq4.inl"
#include "encode_grid.inl"
#include "encode_steps.inl"

// Shares of the largest level that the value of largest magnitude of a sub-block is put on.
constexpr float kShares2[] = {1, 0.93f, 0.87f, 0.81f, 0.75f, 0.7f, 0.65f, 0.6f, 0.55f, 0.5f, 1.08f, 1.16f, 1.3f, 0.45f};
constexpr float kShares3[] = {1, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f, 0.7f, 0.65f, 1.05f, 1.1f, 1.17f, 1.25f};
constexpr float kShares1[] = {1, 0.9f, 0.8f, 0.72f, 0.65f, 0.58f, 0.52f, 0.47f, 0.42f, 0.37f, 0.33f, 0.29f};
constexpr float kHalves[] = {15.5f, 14.5f, 13.5f, 12.5f, 11.5f, 10.5f, 9.5f, 8.5f, 15, 14, 13, 12};
constexpr float kOdd16[] = {31, 29, 27, 25, 23, 21, 19, 17, 30, 28};
constexpr float kOdd8[] = {15, 13, 11, 9, 14, 12, 10, 7, 16, 17.5f};

template <int kN>
inline void put_row_bytes(const RowCodes& codes, kv_u8* out) {
  for (int i = 0; i < kN; ++i) out[i] = (kv_u8)codes.row[i];
}

template <int kN>
inline void put_k_nibbles(const RowCodes& codes, kv_u8* out) {
  for (int i = 0; i < kN; i += 2) out[i / 2] = (kv_u8)(codes.k[i] | codes.k[i + 1] << 4);
}

// Four times seven signs, and the scale.
inline kv_u32 signs_and_scale(const RowCodes& codes, int g) {
  kv_u32 word = (kv_u32)codes.k[g] << 28;
  for (int i = 0; i < 4; ++i) word |= (kv_u32)(codes.negative[4 * g + i] & 127) << 7 * i;
  return word;
}

bool encode_iq2_xxs(const float* x, kv_u64 n_blocks, kv_u8* out) {
  using S = Shape<kIQ2_XXS, 8, 4, 8, kEven8>;
  return encode_rows<S>(x, n_blocks, out, kShares2, 14, kHalves, 12, [](const RowCodes& codes, kv_u8* to) {
    put_half(codes.d, to);
    for (int g = 0; g < 8; ++g) {
      for (int i = 0; i < 4; ++i) to[2 + 8 * g + i] = (kv_u8)codes.row[4 * g + i];
      put_u32(signs_and_scale(codes, g), to + 6 + 8 * g);
    }
  });
}

bool encode_iq2_xs(const float* x, kv_u64 n_blocks, kv_u8* out) {
  using S = Shape<kIQ2_XS, 16, 2, 8, kEven8>;
  return encode_rows<S>(x, n_blocks, out, kShares2, 14, kHalves, 12, [](const RowCodes& codes, kv_u8* to) {
    put_half(codes.d, to);
    for (int i = 0; i < 32; ++i) put_u16(codes.row[i] | (kv_u32)(codes.negative[i] & 127) << 9, to + 2 + 2 * i);
    put_k_nibbles<16>(codes, to + 66);
  });
}

bool encode_iq2_s(const float* x, kv_u64 n_blocks, kv_u8* out) {
  using S = Shape<kIQ2_S, 16, 2, 8, kFree>;
  return encode_rows<S>(x, n_blocks, out, kShares2, 14, kHalves, 12, [](const RowCodes& codes, kv_u8* to) {
    put_half(codes.d, to);
    put_row_bytes<32>(codes, to + 2);
    std::memcpy(to + 34, codes.negative, 32);
    for (int i = 0; i < 8; ++i) {
      const kv_u16* row = codes.row + 4 * i;
      to[66 + i] = (kv_u8)(row[0] >> 8 | row[1] >> 8 << 2 | row[2] >> 8 << 4 | row[3] >> 8 << 6);
    }
    put_k_nibbles<16>(codes, to + 74);
  });
}

bool encode_iq3_xxs(const float* x, kv_u64 n_blocks, kv_u8* out) {
  using S = Shape<kIQ3_XXS, 8, 8, 4, kEven4>;
  return encode_rows<S>(x, n_blocks, out, kShares3, 12, kHalves, 12, [](const RowCodes& codes, kv_u8* to) {
    put_half(codes.d, to);
    put_row_bytes<64>(codes, to + 2);
    for (int g = 0; g < 8; ++g) put_u32(signs_and_scale(codes, g), to + 66 + 4 * g);
  });
}

bool encode_iq3_s(const float* x, kv_u64 n_blocks, kv_u8* out) {
  using S = Shape<kIQ3_S, 8, 8, 4, kFree>;
  return encode_rows<S>(x, n_blocks, out, kShares3, 12, kOdd16, 10, [](const RowCodes& codes, kv_u8* to) {
    put_half(codes.d, to);
    put_row_bytes<64>(codes, to + 2);
    for (int g = 0; g < 8; ++g) {
      kv_u32 high = 0;
      for (int i = 0; i < 8; ++i) high |= (kv_u32)(codes.row[8 * g + i] >> 8) << i;
      to[66 + g] = (kv_u8)high;
    }
    std::memcpy(to + 74, codes.negative, 32);
    put_k_nibbles<8>(codes, to + 106);
  });
}

bool encode_iq1_s(const float* x, kv_u64 n_blocks, kv_u8* out) {
  using S = Shape<kIQ1_S, 8, 4, 8, kShift>;
  return encode_rows<S>(x, n_blocks, out, kShares1, 12, kOdd8, 10, [](const RowCodes& codes, kv_u8* to) {
    put_half(codes.d, to);
    put_row_bytes<32>(codes, to + 2);
    for (int g = 0; g < 8; ++g) {
      kv_u32 word = (kv_u32)codes.k[g] << 12 | (kv_u32)codes.down[4 * g] << 15;
      for (int i = 0; i < 4; ++i) word |= (kv_u32)(codes.row[4 * g + i] >> 8) << 3 * i;
      put_u16(word, to + 34 + 2 * g);
    }
  });
}

bool encode_iq1_m(const float* x, kv_u64 n_blocks, kv_u8* out) {
  using S = Shape<kIQ1_M, 16, 2, 8, kShift8>;
  return encode_rows<S>(x, n_blocks, out, kShares1, 12, kOdd8, 10, [](const RowCodes& codes, kv_u8* to) {
    put_row_bytes<32>(codes, to);
    for (int i = 0; i < 16; ++i) {
      const kv_u32 low = codes.row[2 * i] >> 8 | codes.down[2 * i] << 3;
      const kv_u32 high = codes.row[2 * i + 1] >> 8 | codes.down[2 * i + 1] << 3;
      to[32 + i] = (kv_u8)(low | high << 4);
    }
    const kv_u32 d = to_float16_bits(codes.d);
    for (int i = 0; i < 4; ++i) {
      kv_u32 word = (d >> 4 * i & 15) << 12;
      for (int j = 0; j < 4; ++j) word |= (kv_u32)codes.k[4 * i + j] << 3 * j;
      put_u16(word, to + 48 + 2 * i);
    }
  });
}

Encode iq_encoder(kv_u32 scheme) {
  switch (scheme) {
    case kIQ4_NL: return encode_iq4_nl;
    case kIQ4_XS: return encode_iq4_xs;
    case kIQ2_XXS: return encode_iq2_xxs;
    case kIQ2_XS: return encode_iq2_xs;
    case kIQ2_S: return encode_iq2_s;
    case kIQ3_XXS: return encode_iq3_xxs;
    case kIQ3_S: return encode_iq3_s;
    case kIQ1_S: return encode_iq1_s;
    case kIQ1_M: return encode_iq1_m;
    default: return nullptr;
  }
}

}  // namespace KV_GGML_LEVEL
}  // namespace
}  // namespace kv::ggml
