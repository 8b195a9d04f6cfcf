// What every torch-facing CUDA file needs: the tensor's device made current, and torch's current stream on
// it. Only *_cuda.cpp files include this.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <cstdint>

#include "common/callable_ops.h"
#include "common/cuda_check.cuh"
#include "common/torch_glue.h"

namespace hf_fastpath {

// Makes the tensor's device current and puts the previous one back.
class DeviceGuard {
 public:
  explicit DeviceGuard(const Tensor& tensor) : device_(tensor.get_device_index()) {
    HF_FASTPATH_CUDA_CHECK(cudaGetDevice(&previous_));
    if (device_ != previous_) HF_FASTPATH_CUDA_CHECK(cudaSetDevice(device_));
  }
  ~DeviceGuard() {
    if (device_ != previous_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  int device() const { return device_; }

 private:
  int device_;
  int previous_ = 0;
};

// torch's current stream on `device`. The symbol is looked up at run time, so that the library links on a
// machine whose torch has no CUDA; whoever holds a CUDA tensor has libtorch_cuda loaded.
inline cudaStream_t current_stream(int device) {
  using GetStream = int32_t (*)(int32_t device_index, void** stream);
  static const GetStream get_stream = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    void* symbol = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
    return reinterpret_cast<GetStream>(symbol);
  }();
  STD_TORCH_CHECK(
      get_stream != nullptr,
      "hf_fastpath: this torch has no aoti_torch_get_current_cuda_stream: install a CUDA build of "
      "torch 2.10 or newer");
  void* stream = nullptr;
  STD_TORCH_CHECK(get_stream(device, &stream) == 0, "hf_fastpath: no current CUDA stream on device ", device);
  return static_cast<cudaStream_t>(stream);
}

// Address of an optional tensor's first element; null when it is absent.
inline const void* data_or_null(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->data_ptr() : nullptr;
}

}  // namespace hf_fastpath
