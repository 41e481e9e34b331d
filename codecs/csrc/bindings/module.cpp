// The module kvcodecs._core.
#include "python.hpp"

namespace {

void translate_fault(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const kv::Fault& fault) {
    const nanobind::object type = nanobind::module_::import_("kvcodecs.errors").attr(fault.kind);
    PyErr_SetString(type.ptr(), fault.message.c_str());
  }
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "C++ core of kvcodecs; its Python callers check shapes and own the documentation.";
  nanobind::register_exception_translator(translate_fault);
  nanobind::set_leak_warnings(false);
  kv::bindings::bind_headers(m);
  kv::bindings::bind_tensor(m);
  kv::bindings::bind_statistics(m);
  kv::bindings::bind_tkv1(m);
  kv::bindings::bind_kvr1(m);
  kv::bindings::bind_ggml(m);
  kv::bindings::bind_fibquant(m);
  kv::bindings::bind_fibquant_build(m);
  kv::bindings::bind_attention(m);
  kv::bindings::bind_memory(m);
  kv::bindings::bind_checksum(m);
}
