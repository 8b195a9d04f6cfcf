// What: out = activation(x @ W.T + bias) + residual for many rows of x, with the weight as nn.Linear
//   stores it ([out, in]) or as Conv1D does ([in, out]), of any type. Float32 accumulators, rounded
//   once. gemm_block.h has the product, for vectors of 16 values here.
// Work split: threads take strips of up to 128 outputs in turn, and with few outputs ranges of rows, too.
//   A strip goes through the inputs in blocks of 256. A block of the weight is widened to float32 once,
//   into panels of 32 outputs (32 KiB), over which 12 rows of x at a time pass; x has been widened before,
//   by all threads. 192 rows of x stay in the second-level cache while the panels of a strip take turns.
// Traffic: the weight once for every 16 MiB of x in float32 (2048 rows of 2048 inputs); x in float32 once
//   a strip, from the last-level cache or memory: a byte for 32 multiplications.
// Roofline: arithmetic. Two threads, float16, Xeon with AMX, 2026-11; peak is a loop of FMAs in registers,
//   404 to 426 GFLOP/s. 2048->2048, 2048->5632 and 5632->2048: 32 rows 39 to 43 % of it, 128 rows 56 to
//   65, 512 and 2048 rows 64 to 72; 2048->256 from 128 rows on 47 to 62. The tile alone reaches 84. MKL's
//   float32 product of the same shape takes 0.9 to 1.5 times as long as this, on an AMD EPYC 1.9 to 2.5
//   times as long as float32 here (2048 rows: 390 to 470 GFLOP/s), F.linear in float16 5 to 10
//   times where oneDNN has no float16, about as long where it has. MKL over pieces of the weight that were
//   widened: 43 to 88 % of this kernel's speed.
#include "common/avx512_math.h"
#include "gemm/gemm_block.h"

namespace hf_fastpath {
namespace {

struct Vector16 : Floats16 {
  static constexpr int kRows =
      12;  // 24 accumulators, two vectors of the panel and a broadcast: 27 of 32 registers
};

}  // namespace

void gemm_strip_avx512(const GemmArgs& args, int64_t row_begin, int64_t row_end, int64_t begin, int64_t end,
                       float* scratch) {
  strip<Vector16>(args, row_begin, row_end, begin, end, scratch);
}

}  // namespace hf_fastpath
