// Torch-free launch of products with quantized weights on a GPU.
// Experiments: docs/lab/packed_gemv.md
#pragma once

#include "gemv/gemv.h"
#include "weights/packed_matrix.h"

namespace hf_fastpath {

// GemvParams::segments[0] has the bias of a quantized matrix and, as weight and stride, its quants and their
// bytes a row.

// Whether the kernel does the product with the norm in front. Of a format without kernels the weight is
// dequantized into the workspace, and the kernel is one of gemv's.
bool fits_packed_gemv(const GemvParams& params, const PackedMatrix& matrix);

// Whether the kernel rotates and appends the features as they come: float32 rows only as many as it takes at
// a time, quantized caches want a whole head first.
bool fits_packed_append(const GemvParams& params, const PackedMatrix& matrix, const RopeAppendParams& rope);

// Bytes of device memory that a launch needs for itself, aligned to 16 bytes.
int64_t packed_gemv_workspace_bytes(const GemvParams& params, const PackedMatrix& matrix);

// Launches it; `rope`, if it fits: rotates and appends the features instead of writing them to out.
// `x_width`: values of a row of x, and of the norm's weight, in memory: params.k of a format without kernels
// of these products, else whole chunks of 16 bytes, aligned, with zeros behind params.k.
void launch_packed_gemv(const GemvParams& params, int x_width, const PackedMatrix& matrix,
                        const RopeAppendParams* rope, void* workspace, cudaStream_t stream);

// The same of a format that has records: neither norm nor append. Rows of x are whole chunks, as above.
void launch_packed_gemv_records(const GemvParams& params, int x_width, const PackedMatrix& matrix,
                                cudaStream_t stream);

// The same for one format, a file each.
template <PackedFormat kFormat>
int64_t packed_format_workspace_bytes(const GemvParams& params, const PackedMatrix& matrix);
template <PackedFormat kFormat>
void launch_packed_format(const GemvParams& params, int x_width, const PackedMatrix& matrix,
                          const RopeAppendParams* rope, void* workspace, cudaStream_t stream);

}  // namespace hf_fastpath
