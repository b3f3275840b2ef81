// The communication library. A chip has links of its own; the simulation sends its host memory over gloo.
//
// It is a c10d::Backend in C++, since DTensor's collectives (so FSDP2's full_tensor) call the one that is registered for
// the device, and don't see a process group written in Python. Every call has done its work when it returns, as
// everything on this device; only sending and receiving don't wait, since two ranks may send to each other first.
#include "collectives.h"

#include "acme.h"

#include <ATen/core/ivalue.h>

namespace acme {
namespace {

using at::Tensor;
using c10::intrusive_ptr;
using c10d::Work;
using Tensors = std::vector<Tensor>;

Tensors host(const Tensors& tensors) {
  Tensors views;
  views.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    views.push_back(acme::host(tensor));
  }
  return views;
}

std::vector<Tensors> host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> views;
  views.reserve(lists.size());
  for (const auto& tensors : lists) {
    views.push_back(host(tensors));
  }
  return views;
}

// Finished work, whose future holds the device's tensors: DDP goes on with what it finds there.
intrusive_ptr<Work> done(const Tensors& results) {
  std::vector<c10::Device> devices;
  for (const auto& tensor : results) {
    if (tensor.device().type() == kDeviceType) {
      devices.push_back(tensor.device());
    }
  }
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
  future->markCompleted(c10::IValue(results));
  return Work::create_from_future(future);
}

// Sending or receiving that goes on. It keeps the device's memory, and the view of it, alive.
class Transfer final : public Work {
 public:
  Transfer(intrusive_ptr<Work> work, Tensors tensors, Tensors views)
      : work_(std::move(work)), tensors_(std::move(tensors)), views_(std::move(views)) {}

  bool isCompleted() override {
    return work_->isCompleted();
  }
  bool isSuccess() const override {
    return work_->isSuccess();
  }
  int sourceRank() const override {
    return work_->sourceRank();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    return work_->wait(timeout);
  }
  void abort() override {
    work_->abort();
  }
  Tensors result() override {
    return tensors_;
  }

 private:
  intrusive_ptr<Work> work_;
  Tensors tensors_;
  Tensors views_;
};

// Like some vendors' libraries, this one has no mean: whoever wants one must sum and divide.
void check(const c10d::ReduceOp& op) {
  TORCH_CHECK(op != c10d::ReduceOp::AVG, "acmeccl has no reduction AVG");
}

class Collectives final : public c10d::Backend {
 public:
  explicit Collectives(intrusive_ptr<c10d::Backend> wires)
      : Backend(wires->getRank(), wires->getSize()), wires_(std::move(wires)) {}

  const std::string getBackendName() const override {
    return "acmeccl";
  }

  intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto views = host(tensors);
    wires_->broadcast(views, options)->wait();
    return done(tensors);
  }

  intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    check(options.reduceOp);
    auto views = host(tensors);
    wires_->allreduce(views, options)->wait();
    return done(tensors);
  }

  intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    check(options.reduceOp);
    auto views = host(tensors);
    wires_->allreduce_coalesced(views, options)->wait();
    return done(tensors);
  }

  intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    check(options.reduceOp);
    auto views = host(tensors);
    wires_->reduce(views, options)->wait();
    return done(tensors);
  }

  intrusive_ptr<Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto out = host(outputs);
    auto in = host(inputs);
    wires_->allgather(out, in, options)->wait();
    return done(outputs.at(0));
  }

  intrusive_ptr<Work> _allgather_base(
      Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    auto out = acme::host(output);
    auto in = acme::host(input);
    wires_->_allgather_base(out, in, options)->wait();
    return done({output});
  }

  intrusive_ptr<Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto out = host(outputs);
    auto in = host(inputs);
    wires_->allgather_into_tensor_coalesced(out, in, options)->wait();
    return done(outputs);
  }

  intrusive_ptr<Work> reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    check(options.reduceOp);
    auto out = host(outputs);
    auto in = host(inputs);
    wires_->reduce_scatter(out, in, options)->wait();
    return done(outputs);
  }

  intrusive_ptr<Work> _reduce_scatter_base(
      Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    check(options.reduceOp);
    auto out = acme::host(output);
    auto in = acme::host(input);
    wires_->_reduce_scatter_base(out, in, options)->wait();
    return done({output});
  }

  intrusive_ptr<Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    check(options.reduceOp);
    auto out = host(outputs);
    auto in = host(inputs);
    wires_->reduce_scatter_tensor_coalesced(out, in, options)->wait();
    return done(outputs);
  }

  intrusive_ptr<Work> gather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto out = host(outputs);
    auto in = host(inputs);
    wires_->gather(out, in, options)->wait();
    return done(outputs.empty() ? Tensors{} : outputs[0]);
  }

  intrusive_ptr<Work> scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto out = host(outputs);
    auto in = host(inputs);
    wires_->scatter(out, in, options)->wait();
    return done(outputs);
  }

  intrusive_ptr<Work> alltoall_base(
      Tensor& output,
      Tensor& input,
      std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    auto out = acme::host(output);
    auto in = acme::host(input);
    wires_->alltoall_base(out, in, output_sizes, input_sizes, options)->wait();
    return done({output});
  }

  intrusive_ptr<Work> alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    auto out = host(outputs);
    auto in = host(inputs);
    wires_->alltoall(out, in, options)->wait();
    return done(outputs);
  }

  intrusive_ptr<Work> send(Tensors& tensors, int to, int tag) override {
    auto views = host(tensors);
    auto work = wires_->send(views, to, tag);
    return c10::make_intrusive<Transfer>(std::move(work), tensors, std::move(views));
  }

  intrusive_ptr<Work> recv(Tensors& tensors, int from, int tag) override {
    auto views = host(tensors);
    auto work = wires_->recv(views, from, tag);
    return c10::make_intrusive<Transfer>(std::move(work), tensors, std::move(views));
  }

  intrusive_ptr<Work> recvAnysource(Tensors& tensors, int tag) override {
    auto views = host(tensors);
    auto work = wires_->recvAnysource(views, tag);
    return c10::make_intrusive<Transfer>(std::move(work), tensors, std::move(views));
  }

  intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override {
    wires_->barrier(options)->wait();
    return done({});
  }

  void setTimeout(std::chrono::milliseconds timeout) override {
    wires_->setTimeout(timeout);
  }
  void setSequenceNumberForGroup() override {
    wires_->setSequenceNumberForGroup();
  }
  uint64_t getSequenceNumberForGroup() override {
    return wires_->getSequenceNumberForGroup();
  }
  void abort() override {
    wires_->abort();
  }
  void shutdown() override {
    wires_->shutdown();
  }

 private:
  intrusive_ptr<c10d::Backend> wires_;
};

}  // namespace

intrusive_ptr<c10d::Backend> make_collectives(intrusive_ptr<c10d::Backend> wires) {
  return c10::make_intrusive<Collectives>(std::move(wires));
}

}  // namespace acme
