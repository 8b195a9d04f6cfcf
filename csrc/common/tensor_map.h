// Descriptions of tensors for Hopper's tensor copies.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/cuda_check.cuh"

namespace hf_fastpath {

// A tensor of three dimensions, the innermost first: elements, bytes from one to the next of the two outer,
// and the elements that a copy takes.
struct TensorTiles {
  CUtensorMapDataType type;
  CUtensorMapSwizzle swizzle;
  uint64_t sizes[3];
  uint64_t strides[2];
  uint32_t box[3];
};

inline CUtensorMap tensor_map(const void* data, const TensorTiles& tiles) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    HF_FASTPATH_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                            cudaEnableDefault, &result));
    return reinterpret_cast<Encode>(found);
  }();
  const cuuint64_t sizes[] = {tiles.sizes[0], tiles.sizes[1], tiles.sizes[2]};
  const cuuint64_t strides[] = {tiles.strides[0], tiles.strides[1]};
  const cuuint32_t steps[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult status = encode(&map, tiles.type, 3, const_cast<void*>(data), sizes, strides, tiles.box,
                                 steps, CU_TENSOR_MAP_INTERLEAVE_NONE, tiles.swizzle,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error("hf_fastpath: cuTensorMapEncodeTiled failed: " +
                             std::to_string(static_cast<int>(status)));
  }
  return map;
}

}  // namespace hf_fastpath
