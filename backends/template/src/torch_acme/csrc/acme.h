// What the parts of the simulated chip share: devices, their memory, and tensors in it seen from the host.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKeySet.h>

namespace acme {

inline constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;
inline constexpr c10::DispatchKeySet kKeys{c10::DispatchKey::PrivateUse1};

// Number of chips this process may use, and the one the calling thread uses now.
c10::DeviceIndex device_count();
c10::DeviceIndex current_device();
void set_device(c10::DeviceIndex index);

// The memory of the current chip, of which every chip has `bytes`.
c10::Allocator* allocator();
void set_memory_limit(size_t bytes);

// A chip's own generator of random numbers; the current chip's for -1.
const at::Generator& default_generator(c10::DeviceIndex index);

// The generator of torch for the CPU behind one of a chip's; behind the current chip's if none is given.
at::Generator host_generator(const std::optional<at::Generator>& given);

// The same memory as a tensor on the CPU: what makes this a simulation. Others are returned as they are.
at::Tensor host(const at::Tensor& tensor);

// Called once, when the library is loaded.
void register_device(c10::DeviceIndex count);

}  // namespace acme
