// What: products of some to many rows of x in bfloat16 with a weight in rows, by vdpbf16ps, see
//   gemv_avx512_bf16.cpp. Quantized weights are dequantized with their scale and rounded once; fp8 is exact
//   in bfloat16, and its row's scale is applied to the accumulators. Subnormal bfloat16 count as zeros.
// Work split: a thread takes a range of outputs, 48 at a time, and all rows of x. Of six outputs a block of
//   1,024 inputs is dequantized, or copied, into the first-level cache, where three by three they meet eight
//   rows of x: 24 accumulators in registers, which are added up to one float32 an output when the block ends.
// Traffic: the weight once; a block of x from the second-level cache once for six outputs, and x from memory
//   once for 48.
// Roofline: read bandwidth for few rows, then products of pairs. A layer of TinyLlama, two threads, of these
//   products in registers, quantized weights: Zen 4 (one 512-bit instruction a cycle), 2026-11, 61 % for 32
//   rows, 78 for 128, 82 for 192; Zen 5 (two), 75, 87 and 90.
#include "common/epilogue_avx2.h"
#include "gemm/gemm_cpu.h"
#include "weights/packed_dequantize_avx512.h"

namespace hf_fastpath {
namespace {

constexpr int kStep = 32;                 // inputs of a vector
constexpr int kTogether = 3;              // outputs that meet rows of x at once
constexpr int kStaged = 2 * kTogether;    // outputs that are staged at a time
constexpr int64_t kStrip = kPairedStrip;  // outputs that a block of x meets while it is near
constexpr int64_t kBlocks = 8;            // of kPackedBlock inputs, that are staged at a time
constexpr int64_t kDepth = kBlocks * kPackedBlock;
constexpr int kRows = kPairedRows;
static_assert(kStrip % kStaged == 0);

// Where a group of rows of x begins; they are of about equal size.
HF_INLINE int64_t group_begin(int64_t rows, int64_t group) { return rows * group / gemm_paired_groups(rows); }

// ---- weights ------------------------------------------------------------------------------------------
// A block of kPackedBlock inputs of an output goes to every kTogether-th vector.

HF_INLINE void store_sub_block(uint16_t* to, int s, __m512i words) {
  _mm512_store_si512(to + s * kTogether * kStep, words);
}

struct Plain {
  const uint16_t* weight;
  int64_t stride, in_features;

  HF_INLINE Plain of(const GemmArgs& args) {
    return {static_cast<const uint16_t*>(args.weight), args.weight_stride, args.in_features};
  }
  HF_INLINE void ask_for(const Plain& rows, int64_t row, int64_t b) {
    for (int s = 0; s < kSubBlocks; ++s)
      prefetch(rows.weight + row * rows.stride + b * kPackedBlock + s * kStep);
  }
  HF_INLINE void stage(const Plain& rows, int64_t row, int64_t b, uint16_t* to) {
    const uint16_t* from = rows.weight + row * rows.stride + b * kPackedBlock;
    const int64_t left = rows.in_features - b * kPackedBlock;
    for (int s = 0; s < kSubBlocks; ++s) {
      store_sub_block(to, s, _mm512_maskz_loadu_epi16(first_of_32(left - s * kStep), from + s * kStep));
    }
  }
};

template <PackedFormat kFormat>
struct Packed : SumScaledRows<kFormat> {
  using Rows = PackedRows<kFormat>;

  HF_INLINE Packed of(const GemmArgs& args) { return {SumScaledRows<kFormat>::of(*args.packed)}; }
  HF_INLINE void ask_for(const Packed& weight, int64_t row, int64_t b) {
    const uint8_t* quants = Rows::block(weight.rows, row, b);
    for (int64_t line = 0; line < Rows::kBytes; line += kCacheLineBytes) prefetch(quants + line);
  }
  HF_INLINE void stage(const Packed& weight, int64_t row, int64_t b, uint16_t* to) {
    dequantize_block<kFormat, BF16, 1>(weight.rows, row, b, 1.0f, weight.values,
                                       [&](int s, int, __m512i words) { store_sub_block(to, s, words); });
  }
};

// ---- products -----------------------------------------------------------------------------------------

// The sums of eight vectors.
HF_INLINE __m256 eight_sums(const __m512 (&v)[kRows]) {
  __m512 two[4], four[2];  // as many vectors' sums in each, of eight values, then of four
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 a = v[2 * i], b = v[2 * i + 1];
    two[i] = _mm512_add_ps(_mm512_mask_blend_ps(0xff00, a, b), _mm512_shuffle_f32x4(a, b, 0x4e));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m512 a = two[2 * i], b = two[2 * i + 1];
    four[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  const __m512 eight =
      _mm512_add_ps(_mm512_shuffle_ps(four[0], four[1], 0x88), _mm512_shuffle_ps(four[0], four[1], 0xdd));
  const __m512 twice = _mm512_add_ps(eight, _mm512_permute_ps(eight, 0xb1));
  const __m512i places = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
  return _mm512_castps512_ps256(_mm512_permutexvar_ps(places, twice));
}

// accumulators[r * stride + m] (+)= the product of output r of kStaged and row m of kM over `steps` times
// kStep inputs.
template <int kM>
void multiply(const uint16_t* weights, const uint16_t* x, int64_t steps, float* accumulators, int64_t stride,
              bool first) {
  for (int half = 0; half < kStaged / kTogether; ++half) {
    const uint16_t* w = weights + half * kTogether * kDepth;
    const uint16_t* rows = x;
    __m512 sum[kTogether][kRows];
#pragma GCC unroll 3
    for (int r = 0; r < kTogether; ++r) {
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) sum[r][m] = _mm512_setzero_ps();
    }
    for (int64_t step = 0; step < steps; ++step, w += kTogether * kStep, rows += kM * kStep) {
      __m512i weight[kTogether];
#pragma GCC unroll 3
      for (int r = 0; r < kTogether; ++r) weight[r] = _mm512_load_si512(w + r * kStep);
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) {
        __m512i value = _mm512_load_si512(rows + m * kStep);
        asm("" : "+v"(value));  // one load for all outputs, not one a product
#pragma GCC unroll 3
        for (int r = 0; r < kTogether; ++r) {
          sum[r][m] = _mm512_dpbf16_ps(sum[r][m], reinterpret_cast<__m512bh>(weight[r]),
                                       reinterpret_cast<__m512bh>(value));
        }
      }
    }
#pragma GCC unroll 3
    for (int r = 0; r < kTogether; ++r) {
      float* const to = accumulators + (half * kTogether + r) * stride;
      const __m256 made = eight_sums(sum[r]);
      _mm256_store_ps(to, first ? made : _mm256_add_ps(_mm256_load_ps(to), made));
    }
  }
}

// The same for `rows` rows of x, kRows / 2 to kRows.
template <int kM = kRows>
HF_INLINE void multiply_rows(int64_t rows, const uint16_t* weights, const uint16_t* x, int64_t steps,
                             float* accumulators, int64_t stride, bool first) {
  if constexpr (kM > kRows / 2) {
    if (rows < kM) return multiply_rows<kM - 1>(rows, weights, x, steps, accumulators, stride, first);
  }
  multiply<kM>(weights, x, steps, accumulators, stride, first);
}

// ---- outputs ------------------------------------------------------------------------------------------

// to[m * kStrip + r] = from[r * stride + m] for eight times eight.
HF_INLINE void transpose_eight(const float* from, int64_t stride, float* to) {
  __m256 a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) a[i] = _mm256_load_ps(from + i * stride);
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
    a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    _mm256_store_ps(to + i * kStrip, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
    _mm256_store_ps(to + (i + 4) * kStrip, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
  }
}

// Outputs [n, n + count) of all rows, from accumulators[output * stride + kRows * group + row of the group].
template <Activation kActivation>
void finish(const GemmArgs& args, const float* accumulators, int64_t stride, int64_t n, int64_t count) {
  const auto* bias = static_cast<const uint16_t*>(args.bias);
  const auto* residual = static_cast<const uint16_t*>(args.residual);
  alignas(32) float y[kRows * kStrip], scales[kStrip];
  if (args.packed != nullptr) sum_factors(*args.packed, n, n + count, kStrip, scales);
  for (int64_t group = 0; group < gemm_paired_groups(args.rows); ++group) {
    for (int64_t i = 0; i < kStrip; i += 8) {
      transpose_eight(accumulators + i * stride + group * kRows, stride, y + i);
    }
    const int64_t first = group_begin(args.rows, group), end = group_begin(args.rows, group + 1);
    float* row = y;
    for (int64_t m = first; m < end; ++m, row += kStrip) {
      for (int64_t i = 0; args.packed != nullptr && i < kStrip; i += kLanes) {
        _mm256_store_ps(row + i, _mm256_mul_ps(_mm256_load_ps(row + i), _mm256_load_ps(scales + i)));
      }
      const int64_t at = m * args.out_features + n;
      epilogue<BF16, kActivation>(row, nullptr, bias != nullptr ? bias + n : nullptr,
                                  residual != nullptr ? residual + at : nullptr,
                                  static_cast<uint16_t*>(args.out) + at, count);
    }
  }
}

template <class Weight>
void outputs(const GemmArgs& args, int64_t begin, int64_t end, float* accumulators) {
  alignas(64) uint16_t staged[kStaged * kDepth];
  const Weight weight = Weight::of(args);
  const int64_t blocks = gemm_padded_width(args.in_features) / kPackedBlock;
  const int64_t groups = gemm_paired_groups(args.rows), stride = groups * kRows;
  for (int64_t n = begin; n < end; n += kStrip) {
    const int64_t count = min_of(kStrip, end - n);
    for (int64_t b = 0; b < blocks; b += kBlocks) {
      const int64_t some = min_of(kBlocks, blocks - b), steps = some * kSubBlocks;
      for (int64_t r = 0; r < count; r += kStaged) {
        // After these the next outputs are staged, or the first of the strip in the next block.
        const bool same = r + kStaged < count, more = b + kBlocks < blocks;
        const int64_t next = same ? n + r + kStaged : more ? n : n + kStrip;
        const int64_t next_block = same ? b : more ? b + kBlocks : 0;
        for (int64_t i = 0; i < kStaged; ++i) {
          const int64_t row = min_of(n + r + i, end - 1), next_row = min_of(next + i, args.out_features - 1);
          uint16_t* to = staged + i / kTogether * kTogether * kDepth + i % kTogether * kStep;
          for (int64_t j = 0; j < some; ++j, to += kTogether * kPackedBlock) {
            Weight::ask_for(weight, next_row, min_of(next_block + j, blocks - 1));
            Weight::stage(weight, row, b + j, to);
          }
        }
        const uint16_t* x = args.tiles + b * kPackedBlock * args.rows;
        for (int64_t group = 0; group < groups; ++group) {
          const int64_t rows = group_begin(args.rows, group + 1) - group_begin(args.rows, group);
          multiply_rows(rows, staged, x, steps, accumulators + r * stride + group * kRows, stride, b == 0);
          x += rows * steps * kStep;
        }
      }
    }
    with_activation(args.activation,
                    [&](auto tag) { finish<decltype(tag)::value>(args, accumulators, stride, n, count); });
  }
}

}  // namespace

void gemm_pairs_avx512_bf16(const GemmArgs& args, int64_t begin, int64_t end, float* accumulators) {
  if (args.packed == nullptr) return outputs<Plain>(args, begin, end, accumulators);
  return with_format(args.packed->format, [&](auto tag) {
    return outputs<Packed<decltype(tag)::value>>(args, begin, end, accumulators);
  });
}

void gemm_paired_rows_avx512_bf16(const GemmArgs& args, const void* from, int64_t stride, int64_t begin,
                                  int64_t end, uint16_t* to) {
  const auto* x = static_cast<const uint16_t*>(from);
  const int64_t width = gemm_padded_width(args.in_features);
  for (int64_t k = 0; k < width; k += kDepth) {
    const int64_t depth = min_of(kDepth, width - k);
    for (int64_t group = begin; group < end; ++group) {
      const int64_t first = group_begin(args.rows, group), last = group_begin(args.rows, group + 1);
      uint16_t* at = to + k * args.rows + first * depth;
      for (int64_t i = k; i < k + depth; i += kStep) {
        const __mmask32 mask = first_of_32(args.in_features - i);
        for (int64_t m = first; m < last; ++m, at += kStep) {
          _mm512_store_si512(at, _mm512_maskz_loadu_epi16(mask, x + m * stride + i));
        }
      }
    }
  }
}

}  // namespace hf_fastpath
