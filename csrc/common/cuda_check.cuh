// Errors of CUDA calls become C++ exceptions, which torch hands to Python. Free of torch.
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

// Whether the current device has Hopper's instructions (compute capability 9.0) and this library code with
// them: one that was made for older devices alone runs on newer ones through its PTX.
inline bool has_hopper_code() {
#ifdef __CUDA_ARCH_LIST__
  constexpr int kArchs[] = {__CUDA_ARCH_LIST__};
  bool compiled = false;
  for (const int arch : kArchs) compiled = compiled || arch >= 900;
  int device = 0, major = 0;
  HF_FASTPATH_CUDA_CHECK(cudaGetDevice(&device));
  HF_FASTPATH_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  return compiled && major >= 9;
#else
#error "has_hopper_code() has to be compiled by nvcc"
#endif
}

}  // namespace hf_fastpath
