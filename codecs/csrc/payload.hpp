// Bytes that a plan refers to.
#pragma once

#include "lane.hpp"

namespace kv {

struct Payload {
  const kv_u8* bytes;
  kv_u64 n_bytes;
};

}  // namespace kv
