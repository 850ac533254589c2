// A CUDA device that exists for torch's bookkeeping only: one device, one stream, events that have
// always happened.  native.py compiles it against the headers of the installed torch and loads it
// before torch, whose CPU build asks for CUDA's hooks once and keeps the answer.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at {
// The name is torch's: its registry looks for a class called CUDAHooks.
struct CUDAHooks : public CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
} // namespace at

namespace {
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

Device device() { return Device(c10::DeviceType::CUDA, 0); }

// torch's own guard without effect cannot answer for events, which backward passes use.
struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return device(); }
  Device getDevice() const override { return device(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, device()); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, device()); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, device()); }
  Stream exchangeStream(Stream) const override { return Stream(Stream::DEFAULT, device()); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};
} // namespace

extern "C" void set_cuda_guard() {
  constexpr auto cuda = static_cast<size_t>(c10::DeviceType::CUDA);
  c10::impl::device_guard_impl_registry[cuda].store(new Guard());
}
