// Torch-free launch of products of many rows with quantized weights on a GPU.
// Experiments: docs/lab/packed_gemm.md
#pragma once

#include "packed_gemv/packed_gemv.h"

namespace hf_fastpath {

// out[rows, matrix.rows] = x[rows, k] * weight^T + bias, all in `dtype`, which for the kernel is a type of
// 16 bits.
struct PackedGemmParams {
  const void* x;     // rows of x_stride elements, whole 16 bytes, aligned
  const void* bias;  // or null
  void* out;         // contiguous
  const void* quants;
  int64_t rows;
  int64_t k;
  int64_t x_stride;
  PackedMatrix matrix;
  DType dtype;
  bool programmatic_launch;  // x may come from a kernel that still runs
};

// How a launch runs over a shape.
struct PackedGemmPlan {
  int tokens;         // of a tile: 32, 64, 128 or 256
  int warpgroups;     // that compute, of a block: 64 features each
  int feature_tiles;  // of two blocks' features
  int token_tiles;
  int together;           // token tiles that follow each other before the next features do
  int pieces;             // of a row
  int split;              // clusters of a tile; 0: clusters share all tiles evenly
  int clusters;           // of two blocks
  int group;              // clusters that share some tiles evenly, in units of
  int unit_pieces;        // a piece, or a whole tile's:
  int group_units;        // so many,
  int share, rest;        // each at least `share`, the first `rest` one more
  int64_t partial_bytes;  // of the workspace: accumulators of tiles that several clusters share,
  int64_t flag_bytes;     // and what says that they are there
};

// Whether there is a kernel for the product on the current device, and nothing faster; else the caller
// dequantizes the weight.
bool fits_packed_gemm(const PackedGemmParams& params);

// `tokens`, `split`, `warpgroups`: as a plan has them, for measurements; else the fastest.
PackedGemmPlan plan_packed_gemm(const PackedGemmParams& params, int tokens = 0, int split = -1,
                                int warpgroups = 0);

// `workspace`: as many bytes as the plan has, at a multiple of 128.
void launch_packed_gemm(const PackedGemmParams& params, const PackedGemmPlan& plan, void* workspace,
                        cudaStream_t stream);

// A number that no other launch has: flags of launches before cannot be taken for this one's. A captured
// graph's launches share theirs, and leave flags without it.
unsigned long long next_gemm_ticket();

// The same for one format, a file each.
template <PackedFormat kFormat>
void launch_packed_gemm_format(const PackedGemmParams& params, const PackedGemmPlan& plan, char* workspace,
                               cudaStream_t stream);

// weight[matrix.rows, k] in `dtype`, of any type; rows [begin, end) of it.
void launch_packed_dequantize(const PackedMatrix& matrix, const void* quants, int64_t k, int64_t begin,
                              int64_t end, DType dtype, void* weight, cudaStream_t stream);

}  // namespace hf_fastpath
