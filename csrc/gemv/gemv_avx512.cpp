// What: out = activation(x @ W.T + bias) + residual, or activation(x @ W.T) * (x @ U.T), for 1 to 16 rows of
//   x, with the weight as nn.Linear stores it ([out, in]). Float32 sums, rounded once. gemv_linear.h has the
//   product, for vectors of 16 values here.
// Work split: as in gemv_avx2.cpp, with up to eight rows of x at a time.
// Traffic: the weight once.
// Roofline: read bandwidth up to four rows of x, then arithmetic. All matrices of TinyLlama one after the
//   other, two threads, R = 31.4 GB/s, Xeon with AMX, 2026-11, of R: 16-bit types 94 % for one row, 92 for
//   four, 67 for eight (168 GFLOP/s, a loop of FMAs reaches 404 to 426), float32 91 % for one row.
#include "common/avx512_math.h"
#include "gemv/gemv_linear.h"

namespace hf_fastpath {
namespace {

struct Vector16 : Floats16 {
  static constexpr int kRows = 8;  // of x: 24 sums, three vectors of weights and one of x in 32 registers
};

}  // namespace

void linear_avx512(const LinearArgs& args, int64_t begin, int64_t end) {
  linear_range<Vector16>(args, begin, end);
}

}  // namespace hf_fastpath
