// Checked lists of LoRA adapters' matrices. This header is torch-facing.
#pragma once

#include <optional>
#include <vector>

#include "common/lora.h"
#include "common/torch_glue.h"

namespace hf_fastpath {

// A matrix, x and the base product have no more elements than that: kernels count threads in 32 bits.
constexpr int64_t kMaxLoraElements = int64_t(1) << 30, kMaxLoraFeatures = int64_t(1) << 26;

// The matrices beside rows of type `dtype`. `rank_dim`: the dimension of a matrix that is its rank.
inline LoraMatrices lora_matrices(const std::vector<Tensor>& weights, DType dtype, int rank_dim,
                                  const char* op) {
  STD_TORCH_CHECK(!weights.empty() && weights.size() <= size_t(kMaxLoraMatrices), "hf_fastpath::", op, ": ",
                  weights.size(), " weights, expected 1 to ", kMaxLoraMatrices);
  LoraMatrices matrices = {};
  matrices.dtype = dtype_of(weights[0], op);
  STD_TORCH_CHECK(matrices.dtype == dtype || matrices.dtype == DType::kFloat32, "hf_fastpath::", op,
                  ": weights have another dtype than their input, and not float32");
  int64_t ranks = 0;
  for (const Tensor& weight : weights) {
    STD_TORCH_CHECK(weight.dim() == 2 && weight.numel() > 0 && weight.numel() < kMaxLoraElements,
                    "hf_fastpath::", op, ": a weight is not a matrix of one or more elements");
    STD_TORCH_CHECK(dtype_of(weight, op) == matrices.dtype, "hf_fastpath::", op, ": weights differ in dtype");
    STD_TORCH_CHECK(weight.size(1) == 1 || weight.stride(1) == 1, "hf_fastpath::", op,
                    ": a weight's rows are not contiguous");
    matrices.first_rank[matrices.count] = static_cast<int>(ranks);
    matrices.each[matrices.count++] = {weight.const_data_ptr(), weight.stride(0),
                                       static_cast<int>(weight.size(0)), static_cast<int>(weight.size(1))};
    ranks += weight.size(rank_dim);
    STD_TORCH_CHECK(ranks <= kMaxLoraRanks, "hf_fastpath::", op, ": weights have more than ", kMaxLoraRanks,
                    " ranks");
  }
  matrices.ranks = static_cast<int>(ranks);
  for (int m = matrices.count; m < kMaxLoraMatrices; ++m) matrices.first_rank[m] = matrices.ranks;
  return matrices;
}

// Lets rows take matrices of their owners alone. Returns what keeps `chosen` alive.
template <class Params>
std::optional<Tensor> take_owners(Params& params, const std::optional<Tensor>& chosen,
                                  const std::vector<int64_t>& owners, const char* op) {
  if (!chosen) return std::nullopt;
  STD_TORCH_CHECK(chosen->scalar_type() == ScalarType::Int && chosen->dim() == 1 &&
                      chosen->size(0) == params.rows &&
                      owners.size() == static_cast<size_t>(params.matrices.count),
                  "hf_fastpath::", op, ": chosen has to be int32 [rows], and owners one for each weight");
  const Tensor kept = hf_fastpath::contiguous(*chosen);
  params.chosen = static_cast<const int*>(kept.const_data_ptr());
  for (size_t m = 0; m < owners.size(); ++m) params.owner[m] = static_cast<int>(owners[m]);
  return kept;
}

// Rows of a tensor of one or more elements, at most kMaxLoraFeatures each; at most kMaxLoraRows.
inline int lora_rows(const Tensor& tensor, const char* op, const char* name) {
  STD_TORCH_CHECK(tensor.dim() >= 1 && tensor.numel() > 0 && tensor.size(-1) <= kMaxLoraFeatures,
                  "hf_fastpath::", op, ": ", name, " is empty, or has too many features");
  const int64_t rows = tensor.numel() / tensor.size(-1);
  STD_TORCH_CHECK(rows <= kMaxLoraRows, "hf_fastpath::", op, ": ", name, " has ", rows,
                  " rows, expected 1 to ", kMaxLoraRows, ": use nn.Linear");
  return static_cast<int>(rows);
}

}  // namespace hf_fastpath
