// The kernels of one instruction set, in the namespace KV_FIB_LEVEL.

namespace kv::fib::KV_FIB_LEVEL {
namespace {

typedef float Vec __attribute__((vector_size(KV_FIB_BITS / 8)));
typedef kv_i32 Ints __attribute__((vector_size(KV_FIB_BITS / 8)));
constexpr kv_u32 kWidth = KV_FIB_BITS / 32;

inline Vec load(const float* at) {
  Vec x;
  std::memcpy(&x, at, sizeof x);
  return x;
}
inline void store(float* at, Vec x) { std::memcpy(at, &x, sizeof x); }
inline Vec all(float x) { return x - Vec{}; }
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// a * b + c, rounded once or twice: for what is looked at again. And a bit for each lane in which `mask` is not zero.
#if KV_FIB_BITS == 512
inline Vec about(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline kv_u32 lanes_of(Ints mask) { return _mm512_movepi32_mask((__m512i)mask); }
inline float largest_lane(Vec x) { return _mm512_reduce_max_ps(x); }
#elif KV_FIB_BITS == 256
inline Vec about(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline kv_u32 lanes_of(Ints mask) { return (kv_u32)_mm256_movemask_ps((__m256)mask); }
inline float largest_lane(Vec x) {
  const __m128 a = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 b = _mm_max_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}
#else
inline Vec about(Vec a, Vec b, Vec c) { return a * b + c; }
inline kv_u32 lanes_of(Ints mask) {
  mask &= Ints{1, 2, 4, 8};
  return (kv_u32)(mask[0] | mask[1] | mask[2] | mask[3]);
}
inline float largest_lane(Vec x) {
  const float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
  return a > b ? a : b;
}
#endif

#include "lanes.inl"
#include "nearest.inl"
#include "rotation.inl"

void decode(const Book& book, Batch& batch) {
  const kv_u32 d = book.d;
  gather(book.codewords, batch.index, book.blocks, batch.a);
  const float* const v = rotate_back(book, batch.a, batch.b);
  float norms[kLanes];
  for (kv_u32 l = 0; l < kLanes; ++l) norms[l] = from_float16(batch.norms[l]);
  to_rows(v, d, norms, batch.rows);
}

void encode(const Book& book, const Search& search, const float* const* vectors, Batch& batch) {
  const kv_u32 d = book.d;
  from_rows(vectors, d, batch.a);
  double squares[kLanes] = {};
  for (kv_u32 c = 0; c < d; ++c)
    for (kv_u32 l = 0; l < kLanes; ++l) squares[l] += (double)batch.a[c * kLanes + l] * (double)batch.a[c * kLanes + l];
  float inverse[kLanes];
  for (kv_u32 l = 0; l < kLanes; ++l) {
    const kv_u16 norm = to_float16_bits((float)std::sqrt(squares[l]));
    const bool fits = norm != 0 && norm < 0x7C00;
    batch.failed[l] = squares[l] == 0 ? kZeroNorm : fits ? 0 : kNormBeyondFloat16;
    batch.norms[l] = fits ? norm : 0;
    inverse[l] = fits ? 1.0f / from_float16(norm) : 0.0f;
  }
  float* const y = rotate(book, batch.a, batch.b);
  for (kv_u32 c = 0; c < d; ++c)
    for (kv_u32 l = 0; l < kLanes; l += kWidth) store(y + c * kLanes + l, load(y + c * kLanes + l) * load(inverse + l));
  find(search, y, book.blocks, batch.index);
}

void nearest(const Search& search, const float* points, kv_u64 n, kv_u32* index) {
  const kv_u32 k = search.finder->k;
  float t[kMostBlockDim * kLanes];
  kv_u32 found[kLanes];
  for (kv_u64 i = 0; i < n; i += kLanes) {
    const kv_u64 many = n - i < kLanes ? n - i : kLanes;
    const float* rows[kLanes];
    for (kv_u64 l = 0; l < kLanes; ++l) rows[l] = points + (i + (l < many ? l : 0)) * k;
    from_rows(rows, k, t);
    find(search, t, 1, found);
    std::memcpy(index + i, found, many * sizeof found[0]);
  }
}

constexpr Kernels kTable{encode, decode, nearest};

}  // namespace

inline constexpr Kernels kKernels = kTable;

}  // namespace kv::fib::KV_FIB_LEVEL
