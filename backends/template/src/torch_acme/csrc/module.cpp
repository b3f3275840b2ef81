// What Python sees of the library: torch_acme._C.
#include "acme.h"
#include "collectives.h"

#include <torch/csrc/utils/pybind.h>

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("register_device", &acme::register_device);
  m.def("device_count", &acme::device_count);
  m.def("current_device", &acme::current_device);
  m.def("set_device", &acme::set_device);
  m.def("set_memory_limit", &acme::set_memory_limit);
  m.def("default_generator", &acme::default_generator);
  m.def("make_collectives", &acme::make_collectives);
}
