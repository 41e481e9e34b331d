#include "encode.hpp"

#include "encode_families.hpp"

namespace kv::ggml {

Encode encoder(kv_u32 scheme, int level) {
  Encode encode = plain_encoder(scheme, level);
  if (encode == nullptr) encode = k_encoder(scheme, level);
  return encode != nullptr ? encode : iq_encoder(scheme, level);
}

}  // namespace kv::ggml
