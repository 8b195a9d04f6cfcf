// Arguments of lora_up's kernels on every device: free of torch.
#pragma once

#include "common/lora.h"

namespace hf_fastpath {

struct LoraUpParams {
  DType dtype;                          // of base, residual and out
  const void* base;                     // [rows, features], contiguous
  const float* hidden;                  // [rows, ranks], contiguous
  LoraMatrices matrices;                // [some features, rank] each
  float scale[kMaxLoraMatrices];        // factor of each matrix's product
  int first_feature[kMaxLoraMatrices];  // of base, to which its product is added
  const int* chosen;                    // [rows], the owner whose matrices a row takes; null: all matrices
  int owner[kMaxLoraMatrices];          // of each matrix
  const void* residual;                 // like out, contiguous, or null
  void* out;                            // [rows, features], or half as many if gated; contiguous
  int rows, features;                   // rows: 1 to kMaxLoraRows
  int outputs;                          // features of out
  bool gated;                           // out = activation(first half of the sums) * second half
  Activation activation;
  bool programmatic_launch;  // may read matrices and chosen before the kernel in front on the stream is
                             // complete
};

}  // namespace hf_fastpath
