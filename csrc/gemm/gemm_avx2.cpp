// What: out = activation(x @ W.T + bias) + residual for many rows of x, with the weight as nn.Linear
//   stores it ([out, in]) or as Conv1D does ([in, out]), of any type. Float32 accumulators, rounded
//   once. gemm_block.h has the product, for vectors of 8 values here.
// Work split: threads take strips of up to 128 outputs in turn, and with few outputs ranges of rows, too.
//   A strip goes through the inputs in blocks of 256. A block of the weight is widened to float32 once,
//   into panels of 16 outputs (16 KiB), over which 6 rows of x at a time pass; x has been widened before,
//   by all threads. 192 rows of x stay in the second-level cache while the panels of a strip take turns.
// Traffic: the weight once for every 16 MiB of x in float32 (2048 rows of 2048 inputs); x in float32 once
//   a strip, from the last-level cache or memory: a byte for 32 multiplications.
// Roofline: arithmetic. Two threads, float16, Xeon with AMX, 2026-11; peak is a loop of FMAs in registers,
//   217 to 226 GFLOP/s. 2048->2048, 2048->5632 and 5632->2048: 32 rows 47 to 64 % of it, 128 rows 70 to
//   79, 512 and 2048 rows 76 to 84; 2048->256 from 128 rows on 62 to 73. The tile alone reaches 90. MKL's
//   float32 product of the same shape, held to AVX2, takes 0.9 to 1.4 times as long as this, F.linear in
//   float16 there 4 to 6 times. Tried instead: MKL over pieces of the weight that were widened (512
//   outputs: 68 to 105 % of this kernel's speed; 64 and 128 are slower by a fifth), and over the whole
//   widened weight (57 % for 32 rows, as fast for 512).
#include "gemm/gemm_block.h"

namespace hf_fastpath {
namespace {

struct Vector8 : Floats8 {
  static constexpr int kRows =
      6;  // 12 accumulators, two vectors of the panel and a broadcast: 15 of 16 registers
};

}  // namespace

void gemm_strip_avx2(const GemmArgs& args, int64_t row_begin, int64_t row_end, int64_t begin, int64_t end,
                     float* scratch) {
  strip<Vector8>(args, row_begin, row_end, begin, end, scratch);
}

void finish_rows_avx2(const FinishArgs& args, int64_t begin, int64_t end) {
  with_element(args.dtype, [&](auto element) {
    using Element = decltype(element);
    using Storage = typename Element::Storage;
    const auto* residual = static_cast<const Storage*>(args.residual);
    with_activation(args.activation, [&](auto tag) {
      constexpr Activation kActivation = decltype(tag)::value;
      for (int64_t row = begin; row < end; ++row) {
        const int64_t from = row * args.accumulator_stride, to = row * args.stride;
        const auto* bias = static_cast<const Storage*>(args.bias);
        const auto* added = residual != nullptr ? residual + to : nullptr;
        auto* out = static_cast<Storage*>(args.out) + to;
        if (args.accumulator_dtype == DType::kFloat32) {
          epilogue<Element, kActivation>(static_cast<const float*>(args.accumulators) + from, nullptr, bias,
                                         added, out, args.columns);
        } else {
          epilogue<Element, kActivation, Element>(static_cast<const Storage*>(args.accumulators) + from,
                                                  nullptr, bias, added, out, args.columns);
        }
      }
    });
  });
}

}  // namespace hf_fastpath
