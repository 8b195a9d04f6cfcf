// What fake_quantize takes on every device: free of torch.
#pragma once

#include "common/dtype.h"

namespace hf_fastpath {

// The numbers are those of the op's schema: hf_fastpath/choices.py has the names.
enum class InputQuants : int {
  kFp8Block = 0,
  kFp8Row = 1,
  kFp8RowNarrow = 2,
  kInt8RowNarrow = 3,
  kInt8Outliers = 4,
  kFp8BlockNarrow = 5,
  kInt8Row = 6
};

constexpr bool is_narrow(InputQuants quants) {
  return quants == InputQuants::kFp8RowNarrow || quants == InputQuants::kInt8RowNarrow ||
         quants == InputQuants::kFp8BlockNarrow || quants == InputQuants::kInt8Row;
}
constexpr bool is_float8(InputQuants quants) {
  return quants != InputQuants::kInt8RowNarrow && quants != InputQuants::kInt8Outliers &&
         quants != InputQuants::kInt8Row;
}

constexpr int kFakeBlock = 128;              // neighbors that share a scale of kFp8Block and kFp8BlockNarrow
constexpr float kLeastFakeScale = 1e-12f;    // of scales that divide
constexpr float kLeastInt8Scale = 0x1p-23f;  // of scales of kInt8Row

// What the largest magnitude is divided by for a scale.
constexpr float steps_of(InputQuants quants) {
  return is_float8(quants) ? kLargestFloat8 : quants == InputQuants::kInt8Outliers ? kLargestInt8 : 127.5f;
}

// x: [rows, columns], rows `stride` elements apart; out contiguous.
struct FakeQuantizeParams {
  InputQuants quants;
  DType dtype;
  const void* x;
  void* out;
  int64_t rows, columns, stride;
  float limit;     // or 0: see the op
  uint8_t* marks;  // [columns] of kInt8Outliers with a limit, or null: whether the column stays as it is
  bool programmatic_launch;
  // An RMS norm of x, on a GPU: null, or [columns] of x's dtype, aligned as x is.
  const void* norm_weight;
  float norm_eps, norm_offset;  // factors are norm_offset + norm_weight
};

}  // namespace hf_fastpath
