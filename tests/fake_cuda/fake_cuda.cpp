// A CUDA device for torch's CPU build that does nothing: fake `cuda` tensors pass autograd and device guards.
// torch reads both registrations once, so this library must be loaded before torch (library.py).
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

// Called when the host waits for an event or a stream.
extern "C" { void (*fake_cuda_waits)() = nullptr; }

namespace {
using namespace c10;

void wait() {
  if (fake_cuda_waits) fake_cuda_waits();
}

const Device device(DeviceType::CUDA, 0);
const Stream stream(Stream::DEFAULT, device);

struct FakeGuard final : impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DeviceType::CUDA;
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return device; }
  Device getDevice() const override { return device; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream getStream(Device) const override { return stream; }
  Stream getDefaultStream(Device) const override { return stream; }
  Stream getNewStream(Device, int) const override { return stream; }
  Stream exchangeStream(Stream) const override { return stream; }
  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override { *event = (void*)this; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeEvent(void*) const override { wait(); }
  void synchronizeStream(const Stream&) const override { wait(); }
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};

struct FakeHooks final : at::CUDAHooksInterface {
  FakeHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  bool isPinnedPtr(const void*) const override { return false; }
};
}  // namespace

namespace c10 { C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard); }
namespace at { using ::FakeHooks; C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, FakeHooks) }
