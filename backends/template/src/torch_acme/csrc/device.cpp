// The devices: how many there are, which is the current one, their memory and their random number generators.
#include "acme.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

namespace acme {
namespace {

constexpr int kMaxDevices = 16;

c10::DeviceIndex count = 0;
thread_local c10::DeviceIndex current = 0;

// ------------------------------------------------------------------------------------------------------------ memory

// malloc, with what torch.accelerator wants to know about it. There is no cache, so reserved is allocated.
class Memory final : public c10::DeviceAllocator {
  struct Block {
    void* data;
    size_t size;
    c10::DeviceIndex device;
  };

 public:
  c10::DataPtr allocate(size_t size) override {
    const auto device = current;
    if (size == 0) {
      return {nullptr, nullptr, &release, c10::Device(kDeviceType, device)};
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& stats = stats_[device];
    const auto used = static_cast<size_t>(stats.allocated_bytes[0].current);
    void* data = used + size > limit_ ? nullptr : std::malloc(size);
    if (data == nullptr) {
      ++stats.num_ooms;
    }
    // In the chip's own words, which no framework can know.
    TORCH_CHECK(data != nullptr, "acmeMalloc: status 7 (no free blocks) for ", size, " bytes on acme:", int(device));
    account(stats, size, true);
    return {data, new Block{data, size, device}, &release, c10::Device(kDeviceType, device)};
  }

  void set_limit(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    limit_ = bytes;
  }

  bool initialized() override {
    return true;
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stats_[device];
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stat : byte_stats(stats_[device])) {
      stat->reset_peak();
    }
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stat : byte_stats(stats_[device])) {
      stat->reset_accumulated();
    }
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return {limit_ - static_cast<size_t>(stats_[device].allocated_bytes[0].current), limit_};
  }

  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}

  void copy_data(void* destination, const void* source, size_t size) const override {
    default_copy_data(destination, source, size);
  }

 private:
  static std::vector<c10::CachingAllocator::Stat*> byte_stats(c10::CachingDeviceAllocator::DeviceStats& stats) {
    return {&stats.allocated_bytes[0], &stats.reserved_bytes[0], &stats.active_bytes[0]};
  }

  static void account(c10::CachingDeviceAllocator::DeviceStats& stats, size_t size, bool taken) {
    for (auto* stat : byte_stats(stats)) {
      taken ? stat->increase(size) : stat->decrease(size);
    }
  }

  static void release(void* context);

  std::mutex mutex_;
  size_t limit_ = size_t{1} << 31;
  c10::CachingDeviceAllocator::DeviceStats stats_[kMaxDevices];
};

// Never destroyed: tensors may live longer than this library's static objects.
Memory& memory() {
  static auto* instance = new Memory;
  return *instance;
}

void Memory::release(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    const std::lock_guard<std::mutex> lock(memory().mutex_);
    account(memory().stats_[block->device], block->size, false);
  }
  std::free(block->data);
  delete block;
}

REGISTER_ALLOCATOR(kDeviceType, &memory());

// ---------------------------------------------------------------------------------------------------- random numbers

// One of torch's generators for the CPU, under the name of a chip: kernels draw from it, users seed and save it.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex index, at::Generator host = at::detail::createCPUGenerator())
      : GeneratorImpl(c10::Device(kDeviceType, index), kKeys), host_(std::move(host)) {}

  const at::Generator& host() const {
    return host_;
  }

  void set_current_seed(uint64_t seed) override {
    host_.set_current_seed(seed);
  }
  uint64_t current_seed() const override {
    return host_.current_seed();
  }
  uint64_t seed() override {
    return host_.seed();
  }
  void set_offset(uint64_t offset) override {
    host_.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return host_.get_offset();
  }
  void set_state(const c10::TensorImpl& state) override {
    host_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  Generator* clone_impl() const override {
    return new Generator(device().index(), host_.clone());
  }

  at::Generator host_;
};

// --------------------------------------------------------------------------------- what torch asks an accelerator for

// Work is done when a call returns, so there is one stream, and every event has happened.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kDeviceType;

  c10::DeviceType type() const override {
    return kDeviceType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    set_device(device.index());
    return before;
  }
  c10::Device getDevice() const override {
    return c10::Device(kDeviceType, current);
  }
  void setDevice(c10::Device device) const override {
    set_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return count;
  }

  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device.has_index() ? device : getDevice());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return getStream(device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getStream(device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return getStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return getStream(stream.device());
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}

  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void synchronizeEvent(void*) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return count > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return count;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current;
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    set_device(index);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = current;
    set_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current : index);
  }
  // Host memory needs no pinning: nothing is copied over a bus.
  bool isPinnedPtr(const void*) const override {
    return false;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return c10::GetCPUAllocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    const c10::DeviceGuard guard(storage.device());
    auto* impl = storage.unsafeGetStorageImpl();
    auto data = memory().allocate(size);
    if (const auto kept = std::min(size, impl->nbytes()); kept > 0) {
      std::memcpy(data.get(), impl->data(), kept);
    }
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(size);
  }
};

}  // namespace

c10::DeviceIndex device_count() {
  return count;
}

c10::DeviceIndex current_device() {
  return current;
}

void set_device(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < count, "there is no device acme:", int(index), "; there are ", int(count));
  current = index;
}

c10::Allocator* allocator() {
  return &memory();
}

void set_memory_limit(size_t bytes) {
  memory().set_limit(bytes);
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* generators = [] {
    auto* made = new std::vector<at::Generator>;
    for (c10::DeviceIndex each = 0; each < count; ++each) {
      made->push_back(at::make_generator<Generator>(each));
    }
    return made;
  }();
  return generators->at(index < 0 ? current : index);
}

at::Generator host_generator(const std::optional<at::Generator>& given) {
  const auto& chosen = given.has_value() && given->defined() ? *given : default_generator(-1);
  return chosen.get<Generator>()->host();
}

void register_device(c10::DeviceIndex devices) {
  TORCH_CHECK(devices <= kMaxDevices, "the simulation has at most ", kMaxDevices, " chips, not ", int(devices));
  count = devices;
  static auto* hooks = new Hooks;
  at::RegisterPrivateUse1HooksInterface(hooks);
}

}  // namespace acme
