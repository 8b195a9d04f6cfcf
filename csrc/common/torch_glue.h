// What every torch-facing file needs: checked views of stable tensors, cheap allocation, numbers to enums.
// Only *_cpu.cpp and *_cuda.cpp include this; kernels stay free of torch.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "common/dtype.h"

namespace hf_fastpath {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline DType dtype_of(const Tensor& tensor, const char* op) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    default:
      STD_TORCH_CHECK(false, "hf_fastpath::", op,
                      ": dtype is not float32, float16 or bfloat16: cast the inputs");
  }
}

// Returns the type of a KV cache.
inline KvType kv_type_of(const Tensor& cache, const char* op) {
  switch (cache.scalar_type()) {
    case ScalarType::Char:
      return KvType::kInt8;
    case ScalarType::Float8_e4m3fn:
      return KvType::kFloat8;
    default:
      return kv_type(dtype_of(cache, op));
  }
}

// Refuses scales that are not those of a cache of this type.
inline void check_kv_scales(const Tensor& cache, const std::optional<Tensor>& scales, KvType type,
                            const char* op, const char* name) {
  STD_TORCH_CHECK(scales.has_value() == is_quantized(type), "hf_fastpath::", op, ": ", name,
                  " go with int8 and float8_e4m3fn caches, and with these only");
  if (!scales) return;
  STD_TORCH_CHECK(scales->scalar_type() == ScalarType::BFloat16 && scales->is_contiguous() &&
                      scales->dim() == 3 && scales->size(0) == cache.size(0) &&
                      scales->size(1) == cache.size(1) && scales->size(2) == cache.size(2),
                  "hf_fastpath::", op, ": ", name,
                  " has to be contiguous bfloat16 [batch, kv_heads, capacity]");
}

// Refuses a kv_table that is not one of caches of this type, or has no such row.
inline void check_kv_table(const std::optional<Tensor>& table, int64_t layer, KvType type, const char* op) {
  if (!table) return;
  const int64_t columns = is_quantized(type) ? kQuantizedTableColumns : kTableColumns;
  STD_TORCH_CHECK(table->scalar_type() == ScalarType::Long && table->dim() == 2 &&
                      table->size(1) == columns && layer >= 0 && layer < table->size(0),
                  "hf_fastpath::", op, ": kv_table has to be int64 [layers, ", columns,
                  "] with layer inside, layer is ", layer);
}

// The choice that a number of an op's schema stands for, of those up to `last`.
template <class Choice>
Choice choice_of(int64_t number, Choice last, const char* op, const char* argument) {
  STD_TORCH_CHECK(number >= 0 && number <= static_cast<int64_t>(last), "hf_fastpath::", op, ": ", argument,
                  " is ", number, ", expected 0 to ", static_cast<int64_t>(last));
  return static_cast<Choice>(number);
}

// What choice_of() is given for a choice that an op makes itself.
template <class Choice>
constexpr int64_t number_of(Choice choice) {
  return static_cast<int64_t>(choice);
}

inline Activation activation_of(int64_t number, const char* op) {
  return choice_of(number, Activation::kGelu, op, "activation");
}

// The tensor itself when it is contiguous, else a copy.
inline Tensor contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// The tensor itself when its rows are, of one or more dimensions; else a copy.
inline Tensor dense_rows(const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  return tensor.size(last) <= 1 || tensor.stride(last) == 1 ? tensor : torch::stable::contiguous(tensor);
}

// The tensor itself where it is contiguous and starts at a multiple of 16 bytes, else a copy.
inline Tensor aligned(const Tensor& tensor) {
  const Tensor whole = hf_fastpath::contiguous(tensor);
  return reinterpret_cast<uintptr_t>(whole.data_ptr()) % 16 == 0 ? whole : torch::stable::clone(whole);
}

// Uninitialized contiguous tensor like `like` (dtype, device) with these sizes, without a trip through the
// dispatcher.
inline Tensor empty_like_with_sizes(const Tensor& like, const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= sizes[i] > 0 ? sizes[i] : 1;
  }
  int32_t dtype, device_type, device_index;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                                  strides.data(), dtype, device_type, device_index, &handle));
  return Tensor(handle);
}

inline std::vector<int64_t> sizes_of(const Tensor& tensor) {
  std::vector<int64_t> sizes(tensor.dim());
  for (int64_t i = 0; i < tensor.dim(); ++i) sizes[i] = tensor.size(i);
  return sizes;
}

// Returns the tensor's sizes with another last one: the shape of a projection's output.
inline std::vector<int64_t> sizes_with_last(const Tensor& tensor, int64_t last) {
  std::vector<int64_t> sizes = sizes_of(tensor);
  sizes.back() = last;
  return sizes;
}

}  // namespace hf_fastpath
