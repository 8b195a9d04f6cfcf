// Torch-free launch of the chosen experts of a mixture on a GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "choose_experts/choose_experts_params.h"
#include "common/dtype.h"

namespace hf_fastpath {

constexpr int kMaxExpertRows = 16;  // rows of x
constexpr int kMaxTopK = 32;        // experts a row chooses
// Experts that blocks choose from for themselves, and those if their router is not plain.
constexpr int kMostRouted = 256, kMostScored = 128;

// Matrices of all experts: row r of expert e starts at e * expert_stride + r * row_stride elements.
struct ExpertStack {
  const void* weight;
  int64_t expert_stride, row_stride;
};

// An expert that every row goes through beside those that it chooses. It is as wide as `places` of them, and
// takes as many places in front of them.
struct SharedExpert {
  const void *gate, *up, *down;  // [places * width, hidden_size] twice, [hidden_size, places * width]
  int64_t gate_stride, up_stride, down_stride;  // elements from row to row
  const void* logit;                            // whose sigmoid is the expert's weight; or null: 1
  int places;                                   // 0: there is none
};

// out[m, :] = sum over k of expert_weights[m, k] * expert(expert_ids[m, k], x[m, :]) + residual[m, :].
struct FusedExpertsParams {
  const void* x;                // [rows, hidden_size], contiguous
  const int64_t* expert_ids;    // [rows, top_k]; one outside of first_expert + [0, num_experts) adds nothing
  const float* expert_weights;  // [rows, top_k]
  const void* logits;   // [router.num_experts]: of the only row, whose choice the kernels make instead, as
                        // choose_experts; or null; see takes_row
  SharedExpert shared;  // see takes_row
  ExpertStack gate_up;  // rows: gate [width], from up_row on up [width]; columns [hidden_size]
  ExpertStack down;     // rows [hidden_size], columns [width]
  const void* gate_up_bias;  // [num_experts, 2 * width], contiguous, or null; null unless transposed
  const void* down_bias;     // [num_experts, hidden_size], the same
  const void* residual;      // [rows, hidden_size] or null
  void* hidden;     // [rows, top_k + shared.places, width]: what the activations give, written and read
  float* products;  // [rows, top_k, hidden_size]: of down, written and read; null unless transposed
  void* out;        // [rows, hidden_size]
  int64_t num_experts, first_expert;  // whose weights are here
  RouterParams router;                // with logits
  int rows, top_k, hidden_size, width;
  int up_row;  // width; 0 without a gate, whose place up takes
  DType dtype, logits_dtype;
  Activation activation;
  bool clamped;  // gate * sigmoid(alpha * gate) * (up + 1) instead, of values clamped to `limit`
  float alpha, limit;
  bool concatenated;            // of transposed stacks: gate columns, then up columns, instead of in turn
  const void* norm_weight;      // [hidden_size], of an RMS norm of x; or null; see takes_row
  float norm_eps, norm_offset;  // factors are norm_offset + norm_weight
  bool programmatic_launch;     // may start before the kernel in front on the stream is complete
};

// Whether this is one row that blocks keep: then the kernels, but not those of transposed stacks, take a
// norm, logits of as many experts as blocks choose from, and a shared expert.
bool takes_row(const FusedExpertsParams& params);

void launch_fused_experts(const FusedExpertsParams& params, cudaStream_t stream);

// The same of transposed stacks: of gate_up rows [hidden_size], columns gate 0, up 0, gate 1, ... or as
// `concatenated` says; of down rows [width], columns [hidden_size].
void launch_fused_experts_columns(const FusedExpertsParams& params, cudaStream_t stream);

}  // namespace hf_fastpath
