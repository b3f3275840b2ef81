// The operations: the few that know of the device's memory, and torch's own CPU kernels for all others.
#include "acme.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace acme {

using at::IntArrayRef;
using at::Tensor;
using std::optional;

Tensor host(const Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) {
    return tensor;
  }
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
}

namespace {

// ------------------------------------------------------------------------------------------------------------ memory

Tensor empty(
    IntArrayRef size,
    optional<at::ScalarType> dtype,
    optional<at::Layout>,
    optional<at::Device> device,
    optional<bool>,
    optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, allocator(), kKeys, dtype.value_or(at::kFloat), format);
}

Tensor empty_strided(
    IntArrayRef size,
    IntArrayRef stride,
    optional<at::ScalarType> dtype,
    optional<at::Layout>,
    optional<at::Device> device,
    optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, allocator(), kKeys, dtype.value_or(at::kFloat));
}

Tensor copy_from(const Tensor& source, const Tensor& destination, bool) {
  host(destination).copy_(host(source));
  return destination;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& destination) {
  destination.resize_(source.sizes());
  return copy_from(source, destination, false);
}

at::Scalar local_scalar(const Tensor& tensor) {
  return host(tensor).item();
}

// Host memory, and nothing runs on after a call: there is nothing to remember.
void record_stream(Tensor&, at::Stream) {}

// ------------------------------------------------------------------------- convolution, which has no fallback of torch's

Tensor to_device(const Tensor& value, at::Device device) {
  if (!value.defined()) {
    return value;
  }
  auto made = at::empty_strided(value.sizes(), value.strides(), value.options().device(device));
  host(made).copy_(value);
  return made;
}

Tensor convolution(
    const Tensor& input,
    const Tensor& weight,
    const optional<Tensor>& bias,
    IntArrayRef stride,
    IntArrayRef padding,
    IntArrayRef dilation,
    bool transposed,
    IntArrayRef output_padding,
    int64_t groups) {
  const auto on_host = bias.has_value() ? optional<Tensor>(host(*bias)) : bias;
  const auto result = at::convolution(
      host(input), host(weight), on_host, stride, padding, dilation, transposed, output_padding, groups);
  return to_device(result, input.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient,
    const Tensor& input,
    const Tensor& weight,
    IntArrayRef stride,
    IntArrayRef padding,
    IntArrayRef dilation,
    bool transposed,
    IntArrayRef output_padding,
    int64_t groups,
    std::array<bool, 3> wanted) {
  const int64_t channels = gradient.size(1);
  const auto [input_gradient, weight_gradient, bias_gradient] = at::convolution_backward(
      host(gradient),
      host(input),
      host(weight),
      IntArrayRef(channels),
      stride,
      padding,
      dilation,
      transposed,
      output_padding,
      groups,
      wanted);
  const auto device = input.device();
  return {to_device(input_gradient, device), to_device(weight_gradient, device), to_device(bias_gradient, device)};
}

// ----------------------------------------------------------------------------- random numbers, of the device's generator

Tensor& uniform_(Tensor& self, double from, double to, optional<at::Generator> generator) {
  host(self).uniform_(from, to, host_generator(generator));
  return self;
}

Tensor& normal_(Tensor& self, double mean, double deviation, optional<at::Generator> generator) {
  host(self).normal_(mean, deviation, host_generator(generator));
  return self;
}

Tensor& random_(Tensor& self, optional<at::Generator> generator) {
  host(self).random_(host_generator(generator));
  return self;
}

Tensor& random_to(Tensor& self, int64_t to, optional<at::Generator> generator) {
  host(self).random_(to, host_generator(generator));
  return self;
}

Tensor& random_from(Tensor& self, int64_t from, optional<int64_t> to, optional<at::Generator> generator) {
  host(self).random_(from, to, host_generator(generator));
  return self;
}

Tensor& bernoulli_(Tensor& self, double p, optional<at::Generator> generator) {
  host(self).bernoulli_(p, host_generator(generator));
  return self;
}

Tensor& bernoulli_tensor_(Tensor& self, const Tensor& p, optional<at::Generator> generator) {
  host(self).bernoulli_(host(p), host_generator(generator));
  return self;
}

// ---------------------------------------------------------------------------------------------------------- all others

void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);

  // Views: torch's own arithmetic on shapes, which must not go through a copy on the host.
  m.impl("as_strided", [](const Tensor& self, IntArrayRef size, IntArrayRef stride, optional<int64_t> offset) {
    return at::cpu::as_strided(self, size, stride, offset);
  });
  m.impl("view", [](const Tensor& self, IntArrayRef size) { return at::native::view(self, size); });
  m.impl("_reshape_alias", [](const Tensor& self, IntArrayRef size, IntArrayRef stride) {
    return at::native::_reshape_alias(self, size, stride);
  });
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", [](const Tensor& self, IntArrayRef size, optional<at::MemoryFormat> format) -> const Tensor& {
    return at::native::resize_(self, size, format);
  });
  m.impl(
      "set_.source_Storage_storage_offset",
      [](Tensor& self, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) -> Tensor& {
        return at::cpu::set_(self, std::move(source), offset, size, stride);
      });
  m.impl("set_.source_Tensor", [](Tensor& self, const Tensor& source) -> Tensor& {
    return at::cpu::set_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
  });

  m.impl("uniform_", &uniform_);
  m.impl("normal_", &normal_);
  m.impl("random_", &random_);
  m.impl("random_.to", &random_to);
  m.impl("random_.from", &random_from);
  m.impl("bernoulli_.float", &bernoulli_);
  m.impl("bernoulli_.Tensor", &bernoulli_tensor_);
}

}  // namespace acme
