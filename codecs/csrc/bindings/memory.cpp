// Memory: pages of mappings, and many buffers into one.
#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cstring>

#include "../threads.hpp"
#include "python.hpp"

namespace kv::bindings {

namespace {

// Drop the pages of a file mapping that hold these bytes from this process: they stay in the page cache, and the
// next access maps them again. Reading a large range thus holds no more than what it works on. Only for views of a
// file mapping: anywhere else this would lose data.
void release_pages(nb::handle data) {
  if (!PyMemoryView_Check(data.ptr()) || !PyMemoryView_GET_BUFFER(data.ptr())->readonly)
    invalid("release_pages: a read-only memoryview of a file mapping expected");
#if defined(__unix__) || defined(__APPLE__)
  Buffer buffer(data);
  const std::uintptr_t page = (std::uintptr_t)sysconf(_SC_PAGESIZE);
  const std::uintptr_t begin = (std::uintptr_t)buffer.bytes() / page * page;
  const std::uintptr_t end = ((std::uintptr_t)buffer.bytes() + buffer.size() + page - 1) / page * page;
  if (begin < end) madvise((void*)begin, end - begin, MADV_DONTNEED);
#else
  (void)data;
#endif
}

// Copy parts into one buffer, on n threads: part i to offsets[i] - start, what of it lies inside. Offsets ascend and
// parts do not overlap; bytes between them stay as they are.
void gather(nb::sequence part_list, const Array1<kv_u64>& offsets, kv_u64 start,
            nb::ndarray<kv_u8, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu> out, unsigned n_threads) {
  const std::size_t n = nb::len(part_list);
  if (offsets.shape(0) != n) invalid("gather: one offset a part expected");
  std::vector<Buffer> parts;
  parts.reserve(n);
  for (nb::handle part : part_list) parts.emplace_back(part);
  for (std::size_t i = 0; i < n; ++i) {
    kv_u64 end;
    if (__builtin_add_overflow(offsets.data()[i], parts[i].size(), &end)) invalid("gather: an offset is out of range");
    if (i + 1 < n && end > offsets.data()[i + 1]) invalid("gather: parts overlap");
  }
  nb::gil_scoped_release release;
  struct Nothing {};
  constexpr kv_u64 kPiece = 1 << 20;
  const kv_u64 size = out.shape(0);
  kv_u8* const target = out.data();
  run_pieces<Nothing>((size + kPiece - 1) / kPiece, n_threads, [&](std::size_t piece, Nothing&) {
    const kv_u64 first = start + piece * kPiece, last = start + std::min(size, (piece + 1) * kPiece);
    const kv_u64* const begin = offsets.data();
    std::size_t i = (std::size_t)(std::upper_bound(begin, begin + n, first) - begin);
    for (i -= i > 0; i < n && begin[i] < last; ++i) {
      const kv_u64 lo = std::max(first, begin[i]), hi = std::min(last, begin[i] + parts[i].size());
      if (lo < hi) std::memcpy(target + (lo - start), parts[i].bytes() + (lo - begin[i]), hi - lo);
    }
  });
}

}  // namespace

void bind_memory(nb::module_& m) {
  m.def("release_pages", &release_pages, "data"_a);
  m.def("gather", &gather, "parts"_a, "offsets"_a, "start"_a, "out"_a, "n_threads"_a);
}

}  // namespace kv::bindings
