// Torch-free launch of decoder layers of small models, two kernels a layer.
// Experiments: docs/lab/decode_layers.md
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "common/dtype.h"

namespace hf_fastpath {

constexpr int kClusterSize = 8;      // blocks that share an input and split it
constexpr int kMlpClusters = 16;     // of the MLP's kernel
constexpr int kClusterHeadDim = 64;  // attention has a cluster a head
constexpr int kMaxClusterHeads = 16;

// A row of features that several kernels hold: base + partials summed + bias.
struct StreamIn {
  const void* token;      // [hidden], dtype: the stream itself; or null, then
  const float* base;      // [hidden]
  const float* partials;  // [num_partials, hidden]
  const void* bias;       // [hidden], dtype, or null
  int num_partials;
};

// norm -> product -> attention or activation -> product, of which every cluster makes its part of the sums.
struct ClusterBlockParams {
  StreamIn in;
  const float* center;      // about the mean of the stream, or null for 0
  float* stream;            // [hidden]: what `in` adds up to
  float* mean;              // of it
  float* partials;          // [clusters, hidden]
  const void* norm_weight;  // [hidden], dtype, or null
  const void* norm_bias;
  float norm_eps;
  const void* first_weight;               // [hidden, 3 * heads * 64] or [hidden, 4 * hidden], dtype
  const void* first_bias;                 // or null
  const void* second_weight;              // [heads * 64 or 4 * hidden, hidden]
  int64_t first_stride, second_stride;    // elements between rows
  CUtensorMap first_tiles, second_tiles;  // of the weights; made by the launch
  int hidden;
  bool programmatic_launch;
  DType dtype;
  Activation activation;  // of the MLP
  // Attention.
  void *k_cache, *v_cache;  // [heads, capacity, 64], dtype
  const int32_t* seq_lens;
  const int32_t* starts;    // or null
  const int64_t* kv_table;  // see rope_append.h
  int64_t layer, capacity;
  int heads, window;
  float scale;
};

// Whether there are kernels for these sizes on the current device.
bool fits_cluster_layers(int64_t hidden, int64_t heads, DType dtype);

void launch_cluster_attention(const ClusterBlockParams& params, cudaStream_t stream);
void launch_cluster_mlp(const ClusterBlockParams& params, cudaStream_t stream);
// out [hidden], dtype: what `in` adds up to.
void launch_cluster_stream(const StreamIn& in, void* out, int hidden, DType dtype, bool programmatic_launch,
                           cudaStream_t stream);

}  // namespace hf_fastpath
