// Element types and activations as kernels know them: free of torch.
#pragma once

#include <cstdint>

namespace hf_fastpath {

enum class DType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

constexpr int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// What a KV cache holds: floats, or quants in int8 or fp8 (e4m3) with a bfloat16 scale a head and position.
enum class KvType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kInt8 = 3, kFloat8 = 4 };

constexpr KvType kv_type(DType dtype) { return static_cast<KvType>(dtype); }

constexpr bool is_quantized(KvType type) { return type == KvType::kInt8 || type == KvType::kFloat8; }

constexpr int64_t element_size(KvType type) {
  return is_quantized(type) ? 1 : type == KvType::kFloat32 ? 4 : 2;
}

// Columns of a kv_table: address of K, address of V, capacity; of quantized caches the addresses of the
// scales of K and V follow.
constexpr int64_t kTableColumns = 3, kQuantizedTableColumns = 5;

// These are the largest magnitudes of quants; hf_fastpath/ops/kv_cache.py has the same.
constexpr float kLargestInt8 = 127.0f, kLargestFloat8 = 448.0f;

// What follows are choices in ops' schemas, by number: hf_fastpath/choices.py has the names.
// kRmsOffset: the factors of an RMS norm are 1 + weight.
enum class NormKind : int { kNone = 0, kRms = 1, kLayer = 2, kRmsOffset = 3 };

constexpr bool is_rms(NormKind kind) { return kind == NormKind::kRms || kind == NormKind::kRmsOffset; }

constexpr float weight_offset(NormKind kind) { return kind == NormKind::kRmsOffset ? 1.0f : 0.0f; }

enum class Activation : int { kNone = 0, kRelu = 1, kSilu = 2, kGeluTanh = 3, kGelu = 4 };

// How fused_gelu computes GELU.
enum class Approximation : int { kNone = 0, kTanh = 1 };

// This number follows those of the activations: a gate of fused_experts that clamps gate and up.
constexpr int64_t kClampedSwiglu = 5;
// The next one is relu(up)^2, which experts without a gate have.
constexpr int64_t kSquaredRelu = 6;

}  // namespace hf_fastpath
