// Checks of fake_quantize that all devices share. This header is torch-facing.
#pragma once

#include "common/rows_glue.h"
#include "common/torch_glue.h"
#include "fake_quantize/fake_quantize_params.h"

namespace hf_fastpath {

// One call: x by rows, the output, and what kernels take.
struct FakeQuantizeCall {
  RowView x;
  Tensor out;
  FakeQuantizeParams params{};

  FakeQuantizeCall(const Tensor& given, int64_t quants, double limit, bool programmatic_launch)
      : x(row_view(given)), out(empty_like_with_sizes(given, sizes_of(given))) {
    const char* op = "fake_quantize";
    STD_TORCH_CHECK(given.dim() >= 1 && given.numel() > 0, "hf_fastpath::fake_quantize: x has no inputs");
    params.quants = choice_of(quants, InputQuants::kInt8Row, op, "quants");
    const bool takes_limit =
        params.quants == InputQuants::kFp8Row || params.quants == InputQuants::kInt8Outliers;
    STD_TORCH_CHECK(limit == 0.0 || (limit > 0.0 && takes_limit), "hf_fastpath::fake_quantize: limit is ",
                    limit, ", expected 0, or a positive number with fp8_row or int8_outliers");
    params.dtype = dtype_of(given, op);
    params.x = x.data, params.out = out.mutable_data_ptr();
    params.rows = x.rows, params.columns = x.columns, params.stride = x.stride;
    params.limit = static_cast<float>(limit);
    params.programmatic_launch = programmatic_launch;
  }

  // Memory for marks, a byte a column.
  Tensor empty_marks(const Tensor& like) const {
    const int64_t size = element_size(params.dtype);
    return empty_like_with_sizes(like, {(params.columns + size - 1) / size});
  }

  // Whether a column of one row has a say in other rows.
  bool marks_columns() const {
    return params.quants == InputQuants::kInt8Outliers && params.limit > 0 && params.rows > 1;
  }
};

}  // namespace hf_fastpath
