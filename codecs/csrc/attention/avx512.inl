// Sixteen floats.
typedef __m512 Vec;
constexpr kv_u32 kLanes = 16;

KV_ATTEND Vec load(const float* at) { return _mm512_loadu_ps(at); }
KV_ATTEND void store(float* at, Vec x) { _mm512_storeu_ps(at, x); }
KV_ATTEND Vec all(float x) { return _mm512_set1_ps(x); }
KV_ATTEND Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
// The second where either is not a number.
KV_ATTEND Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
KV_ATTEND Vec magnitude(Vec a) { return _mm512_abs_ps(a); }
KV_ATTEND Vec round(Vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// x * 2^n; n is whole, from -127 on, which gives zero.
KV_ATTEND Vec times_power(Vec x, Vec n) {
  const __m512i bits = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
  return _mm512_mul_ps(x, _mm512_castsi512_ps(bits));
}
KV_ATTEND float sum(Vec a) { return _mm512_reduce_add_ps(a); }
KV_ATTEND float largest(Vec a) { return _mm512_reduce_max_ps(a); }
KV_ATTEND __m128 fold(Vec a) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
KV_ATTEND void sum4(Vec a, Vec b, Vec c, Vec d, float* out) {
  __m128 w = fold(a), x = fold(b), y = fold(c), z = fold(d);
  _MM_TRANSPOSE4_PS(w, x, y, z);
  _mm_storeu_ps(out, _mm_add_ps(_mm_add_ps(w, x), _mm_add_ps(y, z)));
}
