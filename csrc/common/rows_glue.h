// Views of tensors by rows, on every device. This header is torch-facing.
#pragma once

#include "common/torch_glue.h"

namespace hf_fastpath {

// A tensor as rows of its last dimension, `stride` elements apart. Copied only if its rows are not evenly
// spaced.
struct RowView {
  Tensor tensor;  // keeps the memory alive
  const void* data;
  int64_t rows, columns, stride;
};

inline RowView row_view(const Tensor& input) {
  const int64_t dims = input.dim();
  const int64_t columns = dims > 0 ? input.size(dims - 1) : 1;
  const int64_t rows = columns > 0 ? input.numel() / columns : 0;
  if (input.is_contiguous()) return {input, input.const_data_ptr(), rows, columns, columns};
  bool even = dims > 0 && (columns == 1 || input.stride(dims - 1) == 1);
  int64_t stride = 0, span = 1;  // span: rows covered by the dimensions seen so far
  for (int64_t i = dims - 2; i >= 0 && even; --i) {
    if (input.size(i) == 1) continue;
    if (stride == 0) stride = input.stride(i);
    even = input.stride(i) == stride * span;
    span *= input.size(i);
  }
  if (even) return {input, input.const_data_ptr(), rows, columns, stride};
  Tensor copy = torch::stable::contiguous(input);
  return {copy, copy.const_data_ptr(), rows, columns, columns};
}

}  // namespace hf_fastpath
