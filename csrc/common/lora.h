// Matrices of LoRA adapters as kernels of lora_down and lora_up take them: free of torch.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace hf_fastpath {

// Matrices of a call, whose list is a kernel's parameter: 16 adapters of three projections.
constexpr int kMaxLoraMatrices = 48;
constexpr int kMaxLoraRanks = 2048;  // the sum of their ranks, which lora_up keeps in shared memory
constexpr int kMaxLoraRows = 16;     // rows of x, or of the base product

struct LoraMatrix {
  const void* data;    // [rows, columns]; one of the two is the rank
  int64_t row_stride;  // elements between rows
  int rows, columns;
};

struct LoraMatrices {
  DType dtype;  // of all of them
  int count;
  int ranks;  // of all of them together
  LoraMatrix each[kMaxLoraMatrices];
  int first_rank[kMaxLoraMatrices];  // where the ranks of each begin among those of all; `ranks` past the
                                     // last
};

// Whether the rows of all matrices are whole 16-byte accesses, aligned.
inline bool has_whole_rows(const LoraMatrices& matrices) {
  const int64_t elems = 16 / element_size(matrices.dtype);
  for (int m = 0; m < matrices.count; ++m) {
    const LoraMatrix& matrix = matrices.each[m];
    if (reinterpret_cast<uintptr_t>(matrix.data) % 16 != 0) return false;
    if (matrix.columns % elems != 0 || matrix.row_stride % elems != 0) return false;
  }
  return true;
}

// Whether a row of another owner leaves a matrix out, whatever is in it. Static: a file for one CPU feature
// has a function of its own.
template <class Params>
static inline bool is_left_out(const Params& p, int64_t row, int matrix) {
  return p.chosen != nullptr && p.chosen[row] != p.owner[matrix];
}

}  // namespace hf_fastpath
