// Torch-free launch of the chosen experts of a mixture with quantized weights on a GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/dtype.h"
#include "weights/packed_matrix.h"

namespace hf_fastpath {

constexpr int kMaxPackedChoices = 32;  // experts that a row chooses

// Who has chosen which experts.
struct PackedChoices {
  const int64_t* ids;    // [rows, top_k]; one outside of [0, num_experts) adds nothing
  const float* weights;  // [rows, top_k]
  int64_t num_experts;
  int rows, top_k;
};

// The product of what each choice is given with its expert's matrix, and what becomes of it.
struct PackedExpertsProduct {
  PackedChoices choices;
  const void* x;        // gated: [rows, k]; else [rows, top_k, k]
  const void* quants;   // of all experts' matrices, one behind the other
  PackedMatrix matrix;  // the same
  const void* bias;     // [num_experts, rows of an expert's matrix] or null
  // Gated: activation(gate) * up in x's type, of matrices with two rows a feature; else products in float32.
  void* out;     // [rows, top_k, features]
  int features;  // of out
  int k;
  bool gated;
  bool alternating;  // rows of gate and up take turns; else those of gate come first
  bool clamped;      // gate * sigmoid(alpha * gate) * (up + 1) instead, of values clamped to `limit`
  Activation activation;
  float alpha, limit;
  DType dtype;
  const void* norm_weight;      // [k], of an RMS norm of x; or null; see fits_packed_experts_norm
  float norm_eps, norm_offset;  // factors are norm_offset + norm_weight
  bool aligned;                 // rows of x and the norm's weight are whole 16 bytes that start at such
  bool programmatic_launch;     // may start before the kernel in front on the stream is complete
};

// Blocks of k that shared memory holds of one row of 16 bits, and of more.
constexpr int kRowBlocks = 128, kRowsBlocks = 24;

// Whether the kernel norms x: where shared memory holds whole rows, and blocks have no records.
inline bool fits_packed_experts_norm(const PackedExpertsProduct& p) {
  if (reads_records(p.matrix.format)) return false;
  return p.matrix.blocks <= (p.choices.rows == 1 && p.dtype != DType::kFloat32 ? kRowBlocks : kRowsBlocks);
}

void launch_packed_experts(const PackedExpertsProduct& params, cudaStream_t stream);

// The same for one format, a file each.
template <PackedFormat kFormat>
void launch_packed_experts_format(const PackedExpertsProduct& params, cudaStream_t stream);

// The same of formats with records, without a norm.
void launch_packed_experts_records(const PackedExpertsProduct& params, cudaStream_t stream);

// out[m, :] = sum over k of weights[m, k] * products[m, k, :] + residual[m, :], in `dtype`.
struct PackedExpertsSum {
  PackedChoices choices;
  const float* products;  // [rows, top_k, hidden_size]; of an expert that a row chose twice the first alone
  const void* residual;   // [rows, hidden_size] or null
  void* out;              // [rows, hidden_size]
  int hidden_size;
  DType dtype;
};

// Launches it behind the kernel that writes the products.
void launch_packed_experts_sum(const PackedExpertsSum& params, cudaStream_t stream);

}  // namespace hf_fastpath
