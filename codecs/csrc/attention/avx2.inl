// Eight floats.
typedef __m256 Vec;
constexpr kv_u32 kLanes = 8;

KV_ATTEND Vec load(const float* at) { return _mm256_loadu_ps(at); }
KV_ATTEND void store(float* at, Vec x) { _mm256_storeu_ps(at, x); }
KV_ATTEND Vec all(float x) { return _mm256_set1_ps(x); }
KV_ATTEND Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
// The second where either is not a number.
KV_ATTEND Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
KV_ATTEND Vec magnitude(Vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
KV_ATTEND Vec round(Vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// x * 2^n; n is whole, from -127 on, which gives zero.
KV_ATTEND Vec times_power(Vec x, Vec n) {
  const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(bits));
}
KV_ATTEND __m128 fold(Vec a) { return _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)); }
KV_ATTEND float sum(Vec a) {
  const __m128 x = fold(a), y = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
KV_ATTEND float largest(Vec a) {
  const __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 y = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
KV_ATTEND void sum4(Vec a, Vec b, Vec c, Vec d, float* out) {
  __m128 w = fold(a), x = fold(b), y = fold(c), z = fold(d);
  _MM_TRANSPOSE4_PS(w, x, y, z);
  _mm_storeu_ps(out, _mm_add_ps(_mm_add_ps(w, x), _mm_add_ps(y, z)));
}
