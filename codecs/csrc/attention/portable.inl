// Four floats, as the compiler knows them on any CPU.
typedef float Vec __attribute__((vector_size(16)));
typedef kv_i32 Bits __attribute__((vector_size(16)));
constexpr kv_u32 kLanes = 4;

KV_ATTEND Vec load(const float* at) {
  Vec x;
  std::memcpy(&x, at, sizeof x);
  return x;
}
KV_ATTEND void store(float* at, Vec x) { std::memcpy(at, &x, sizeof x); }
KV_ATTEND Vec all(float x) { return Vec{x, x, x, x}; }
KV_ATTEND Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
// The second where either is not a number.
KV_ATTEND Vec max(Vec a, Vec b) { return a > b ? a : b; }
KV_ATTEND Vec magnitude(Vec a) { return (Vec)((Bits)a & 0x7FFFFFFF); }
// Of magnitudes below 2^22.
KV_ATTEND Vec round(Vec a) { return (a + 12582912.0f) - 12582912.0f; }
// x * 2^n; n is whole, from -127 on, which gives zero.
KV_ATTEND Vec times_power(Vec x, Vec n) { return x * (Vec)((__builtin_convertvector(n, Bits) + 127) << 23); }
KV_ATTEND float sum(Vec a) { return (a[0] + a[1]) + (a[2] + a[3]); }
KV_ATTEND float largest(Vec a) {
  float most = a[0];
  for (int i = 1; i < 4; ++i) most = most > a[i] ? most : a[i];
  return most;
}
KV_ATTEND void sum4(Vec a, Vec b, Vec c, Vec d, float* out) {
  out[0] = sum(a);
  out[1] = sum(b);
  out[2] = sum(c);
  out[3] = sum(d);
}
