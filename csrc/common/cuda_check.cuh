// Errors of CUDA calls become C++ exceptions, which torch hands to Python. This file is free of torch.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

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

}  // namespace hf_fastpath
