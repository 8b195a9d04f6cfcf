// Torch-free launch of a router's choice on a GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/dtype.h"

namespace hf_fastpath {

constexpr int kMaxChoices = 32;     // a lane of a warp keeps one
constexpr int kMaxRoutedTo = 1024;  // experts to choose from: 32 a lane

struct TopkSoftmaxParams {
  const void* logits;  // [rows, num_experts], contiguous
  int64_t* ids;        // [rows, top_k], written
  float* weights;      // [rows, top_k], written
  int rows, num_experts, top_k;
  bool normalized;           // weights of a row sum to one
  bool rounded;              // to dtype
  DType dtype;               // of the logits
  bool programmatic_launch;  // may start before the kernel in front on the stream is complete
};

void launch_topk_softmax(const TopkSoftmaxParams& params, cudaStream_t stream);

}  // namespace hf_fastpath
