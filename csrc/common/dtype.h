// Element types and activations as kernels know them: free of torch.
#pragma once

#include <cstdint>

namespace hf_fastpath {

enum class DType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

constexpr int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Names in Python: "none", "rms", "layer".
enum class Norm : int { kNone = 0, kRms = 1, kLayer = 2 };

// Names in Python: "none", "relu", "silu", "gelu_tanh", "gelu".
enum class Activation : int { kNone = 0, kRelu = 1, kSilu = 2, kGeluTanh = 3, kGelu = 4 };

}  // namespace hf_fastpath
