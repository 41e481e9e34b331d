// Mapped memory.
#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#include <unistd.h>
#endif

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

}  // namespace

void bind_memory(nb::module_& m) {
  m.def("release_pages", &release_pages, "data"_a);
}

}  // namespace kv::bindings
