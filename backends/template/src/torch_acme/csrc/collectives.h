// The communication library: "acmeccl".
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace acme {

// Collectives of tensors on the device, sent over another library's wires, which sees them as tensors of the CPU.
c10::intrusive_ptr<c10d::Backend> make_collectives(c10::intrusive_ptr<c10d::Backend> wires);

}  // namespace acme
