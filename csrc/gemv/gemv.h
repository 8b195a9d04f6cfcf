// Torch-free launch of the skinny matrix products on a GPU: gemv, gemv_swiglu and qkv_rope_append share them.
// Experiments: docs/lab/gemv.md
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/dtype.h"
#include "common/routes_cuda.h"
#include "rope_append/rope_append.h"

namespace hf_fastpath {

constexpr int kMaxGemvRows = 16;   // rows of x that every device takes
constexpr int kMaxWgmmaRows = 64;  // and gemv_wgmma
// Weights side by side: query, key and value; a gated delta rule has four.
constexpr int kMaxGemvSegments = 4;

// One weight matrix. Its output features start at `first` of the output's.
struct GemvSegment {
  const void* weight;  // [features, k], rows `stride` elements apart; transposed: [k, features]
  const void* bias;    // [features] or null
  int stride;          // elements between rows of `weight`
  int first;
};

// What happens to x before the product, rows of k elements.
struct GemvNorm {
  NormKind kind;       // kRms for kRmsOffset, too
  const void* weight;  // [k]; null means 1
  const void* bias;    // [k] or null, for NormKind::kLayer
  float eps;
  float weight_offset;   // 1 if the factors are 1 + weight, else 0
  uint32_t offset_mask;  // all bits, or none; a constant costs no register where they are short
};

// out[m, :] = activation(x[m, :] @ weight.T + bias) + residual[m, :], the features of all segments one after
// the other. Gated: out[m, :] = activation(x[m, :] @ segments[0].T) * (x[m, :] @ segments[1].T).
struct GemvParams {
  const void* x;         // [m, k], contiguous
  const void* residual;  // [m, n] contiguous, or null
  void* out;             // [m, n] contiguous
  GemvSegment segments[kMaxGemvSegments];
  int64_t k;  // below 2^31 elements, as n
  int n;
  int m;             // 1 to kMaxGemvRows, or kMaxWgmmaRows
  int num_segments;  // 1 to kMaxGemvSegments; 2 when gated
  bool gated;
  bool transposed;           // one segment [k, n]
  bool programmatic_launch;  // weights may be read before the kernel in front on the stream is complete
  DType dtype;
  Activation activation;
  GemvNorm norm;            // where fits_one_kernel
  const void* next_weight;  // for its L2 prefetch: what the kernel behind this one reads, or null
  int64_t next_bytes;       // of it
};

// Whether a kernel does the product with the norm in front and the append behind. `rope`, if any: turns and
// appends the features instead of writing them to out.
bool fits_one_kernel(const GemvParams& params, const RopeAppendParams* rope);

// Launches the kernel of the call's route. A norm or `rope` has to fit.
void launch_gemv(const GemvParams& params, const RopeAppendParams* rope, cudaStream_t stream);

// What routes ask of a norm in front; and of x, weights, a norm and an append, so that rings take them.
CallFacts norm_facts(const GemvNorm& norm);
bool fits_ring(const GemvParams& params, const RopeAppendParams* rope);

// The kernels, one a file; products/select_cuda.cu says for which rows and types. Dot products with rows of
// [n, k] weights:
void launch_gemv_rows(const GemvParams& params, cudaStream_t stream);
// The same on tensor cores.
void launch_gemv_mma(const GemvParams& params, cudaStream_t stream);
// [k, n] weights: no factors 1 + weight.
bool fits_gemv_columns(const GemvParams& params, const RopeAppendParams* rope);
void launch_gemv_columns(const GemvParams& params, const RopeAppendParams* rope, cudaStream_t stream);
// The same on tensor cores.
void launch_gemv_columns_mma(const GemvParams& params, const RopeAppendParams* rope, cudaStream_t stream);

// One x row, [n, k] weights: any norm, and [query, key, value] of the one token of a batch of one to turn and
// append.
bool has_few_chunks(const GemvParams& params);  // of a row of x, which a block keeps in registers
void launch_gemv_ring(const GemvParams& params, const RopeAppendParams* rope, cudaStream_t stream);

// The same for several x rows: neither layer norm nor factors 1 + weight.
void launch_gemv_ring_rows(const GemvParams& params, const RopeAppendParams* rope, cudaStream_t stream);

// Up to kMaxWgmmaRows x rows on tensor cores: products alone.
void launch_gemv_wgmma(const GemvParams& params, const RopeAppendParams* rope, cudaStream_t stream);

}  // namespace hf_fastpath
