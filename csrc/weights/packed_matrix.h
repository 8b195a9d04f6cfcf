// A quantized weight as the kernels on a GPU take it. This file is free of torch.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "common/dtype.h"
#include "weights/packed_format.h"

namespace hf_fastpath {

// Whether packed_gemv_records.cu reads it.
constexpr bool reads_records(PackedFormat format) { return has_kernels(format) && has_records(format); }

// A quantized matrix but for its quants. A gated one has the rows of gate, then those of up.
struct PackedMatrix {
  PackedFormat format;
  // float16 [rows, groups], float32 [rows, groups / 2] (see scale_of_row()), or bytes [rows, 2 * groups]
  const uint16_t* scales;
  const uint8_t* zeros;  // [rows, groups], if groups have zeros
  int64_t rows;
  int groups;        // of a row; those with scales in float32 count twice, those in bytes half
  int blocks;        // of a row, of kPackedBlock weights
  float multiplier;  // of all scales
};

#ifdef __CUDACC__
// The scale of a row, where rows have one.
template <PackedFormat kFormat>
__device__ __forceinline__ float scale_of_row(const PackedMatrix& matrix, int64_t row) {
  if constexpr (Traits<kFormat>::kScaleBytes == 4)
    return __ldg(reinterpret_cast<const float*>(matrix.scales) + row);
  return __half2float(__ushort_as_half(__ldg(matrix.scales + row)));
}
#endif

// weight[end - begin, k] in `dtype`, rows [begin, end) of a matrix in a format that has no kernels.
void launch_packed_dequantize_any(const PackedMatrix& matrix, const void* quants, int64_t k, int64_t begin,
                                  int64_t end, DType dtype, void* weight, cudaStream_t stream);

}  // namespace hf_fastpath
