// Checksums of frames and records.
#include "../crc32c.hpp"

#include "../threads.hpp"
#include "python.hpp"

namespace kv::bindings {

namespace {

// Below this the GIL stays: a thread that lets go of it may wait long to have it back.
constexpr kv_u64 kManyBytes = 256 << 10;
// No thread is started for less.
constexpr kv_u64 kBytesOfThread = 1 << 20;

template <class Work>
void without_gil(kv_u64 n_bytes, Work work) {
  if (n_bytes < kManyBytes) return work();
  nb::gil_scoped_release release;
  work();
}

kv_u32 checksum(kv_u32 crc, nb::handle data, bool portable) {
  Buffer buffer(data);
  without_gil(buffer.size(), [&] { crc = crc32c(crc, buffer.bytes(), buffer.size(), portable); });
  return crc;
}

// Of each frame: over its first `head` bytes, and over those from `payload` on; what lies between is the checksum.
Result<kv_u32> frame_checksums(nb::sequence frames, kv_u64 head, kv_u64 payload, unsigned n_threads, bool portable) {
  if (head > payload) invalid("frame_checksums: the payload begins inside the head");
  std::vector<Buffer> buffers;
  buffers.reserve(nb::len(frames));
  kv_u64 n_bytes = 0;
  for (nb::handle frame : frames) {
    buffers.emplace_back(frame);
    n_bytes += buffers.back().size();
  }
  kv_u32* checksums;
  auto array = new_array<kv_u32>({buffers.size()}, &checksums);
  without_gil(n_bytes, [&] {
    const auto work = [&](std::size_t i, char&) {
      const kv_u8* bytes = buffers[i].bytes();
      const kv_u64 n = buffers[i].size();
      checksums[i] = crc32c(0, bytes, std::min(n, head), portable);
      if (n > payload) checksums[i] = crc32c(checksums[i], bytes + payload, n - payload, portable);
    };
    run_pieces<char>(buffers.size(), (unsigned)std::min<kv_u64>(n_threads, n_bytes / kBytesOfThread), work);
  });
  return array;
}

}  // namespace

void bind_checksum(nb::module_& m) {
  m.def("crc32c", &checksum, "crc"_a, "data"_a, "portable"_a = false);
  m.def("frame_checksums", &frame_checksums, "frames"_a, "head"_a, "payload"_a, "n_threads"_a, "portable"_a = false);
}

}  // namespace kv::bindings
