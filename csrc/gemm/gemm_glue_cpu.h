// The product of gemm and packed_gemm on the CPU, once its arguments are checked.
#pragma once

#include "common/cpu_glue.h"
#include "gemm/gemm_cpu.h"

namespace hf_fastpath {

// A matrix in memory that others own.
inline Tensor matrix(const void* data, DType dtype, int64_t rows, int64_t columns, int64_t row_stride,
                     int64_t column_stride) {
  const int64_t sizes[] = {rows, columns}, strides[] = {row_stride, column_stride};
  const int32_t type = dtype == DType::kFloat32   ? aoti_torch_dtype_float32()
                       : dtype == DType::kFloat16 ? aoti_torch_dtype_float16()
                                                  : aoti_torch_dtype_bfloat16();
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(const_cast<void*>(data), 2, sizes, strides, 0,
                                                            type, aoti_torch_device_type_cpu(), -1, &handle));
  return Tensor(handle);
}

// Whether pairs of bfloat16 are multiplied, by gemm_pairs_avx512_bf16().
bool takes_pairs(const GemmArgs& args, int64_t rows);

// `args` but for x, and x as it lies in memory: in these pairs.
void run_in_pairs(const GemmArgs& args, const RowView& x);

// `args` but for x, and x as it lies in memory: the route that is fastest here.
void run_gemm(const GemmArgs& args, const RowView& x);

}  // namespace hf_fastpath
