// Lane layout of TKV1: bit models, range decoder, lane decoder. FORMAT.md section 4.
//
// This header is the one lane decoder of the project: the CPU executor includes it and NVRTC compiles it for
// the GPU, so the two cannot differ. No STL, no allocation, no includes but <cstdint>; every read of the
// substream is checked against its end, whatever the bytes are.
#pragma once

#if defined(__CUDACC_RTC__)
typedef unsigned char kv_u8;
typedef unsigned short kv_u16;
typedef int kv_i32;
typedef unsigned int kv_u32;
typedef long long kv_i64;
typedef unsigned long long kv_u64;
#else
#include <cstdint>
typedef std::uint8_t kv_u8;
typedef std::uint16_t kv_u16;
typedef std::int32_t kv_i32;
typedef std::uint32_t kv_u32;
typedef std::int64_t kv_i64;
typedef std::uint64_t kv_u64;
#endif

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define KV_HD __host__ __device__ inline
#define KV_UNLIKELY(x) (x)
#else
#define KV_HD inline __attribute__((always_inline))
#define KV_UNLIKELY(x) __builtin_expect(!!(x), 0)
#endif

namespace kv {

// Contexts: 48 spread classes x 3 magnitudes of the channel's previous residual; 49 bit models each.
constexpr kv_u32 kClasses = 48;
constexpr kv_u32 kActs = 3;
constexpr kv_u32 kBits = 24;  // magnitude bits: a residual of 2^24 or more is not representable
constexpr kv_u32 kContextModels = 1 + 2 * kBits;
constexpr kv_u32 kUnary = 1;
constexpr kv_u32 kMantissa = 1 + kBits;
constexpr kv_u32 kClassModels = kActs * kContextModels;
constexpr kv_u32 kPriorWords = kClasses * kClassModels;

constexpr kv_u32 kOne = 65536;  // probability 1
constexpr kv_u32 kFastShift = 4;
constexpr kv_u32 kSlowShift = 7;
constexpr kv_u32 kTop = 1u << 24;  // the range is renormalised below this
constexpr kv_i32 kValueLimit = 1 << 24;

enum Status : kv_u8 {
  kOk = 0,
  kBadResidual = 1,  // a magnitude prefix of 24 ones
  kBadValue = 2,     // a reconstruction of 2^24 units or more
  kOverflow = 3,     // an output beyond the range of its dtype
  kBadBlock = 4,     // KVR1: words that end early or late, states or values that no encoder leaves
};

// A bit model: two exponential averages of the probability of a one, as fast | slow << 16.
// The format clamps the probability to [32, 65504]. The clamp never binds and is not computed: the prior is within
// [64, 65472], so fast stays in [15, 65521], slow in [64, 65472], their mean in [39, 65496]. A test checks the prior.
KV_HD kv_u32 model_probability(kv_u32 model) { return ((model & 0xFFFF) + (model >> 16)) >> 1; }

KV_HD kv_u32 model_after_one(kv_u32 model) {
  kv_u32 fast = model & 0xFFFF, slow = model >> 16;
  fast += (kOne - fast) >> kFastShift;  // stays below 2^16: at most 65521
  slow += (kOne - slow) >> kSlowShift;
  return fast | slow << 16;
}

KV_HD kv_u32 model_after_zero(kv_u32 model) {
  kv_u32 fast = model & 0xFFFF, slow = model >> 16;
  fast -= fast >> kFastShift;
  slow -= slow >> kSlowShift;
  return fast | slow << 16;
}

// Carry-less side of the range coder. Bytes past the end read as zero: the encoder trims trailing zeros.
struct RangeDecoder {
  const kv_u8* next;
  const kv_u8* end;
  kv_u32 code;
  kv_u32 range;

  KV_HD kv_u32 byte() { return next < end ? *next++ : 0u; }

  KV_HD void start(const kv_u8* bytes, kv_u64 n_bytes) {
    next = bytes;
    end = bytes + n_bytes;
    range = 0xFFFFFFFFu;
    code = 0;
    for (int i = 0; i < 4; ++i) code = code << 8 | byte();
  }

  // A probability of at least 39/65536 leaves a range of 2^13 or more: two bytes at most.
  KV_HD void renormalise() {
    if (KV_UNLIKELY(range < kTop)) {
      range <<= 8;
      code = code << 8 | byte();
      if (KV_UNLIKELY(range < kTop)) {
        range <<= 8;
        code = code << 8 | byte();
      }
    }
  }

  // For decisions that the caller branches on.
  KV_HD bool decode(kv_u32& model) {
    const kv_u32 m = model;
    const kv_u32 bound = (range >> 16) * model_probability(m);
    const bool one = code < bound;
    if (one) {
      range = bound;
      model = model_after_one(m);
    } else {
      code -= bound;
      range -= bound;
      model = model_after_zero(m);
    }
    renormalise();
    return one;
  }

  // The same without a branch on the bit, for bits that only enter arithmetic.
  KV_HD kv_u32 decode_arithmetic(kv_u32& model) {
    const kv_u32 m = model;
    const kv_u32 bound = (range >> 16) * model_probability(m);
    const kv_u32 one = code < bound;
    const kv_u32 mask = 0u - one;
    range = (bound & mask) | ((range - bound) & ~mask);
    code -= bound & ~mask;
    const kv_u32 after_one = model_after_one(m), after_zero = model_after_zero(m);
    model = (after_one & mask) | (after_zero & ~mask);
    renormalise();
    return one;
  }

  KV_HD kv_u32 decode_raw() {
    const kv_u32 bound = (range >> 16) << 15;
    const kv_u32 one = code < bound;
    const kv_u32 mask = 0u - one;
    range = (bound & mask) | ((range - bound) & ~mask);
    code -= bound & ~mask;
    renormalise();
    return one;
  }
};

// One symbol in the context `models`: zero flag, sign, unary magnitude class, mantissa. False: 24 ones.
KV_HD bool decode_residual(RangeDecoder& d, kv_u32* models, kv_i32& q) {
  if (d.decode(models[0])) {
    q = 0;
    return true;
  }
  const kv_u32 negative = d.decode_raw();
  kv_u32 k = 0;
  while (d.decode(models[kUnary + k])) {
    if (KV_UNLIKELY(++k == kBits)) return false;
  }
  kv_u32 w = 1;
  if (k > 0) {
    w = 2 | d.decode_arithmetic(models[kMantissa + k]);
    for (kv_u32 i = 1; i < k; ++i) w = w << 1 | d.decode_raw();
  }
  q = (kv_i32)((w ^ (0u - negative)) + negative);
  return true;
}

// What the stream header says of one channel, in lane order.
struct Channel {
  kv_i32 mean;    // in units, |mean| < 2^24
  kv_u32 rho;     // AR(1) coefficient in sixteenths, 0..15
  kv_u32 models;  // index of the channel's class among the classes present in the lane
  kv_u32 output;  // channel of the output row
};

// What a lane remembers of one channel from token to token.
struct ChannelState {
  kv_i32 previous;
  kv_u32 context;  // index of the current context's first model
};

// Integer prediction. The shift is arithmetic on every compiler we support.
KV_HD kv_i32 predict(const Channel& channel, kv_i32 previous) {
  return channel.mean + (((kv_i32)channel.rho * (previous - channel.mean)) >> 4);
}

KV_HD kv_u32 context_of(const Channel& channel, kv_i32 q) {
  const kv_u32 magnitude = (kv_u32)(q < 0 ? -q : q);
  return channel.models * kClassModels + (magnitude < 2 ? magnitude : 2) * kContextModels;
}

// Decodes one lane token by token. `models` holds the prior of each class present, `states` one entry per
// channel; both belong to the caller.
struct LaneDecoder {
  RangeDecoder coder;
  const Channel* channels;
  ChannelState* states;
  kv_u32* models;
  kv_u32 width;
  kv_u32 sink_div;
  kv_u64 sink;

  KV_HD void start(const kv_u8* bytes, kv_u64 n_bytes) {
    coder.start(bytes, n_bytes);
    for (kv_u32 c = 0; c < width; ++c) {
      // The first prediction is the mean itself, which `previous = mean` yields.
      states[c].previous = channels[c].mean;
      states[c].context = channels[c].models * kClassModels;
    }
  }

  // Reconstructions of the token at absolute `position`, in units, into values[0 .. width).
  KV_HD Status row(kv_u64 position, kv_i32* values) {
    const kv_i64 scale = position < sink ? 1 : (kv_i64)sink_div;
    RangeDecoder d = coder;  // in registers for the row
    for (kv_u32 c = 0; c < width; ++c) {
      const Channel channel = channels[c];
      ChannelState state = states[c];
      kv_i32 q;
      if (KV_UNLIKELY(!decode_residual(d, models + state.context, q))) return kBadResidual;
      const kv_i64 value = predict(channel, state.previous) + q * scale;
      if (KV_UNLIKELY(value >= kValueLimit || value <= -kValueLimit)) return kBadValue;
      values[c] = (kv_i32)value;
      states[c].previous = (kv_i32)value;
      states[c].context = context_of(channel, q);
    }
    coder = d;
    return kOk;
  }
};

// Channel of lane-local index `i` in channel group `group`: a lane holds whole RoPE pairs (c, c + head_dim/2).
KV_HD kv_u32 lane_channel(kv_u32 head_dim, kv_u32 width, kv_u32 group, kv_u32 i) {
  const kv_u32 base = group * (width / 2);
  return i < width / 2 ? base + i : head_dim / 2 + base + i - width / 2;
}

}  // namespace kv
