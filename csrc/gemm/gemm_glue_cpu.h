// What the routes of gemm and packed_gemm share on the CPU. This header is torch-facing, and *_cpu.cpp alone
// include it.
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

// The product of rows [first, first + rows) of x alone.
inline GemmArgs rows_of(GemmArgs args, int64_t first, int64_t rows) {
  args.rows = rows;
  args.out = at(args.out, first * args.out_features, args.dtype);
  if (args.residual != nullptr) args.residual = at(args.residual, first * args.out_features, args.dtype);
  return args;
}

}  // namespace hf_fastpath
