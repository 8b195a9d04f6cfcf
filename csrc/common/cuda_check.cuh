// Errors of CUDA calls become C++ exceptions, which torch hands to Python. This file is free of torch.
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

namespace hf_fastpath {

inline void check_cuda(cudaError_t status, const char* call, const char* file, int line) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string("hf_fastpath: ") + call + " failed at " + file + ":" +
                           std::to_string(line) + ": " + cudaGetErrorString(status));
}

#define HF_FASTPATH_CUDA_CHECK(call) ::hf_fastpath::check_cuda((call), #call, __FILE__, __LINE__)

// Multiprocessors of the current device. A driver attribute, cached by the runtime: allowed during graph
// capture.
inline int multiprocessor_count() {
  int device = 0, count = 0;
  HF_FASTPATH_CUDA_CHECK(cudaGetDevice(&device));
  HF_FASTPATH_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

// Shared memory that a block may have on the current device.
inline int shared_bytes_of_block() {
  int device = 0, bytes = 0;
  HF_FASTPATH_CUDA_CHECK(cudaGetDevice(&device));
  HF_FASTPATH_CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return bytes;
}

// Lets blocks of a kernel have so many bytes of dynamic shared memory on the current device. What a kernel
// may have only grows: another thread may be about to launch it with more.
inline void allow_shared_memory(const void* kernel, size_t bytes) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, size_t> allowed;
  int device = 0;
  HF_FASTPATH_CUDA_CHECK(cudaGetDevice(&device));
  const std::lock_guard<std::mutex> lock(mutex);
  size_t& most = allowed[{kernel, device}];
  if (bytes <= most) return;
  HF_FASTPATH_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  most = bytes;
}

template <class... Params>
void allow_shared_memory(void (*kernel)(Params...), size_t bytes) {
  allow_shared_memory(reinterpret_cast<const void*>(kernel), bytes);
}

}  // namespace hf_fastpath
