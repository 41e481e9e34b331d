// Encoders of the K schemes. The searches: FORMAT.md section 10.6.
namespace kv::ggml {
namespace {
namespace KV_GGML_LEVEL {

#include "encode_search.inl"
#include "encode_offset.inl"

// Codes in the order of values; those of a lane are kN.
template <int kN>
inline void in_order(const float (*codes)[kLanes], int first_lane, int low, kv_u8* c) {
  for (int i = 0; i < 256; ++i) c[i] = (kv_u8)((int)codes[i % kN][first_lane + i / kN] - low);
}

// `run` bytes at a time, plane after plane of kBits bits: what FORMAT.md calls P.
template <int kRun, int kBits, int kN>
inline void put_planes(const kv_u8* c, int shift, kv_u8* out) {
  constexpr int kPlanes = 8 / kBits;
  for (int i = 0; i < kN; i += kRun * kPlanes, c += kRun * kPlanes, out += kRun)
    for (int l = 0; l < kRun; ++l) {
      kv_u32 byte = 0;
      for (int k = 0; k < kPlanes; ++k) byte |= (kv_u32)(c[kRun * k + l] >> shift & ((1 << kBits) - 1)) << kBits * k;
      out[l] = (kv_u8)byte;
    }
}

// ---- q3_k, q6_k: sixteen scales of either sign.

constexpr float kLevels3[] = {-4, -3.6f, -3.2f, -2.8f, -4.4f, -4.8f, 4, 3.6f, 3.2f, 2.8f, 4.4f, 2.4f, -2.4f};
constexpr float kLevels6[] = {-32,     -31.5f, -31,    -30.5f, -30, -29.5f, -29, -32.5f, 31, 31.5f,
                              30.5f, 30,     29.5f, 29,     28.5f, 28,     -28.5f, -28};
constexpr float kEnds3[] = {-32, -31, -30, -29, -27.5f, -26, 31, 30, 28.5f, 27, -24, 24};
constexpr float kEnds6[] = {-128, 127, -118, 116};

bool encode_q3_k(const float* values, kv_u64 n_blocks, kv_u8* out) {
  bool fits = true;
  alignas(64) float x[16][kLanes], q[16][kLanes], scales[kLanes], simple[kLanes];
  for (; n_blocks > 0; --n_blocks, values += 256, out += 110) {
    if (!(largest_of(values, 256) < kBeyondAll)) return false;
    into_lanes<16, 16>(&values, x);
    search_scales<Whole<-4, 3>, 16>(x, kLevels3, 13, scales, simple);
    const Multiples found = search_multiples<Whole<-4, 3>, 16, 16>(x, scales, simple, kEnds3, 12, -32, 31, q);
    fits &= found.fits;
    put_half(found.d[0], out + 108);
    kv_u8 c[256], s[16];
    in_order<16>(q, 0, -4, c);
    put_planes<32, 1, 256>(c, 2, out);
    put_planes<32, 2, 256>(c, 0, out + 32);
    for (int g = 0; g < 16; ++g) s[g] = (kv_u8)((int)found.of[g] + 32);
    put_planes<8, 4, 16>(s, 0, out + 96);
    put_planes<4, 2, 16>(s, 4, out + 104);
  }
  return fits;
}

bool encode_q6_k(const float* values, kv_u64 n_blocks, kv_u8* out) {
  bool fits = true;
  alignas(64) float x[16][kLanes], q[16][kLanes], scales[kLanes], simple[kLanes];
  for (; n_blocks > 0; --n_blocks, values += 256, out += 210) {
    if (!(largest_of(values, 256) < kBeyondAll)) return false;
    into_lanes<16, 16>(&values, x);
    search_scales<Whole<-32, 31>, 16>(x, kLevels6, 18, scales, simple);
    const Multiples found = search_multiples<Whole<-32, 31>, 16, 16>(x, scales, simple, kEnds6, 4, -128, 127, q);
    fits &= found.fits;
    put_half(found.d[0], out + 208);
    kv_u8 c[256];
    in_order<16>(q, 0, -32, c);
    put_planes<64, 4, 256>(c, 0, out);
    put_planes<32, 2, 256>(c, 4, out + 128);
    for (int g = 0; g < 16; ++g) out[192 + g] = (kv_u8)(signed char)found.of[g];
  }
  return fits;
}

// ---- q2_k, q4_k, q5_k: scales and offsets.

constexpr float kCuts2[] = {0, 0.07f, 0.14f, 0.21f, -0.05f};
constexpr float kCuts4[] = {0, 0.025f, 0.05f, -0.02f};
constexpr float kCuts5[] = {0, 0.012f, 0.024f, -0.01f};
constexpr float kEnds2[] = {15, 14, 13, 12};
constexpr float kEnds45[] = {63, 58};

bool encode_q2_k(const float* values, kv_u64 n_blocks, kv_u8* out) {
  bool fits = true;
  alignas(64) float x[16][kLanes], q[16][kLanes];
  Ranges ranges;
  for (; n_blocks > 0; --n_blocks, values += 256, out += 84) {
    if (!(largest_of(values, 256) < kBeyondAll)) return false;
    into_lanes<16, 16>(&values, x);
    search_offsets<3, 16>(x, kCuts2, 5, ranges);
    const Pairs found = search_pairs<3, 16, 16>(x, ranges, kEnds2, 4, 15, q);
    fits &= found.fits;
    for (int g = 0; g < 16; ++g) out[g] = (kv_u8)((int)found.s[g] | (int)found.m[g] << 4);
    kv_u8 c[256];
    in_order<16>(q, 0, 0, c);
    put_planes<32, 2, 256>(c, 0, out + 16);
    put_half(found.d[0], out + 80);
    put_half(found.dmin[0], out + 82);
  }
  return fits;
}

// Eight scales and eight offsets of six bits.
inline void put_six_bits(const float* s, const float* m, kv_u8* out) {
  for (int g = 0; g < 4; ++g) {
    const int s0 = (int)s[g], s4 = (int)s[g + 4], m0 = (int)m[g], m4 = (int)m[g + 4];
    out[g] = (kv_u8)(s0 | s4 >> 4 << 6);
    out[4 + g] = (kv_u8)(m0 | m4 >> 4 << 6);
    out[8 + g] = (kv_u8)((s4 & 15) | (m4 & 15) << 4);
  }
}

// Two blocks at a time; the last one twice where there is no other.
template <int kTop>
bool encode_q45_k(const float* values, kv_u64 n_blocks, kv_u8* out) {
  constexpr kv_u64 kBytes = kTop == 15 ? 144 : 176;
  constexpr const float* kCuts = kTop == 15 ? kCuts4 : kCuts5;
  bool fits = true;
  alignas(64) float x[32][kLanes], q[32][kLanes];
  Ranges ranges;
  for (kv_u64 first = 0; first < n_blocks; first += 2) {
    const int n = n_blocks - first < 2 ? 1 : 2;
    const float* blocks[2] = {values + first * 256, values + (first + (kv_u64)n - 1) * 256};
    for (const float* block : blocks)
      if (!(largest_of(block, 256) < kBeyondAll)) return false;
    into_lanes<32, 8>(blocks, x);
    search_offsets<kTop, 32>(x, kCuts, 4, ranges);
    const Pairs found = search_pairs<kTop, 32, 8>(x, ranges, kEnds45, 2, 63, q);
    fits &= found.fits;
    for (int b = 0; b < n; ++b) {
      kv_u8* to = out + (first + (kv_u64)b) * kBytes;
      put_half(found.d[8 * b], to);
      put_half(found.dmin[8 * b], to + 2);
      put_six_bits(found.s + 8 * b, found.m + 8 * b, to + 4);
      kv_u8 c[256];
      in_order<32>(q, 8 * b, 0, c);
      if (kTop == 31) put_planes<32, 1, 256>(c, 4, to + 16);
      put_planes<32, 4, 256>(c, 0, to + kBytes - 128);
    }
  }
  return fits;
}

Encode k_encoder(kv_u32 scheme) {
  switch (scheme) {
    case kQ2_K: return encode_q2_k;
    case kQ3_K: return encode_q3_k;
    case kQ4_K: return encode_q45_k<15>;
    case kQ5_K: return encode_q45_k<31>;
    case kQ6_K: return encode_q6_k;
    default: return nullptr;
  }
}

}  // namespace KV_GGML_LEVEL
}  // namespace
}  // namespace kv::ggml
