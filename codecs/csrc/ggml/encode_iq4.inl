// iq4_nl and iq4_xs: a scale times one of sixteen levels. Part of encode_iq.inl.

struct Levels4 {
  static constexpr float kLeast = kIQ4Values[0];
  static Floats nearest(Floats v) {
    Floats level = all(kIQ4Values[0]);
    for (int k = 1; k < 16; ++k)
      level = v >= 0.5f * (float)(kIQ4Values[k - 1] + kIQ4Values[k]) ? all(kIQ4Values[k]) : level;
    return level;
  }
  static kv_u32 code(float level) {
    kv_u32 code = 0;
    for (int k = 1; k < 16; ++k) code += level >= (float)kIQ4Values[k];
    return code;
  }
};

// The levels that the value of largest magnitude is put on.
constexpr float kLevels4[] = {-127, -122, -117, -112, -132, -137, -104, -108, 113, 109, 105, 101, 117, 121, 93, 97};

template <class Get>
inline void put_levels(const Get& level, kv_u8* out) {
  for (int i = 0; i < 16; ++i) out[i] = (kv_u8)(Levels4::code(level(i)) | Levels4::code(level(16 + i)) << 4);
}

// Sixteen blocks at a time; the last one again where there are no others.
bool encode_iq4_nl(const float* values, kv_u64 n_blocks, kv_u8* out) {
  bool fits = true;
  alignas(64) float x[32][kLanes], q[32][kLanes], scales[kLanes], simple[kLanes], xq[kLanes], qq[kLanes];
  for (kv_u64 first = 0; first < n_blocks; first += kLanes) {
    const int n = n_blocks - first < kLanes ? (int)(n_blocks - first) : kLanes;
    const float* blocks[kLanes];
    for (int b = 0; b < kLanes; ++b) {
      blocks[b] = values + (first + (kv_u64)(b < n ? b : n - 1)) * 32;
      if (!(largest_of(blocks[b], 32) < kBeyondAll)) return false;
    }
    into_lanes<32, 1>(blocks, x);
    search_scales<Levels4, 32>(x, kLevels4, 16, scales, simple);
    for (int b = 0; b < kLanes; ++b) {
      scales[b] = stored(scales[b]);
      simple[b] = simple_unit(simple[b]);
      fits &= std::fabs(scales[b]) < kInfinity || std::fabs(simple[b]) < kInfinity;
    }
    for (int lane = 0; lane < kLanes; lane += kWide) {  // float16 may be far too coarse
      Floats scale = all(0), best = squares_of<32>(x, lane);
      for (const float* others : {scales, simple}) {
        const Floats other = load(others + lane), error = error_of<Levels4, 32>(x, lane, other);
        scale = error < best ? other : scale;
        best = least(error, best);
      }
      store(scale, scales + lane);
    }
    codes_of<Levels4, 32>(x, scales, q, xq, qq);
    for (int b = 0; b < n; ++b) {
      kv_u8* to = out + (first + (kv_u64)b) * 18;
      put_half(scales[b], to);
      put_levels([&](int i) { return q[i][b]; }, to + 2);
    }
  }
  return fits;
}

constexpr float kEnds4[] = {-32, -31, -30, -28.5f, -27, 31, 29.5f, 28};

// Two blocks at a time.
bool encode_iq4_xs(const float* values, kv_u64 n_blocks, kv_u8* out) {
  bool fits = true;
  alignas(64) float x[32][kLanes], q[32][kLanes], scales[kLanes], simple[kLanes];
  for (kv_u64 first = 0; first < n_blocks; first += 2) {
    const int n = n_blocks - first < 2 ? 1 : 2;
    const float* blocks[2] = {values + first * 256, values + (first + (kv_u64)n - 1) * 256};
    for (const float* block : blocks)
      if (!(largest_of(block, 256) < kBeyondAll)) return false;
    into_lanes<32, 8>(blocks, x);
    search_scales<Levels4, 32>(x, kLevels4, 16, scales, simple);
    const Multiples found = search_multiples<Levels4, 32, 8>(x, scales, simple, kEnds4, 8, -32, 31, q);
    fits &= found.fits;
    for (int b = 0; b < n; ++b) {
      kv_u8* to = out + (first + (kv_u64)b) * 136;
      put_half(found.d[8 * b], to);
      kv_u32 low = 0, high = 0;
      for (int g = 0; g < 8; ++g) {
        const kv_u32 s = (kv_u32)((int)found.of[8 * b + g] + 32);
        low |= (s & 15) << 4 * g;
        high |= s >> 4 << 2 * g;
        put_levels([&](int i) { return q[i][8 * b + g]; }, to + 8 + 16 * g);
      }
      put_u16(high, to + 2);
      put_u32(low, to + 4);
    }
  }
  return fits;
}
