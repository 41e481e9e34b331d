#include "decode.hpp"

#include <cstring>

#include "../half.hpp"

namespace kv::ggml {

namespace portable {
#include "decode.inl"
}

#if KV_X86
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
namespace avx2 {
#include "decode.inl"
}
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c")
namespace avx512 {
#include "decode.inl"
}
#pragma GCC pop_options
#endif

Decode decoder(kv_u32 scheme, int level) {
#if KV_X86
  if (level == kAvx512) return avx512::decoder(scheme);
  if (level == kAvx2) return avx2::decoder(scheme);
#endif
  (void)level;
  return portable::decoder(scheme);
}

}  // namespace kv::ggml
