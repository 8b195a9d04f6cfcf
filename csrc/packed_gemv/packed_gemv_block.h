// The products that packed_gemv_avx2.cpp, packed_gemv_avx512.cpp and packed_gemv_avx512_vnni.cpp instantiate,
// each with its own vectors. Only these include this header; linkage is internal, as in avx2_math.h.
//
// An Isa has
//   kAccumulators                               accumulators that stay in registers
//   Floats, load, zero, mul, fma, add, half     16 values; half folds them to eight lanes
//   dequantize_fp8(32 bytes, to)                as two Floats
//   all(value)                                  one value in all of them
//   pair(from)                                  from[0] eight times, then from[1]
//   halves(from), bytes(from), powers(from)     16 float16, bytes from 0 up, or of exponents of two
//   twice(from)                                 eight float32, each twice
//   Pieces<bits>, pieces_of<bits>(block)        a block's quants, spread
//   pieces_of_bytes(block, zeros)               those of bytes from 0 up, less the zeros of their sub-blocks
//   scaled_pieces_of(block, record)             those of bytes times the scales of halves of sub-blocks
//   looked_up<format>(block)                    or their values in whole steps of a table
//   Total, none, dot(pieces, steps)             32-bit sums of a block
//   floats(two totals)                          the sums of two blocks, eight lanes each
//   floats(four totals)                         of four blocks of four bits, a lane a sub-block
//   wide_floats(four totals)                    the same of a table, whose sums over a sub-block may pass
//   2^31
// Whatever the Isa, integers go through the same operations in the same order: all give the same bits.
#pragma once

#include <type_traits>

#include "common/avx2_math.h"
#include "common/epilogue_avx2.h"
#include "packed_gemv/packed_gemv_cpu.h"
#include "weights/packed_values_avx2.h"

namespace hf_fastpath {
namespace {

constexpr int kStreams = 4;
// One row of x reads so many streams where the CPU follows them: it leaves the most time for reading.
constexpr int kFollowedStreams = 2;
constexpr int64_t kScalesAheadBytes = 512;  // prefetched in each stream
constexpr int64_t kRun = 16;  // outputs of a stream before bias and activation are applied to them

// Where a stream's weight row is.
struct Row {
  const uint8_t* quants;
  const char* scales;
  const uint8_t* zeros;

  template <PackedFormat kFormat>
  HF_INLINE const typename Traits<kFormat>::Scale* scales_of(const Row& row) {
    return reinterpret_cast<const typename Traits<kFormat>::Scale*>(row.scales);
  }
  template <PackedFormat kFormat>
  HF_INLINE const uint8_t* record(const Row& row, int64_t b) {
    return reinterpret_cast<const uint8_t*>(row.scales) + b * Traits<kFormat>::kRecordBytes;
  }
  HF_INLINE Row of(const PackedArgs& args, int64_t n) {
    return {args.weight.quants + n * args.weight.row_bytes(),
            static_cast<const char*>(args.weight.scales) + n * args.weight.scale_row_bytes(),
            args.weight.zeros != nullptr ? args.weight.zeros + n * args.weight.groups : nullptr};
  }
};

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

HF_INLINE void prefetch_quants(const uint8_t* ahead, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += kCacheLineBytes) {
    _mm_prefetch(reinterpret_cast<const char*>(ahead + line), _MM_HINT_T0);
  }
}

// ---- integers -----------------------------------------------------------------------------------------

// Scales and zeros of a row's next blocks in float32; after them zeros, which a last block without a second
// reads.
constexpr int64_t kFactors = 16;
struct Factors {
  alignas(64) float scale[kFactors + 1];
  alignas(64) float zero[kFactors + 1];
};

// Those of blocks [b, b + kFactors), the first `count` of which exist.
template <PackedFormat kFormat>
HF_INLINE void fill(const Row& row, int64_t b, int64_t count, Factors& to) {
  alignas(16) uint16_t some_scales[kFactors] = {};
  alignas(16) uint8_t some_zeros[kFactors] = {};
  to.scale[kFactors] = to.zero[kFactors] = 0.0f;
  const uint16_t* scales = Row::scales_of<kFormat>(row) + b;
  const uint8_t* zeros = Traits<kFormat>::kHasZeros ? row.zeros + b : nullptr;
  if (count < kFactors) {  // memory may end behind them
    for (int64_t i = 0; i < count; ++i) {
      some_scales[i] = scales[i];
      if constexpr (Traits<kFormat>::kHasZeros) some_zeros[i] = zeros[i];
    }
    scales = some_scales, zeros = some_zeros;
  }
  for (int64_t i = 0; i < kFactors; i += 8) {
    _mm256_store_ps(to.scale + i,
                    _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + i))));
    if constexpr (Traits<kFormat>::kHasZeros) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(zeros + i));
      _mm256_store_ps(to.zero + i, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)));
    }
  }
}

// Scales of `blocks` blocks from b on, a lane a sub-block.
template <class Isa, PackedFormat kFormat>
HF_INLINE typename Isa::Floats sub_block_scales(const Row& row, int64_t b, int blocks) {
  using Scale = typename Traits<kFormat>::Scale;
  constexpr int kOfBlock = Traits<kFormat>::kScalesPerBlock, kUnit = 16 / lanes_of(kFormat);
  const auto by_lane = [](const Scale* scales) {
    if constexpr (!Traits<kFormat>::kEachSubBlock) {
      return Isa::twice(scales);
    } else if constexpr (sizeof(Scale) == 1) {
      return Isa::powers(scales);
    } else if constexpr (kUnit == 4) {
      return Isa::halves(scales);
    } else {  // two lanes a sub-block
      alignas(32) float wide[8];
      _mm256_store_ps(wide, F16::load(scales));
      return Isa::twice(wide);
    }
  };
  const Scale* from = Row::scales_of<kFormat>(row) + b * kOfBlock;
  if (blocks == kUnit) return by_lane(from);
  alignas(32) Scale some[kUnit * kOfBlock] = {};  // memory may end behind them
  for (int i = 0; i < blocks * kOfBlock; ++i) some[i] = from[i];
  return by_lane(some);
}

// Scales and minimums of `blocks` blocks from b on, which have records, by their lanes; where scales are in
// the quants, those of blocks.
template <class Isa, PackedFormat kFormat>
struct RecordLanes {
  typename Isa::Floats scales, minimums;

  HF_INLINE RecordLanes of(const Row& row, int64_t b, int blocks) {
    constexpr int kUnit = 16 / lanes_of(kFormat), kBytes = Traits<kFormat>::kRecordBytes;
    const uint8_t* from = Row::record<kFormat>(row, b);
    alignas(32) uint8_t some[kUnit * kBytes] = {};  // memory may end behind them
    if (blocks < kUnit) {
      for (int i = 0; i < blocks * kBytes; ++i) some[i] = from[i];
      from = some;
    }
    alignas(32) uint16_t halves[2][16];
    constexpr PackedScales kScales = traits_of(kFormat).scales;
    if constexpr (kHasPairs<kFormat>) {
      static_assert(kUnit == 4, "of bytes there is no such format");
      const auto* pairs = reinterpret_cast<const __m256i*>(from);
      const __m256i first = _mm256_loadu_si256(pairs), second = _mm256_loadu_si256(pairs + 1);
      const __m256i low = _mm256_set1_epi32(0xffff);
      const __m256i of_scales =
          _mm256_packus_epi32(_mm256_and_si256(first, low), _mm256_and_si256(second, low));
      const __m256i of_minimums =
          _mm256_packus_epi32(_mm256_srli_epi32(first, 16), _mm256_srli_epi32(second, 16));
      _mm256_store_si256(reinterpret_cast<__m256i*>(halves[0]), _mm256_permute4x64_epi64(of_scales, 0xd8));
      _mm256_store_si256(reinterpret_cast<__m256i*>(halves[1]), _mm256_permute4x64_epi64(of_minimums, 0xd8));
      RecordLanes made{Isa::halves(halves[0]), Isa::halves(halves[1])};
      if constexpr (pairs_hold_zeros(kScales))
        made.minimums = Isa::mul(Isa::mul(made.scales, Isa::all(-1.0f)), made.minimums);  // exact
      if constexpr (pairs_hold_middles(kScales))
        made.minimums = Isa::fma(made.scales, Isa::all(-8.0f), made.minimums);
      return made;
    } else {
      const auto word = [&](int i, int w) __attribute__((always_inline)) {  // w of block i
        int bits;
        __builtin_memcpy(&bits, from + i * kBytes + 4 * w, sizeof bits);
        return bits;
      };
      if constexpr (Traits<kFormat>::kScalesHalves) {
        const float of_blocks[2] = {half_to_float(static_cast<uint16_t>(word(0, 0))),
                                    half_to_float(static_cast<uint16_t>(word(1, 0)))};
        return {Isa::pair(of_blocks), Isa::zero()};
      } else {
        // The numbers of a block's first byte and of a sub-block's byte, by lane.
        const __m128i first_of[2] = {
            kUnit == 4 ? _mm_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 4, 5, 4, 5, 4, 5, 4, 5)
                       : _mm_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1),
            kUnit == 4 ? _mm_setr_epi8(8, 9, 8, 9, 8, 9, 8, 9, 12, 13, 12, 13, 12, 13, 12, 13)
                       : _mm_setr_epi8(4, 5, 4, 5, 4, 5, 4, 5, 4, 5, 4, 5, 4, 5, 4, 5)};
        const __m128i of_lane = kUnit == 4
                                    ? _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
                                    : _mm_setr_epi8(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
        const auto four = [&](int w) __attribute__((always_inline)) {
          return kUnit == 4 ? _mm_setr_epi32(word(0, w), word(1, w), word(kUnit - 2, w), word(kUnit - 1, w))
                            : _mm_setr_epi32(word(0, w), word(1, w), 0, 0);
        };
        const __m128i factors = _mm_xor_si128(four(0), _mm_set1_epi32(static_cast<int>(0x80000000)));
        alignas(16) uint8_t bytes[2][16];
        for (int part = 0; part < 2; ++part) {  // d, and dmin with its sign turned
          const __m128i step = _mm_set1_epi8(static_cast<char>(2 * part));
          const __m128i first = _mm_shuffle_epi8(factors, _mm_add_epi8(first_of[0], step));
          const __m128i second = _mm_shuffle_epi8(factors, _mm_add_epi8(first_of[1], step));
          // One store: what is loaded next must not wait for two.
          _mm256_store_si256(reinterpret_cast<__m256i*>(halves[part]), _mm256_set_m128i(second, first));
          _mm_store_si128(reinterpret_cast<__m128i*>(bytes[part]), _mm_shuffle_epi8(four(1 + part), of_lane));
        }
        return {Isa::mul(Isa::halves(halves[0]), Isa::bytes(bytes[0])),
                Isa::mul(Isa::halves(halves[1]), Isa::bytes(bytes[1]))};
      }
    }
  }
};

// Zeros of the sub-blocks of `blocks` blocks of four bits from b on.
template <class Isa, PackedFormat kFormat>
HF_INLINE typename Isa::Floats sub_block_zeros(const Row& row, int64_t b, int blocks) {
  const uint8_t* from = row.zeros + b * kSubBlocks;
  if (blocks == 4) return Isa::bytes(from);
  alignas(16) uint8_t some[4 * kSubBlocks] = {};
  for (int i = 0; i < blocks * int(kSubBlocks); ++i) some[i] = from[i];
  return Isa::bytes(some);
}

// A block's quants as integers that meet steps of x.
template <class Isa, PackedFormat kFormat>
HF_INLINE auto pieces_of(const Row& row, int64_t b) {
  const uint8_t* const quants = row.quants + b * (kPackedBlock * bits_of(kFormat) / 8);
  if constexpr (Traits<kFormat>::kHasTable) {
    return Isa::template looked_up<kFormat>(quants);
  } else if constexpr (Traits<kFormat>::kScalesHalves) {
    return Isa::scaled_pieces_of(quants, Row::record<kFormat>(row, b));
  } else if constexpr (Traits<kFormat>::kHasZeros && bits_of(kFormat) == 8) {
    return Isa::pieces_of_bytes(quants, row.zeros + b * kSubBlocks);
  } else {
    return Isa::template pieces_of<bits_of(kFormat)>(quants);
  }
}

// y[r][m * kRun] = the product of weight row r and rows first_row + m of x, but for the multiplier.
template <class Isa, PackedFormat kFormat, int kS, int kM>
void integer_tile(const PackedArgs& args, const Row* row, int64_t first_row, float* const* y) {
  using Floats = typename Isa::Floats;
  using Total = typename Isa::Total;
  constexpr int64_t kBytes = kPackedBlock * bits_of(kFormat) / 8, kLanes = lanes_of(kFormat);
  constexpr bool kEachSubBlock = Traits<kFormat>::kEachSubBlock, kHasTable = Traits<kFormat>::kHasTable;
  constexpr bool kScalesSums = Traits<kFormat>::kScalesSums;
  constexpr bool kHasFactors = kLanes == 8 && !kEachSubBlock && !kScalesSums;
  constexpr bool kHasRecords = Traits<kFormat>::kHasRecords, kHasMinimums = Traits<kFormat>::kHasMinimums;
  constexpr int kUnit = 16 / kLanes;  // blocks whose sums are one Floats
  Floats sum[kS][kM];
#pragma GCC unroll 4
  for (int r = 0; r < kS; ++r) {
#pragma GCC unroll 4
    for (int m = 0; m < kM; ++m) sum[r][m] = Isa::zero();
  }
  const int64_t stride = args.step_blocks, ahead = read_ahead_bytes();
  const auto* all_steps = static_cast<const char*>(args.steps) + first_row * stride * kStepBytes;
  const float* all_sizes = args.step_sizes + first_row * stride * kLanes;
  const float* all_offsets = args.step_offsets + first_row * stride * kLanes;
  Factors factors[kHasFactors ? kS : 1];
  // `count` blocks from b on, at most kUnit.
  const auto unit = [&](int64_t b, int64_t factor, auto count) __attribute__((always_inline)) {
    constexpr int kBlocks = decltype(count)::value;
#pragma GCC unroll 4
    for (int r = 0; r < kS; ++r) {
      const uint8_t* quants = row[r].quants + b * kBytes;
      prefetch_quants(quants + ahead, kBlocks * kBytes);
      Total total[kUnit][kM];
#pragma GCC unroll 4
      for (int i = 0; i < kUnit; ++i) {
        if (i < kBlocks) {
          const auto pieces = pieces_of<Isa, kFormat>(row[r], b + i);
#pragma GCC unroll 4
          for (int m = 0; m < kM; ++m) {
            total[i][m] = Isa::dot(pieces, all_steps + (m * stride + b + i) * kStepBytes);
          }
        } else {
#pragma GCC unroll 4
          for (int m = 0; m < kM; ++m) total[i][m] = Isa::none();
        }
      }
      Floats scales;
      if constexpr (kHasFactors) scales = Isa::pair(factors[r].scale + factor);
      Floats minimums;
      if constexpr (kHasRecords) {
        const auto lanes = RecordLanes<Isa, kFormat>::of(row[r], b, kBlocks);
        scales = lanes.scales, minimums = lanes.minimums;
      } else if constexpr (!kHasFactors && !kScalesSums) {
        scales = sub_block_scales<Isa, kFormat>(row[r], b, kBlocks);
      }
      Floats zeros;
      if constexpr (kUnit == 4 && Traits<kFormat>::kHasZeros)
        zeros = sub_block_zeros<Isa, kFormat>(row[r], b, kBlocks);
#pragma GCC unroll 4
      for (int m = 0; m < kM; ++m) {
        const int64_t at = (m * stride + b) * kLanes;
        // Exact in four bits but of tables: sums and offsets are integers below 2^24.
        Floats value;
        if constexpr (kHasTable) {
          value = Isa::wide_floats(total[0][m], total[1][m], total[2][m], total[3][m]);
        } else if constexpr (kUnit == 4 && Traits<kFormat>::kHasZeros) {
          value = Isa::fma(zeros, Isa::load(all_offsets + at),
                           Isa::floats(total[0][m], total[1][m], total[2][m], total[3][m]));
        } else if constexpr (kUnit == 4 && kHasMinimums) {
          value = Isa::floats(total[0][m], total[1][m], total[2][m], total[3][m]);
        } else if constexpr (kUnit == 4) {
          value = Isa::add(Isa::floats(total[0][m], total[1][m], total[2][m], total[3][m]),
                           Isa::load(all_offsets + at));
        } else {
          value = Isa::floats(total[0][m], total[1][m]);
        }
        if constexpr (kHasFactors && Traits<kFormat>::kHasZeros) {
          value = Isa::fma(Isa::pair(factors[r].zero + factor), Isa::load(all_offsets + at), value);
        }
        Floats sizes = Isa::load(all_sizes + at);
        if constexpr (kHasMinimums) {
          value = Isa::fma(minimums, Isa::load(all_offsets + at), Isa::mul(scales, value));
        } else if constexpr (!kScalesSums)
          sizes = Isa::mul(scales, sizes);
        sum[r][m] = Isa::fma(value, sizes, sum[r][m]);
      }
    }
  };
  for (int64_t begin = 0; begin < args.weight.blocks; begin += kFactors) {
    const int64_t end = min_of(args.weight.blocks, begin + kFactors);
    const int64_t base = args.weight.blocks < kFactors ? 0 : min_of(begin, args.weight.blocks - kFactors);
    for (int r = 0; r < kS; ++r) {
      constexpr int64_t kScaleBytes = Traits<kFormat>::kBlockScaleBytes, kLength = kFactors * kScaleBytes;
      const char* scales = row[r].scales + begin * kScaleBytes;
      for (int64_t line = 0; line < kLength; line += kCacheLineBytes) {
        _mm_prefetch(scales + line + kScalesAheadBytes, _MM_HINT_T0);
      }
      if constexpr (Traits<kFormat>::kHasZeros) {
        constexpr int kZeros = Traits<kFormat>::kZerosPerBlock;
        const auto* zeros = reinterpret_cast<const char*>(row[r].zeros + begin * kZeros);
        _mm_prefetch(zeros + kScalesAheadBytes / 2 * kZeros, _MM_HINT_T0);
      }
      if constexpr (kHasFactors)
        fill<kFormat>(row[r], base, min_of(args.weight.blocks, kFactors), factors[r]);
    }
    int64_t b = begin;
    for (; b + kUnit <= end; b += kUnit) unit(b, b - base, Constant<kUnit>());
    if constexpr (kUnit == 4) {
      if (end - b == 3) unit(b, 0, Constant<3>());
      if (end - b == 2) unit(b, 0, Constant<2>());
    }
    if (end - b == 1) unit(b, b - base, Constant<1>());
  }
#pragma GCC unroll 4
  for (int r = 0; r < kS; ++r) {
#pragma GCC unroll 4
    for (int m = 0; m < kM; ++m) {
      y[r][m * kRun] = horizontal_sum(Isa::half(sum[r][m]));
      if constexpr (kHasTable) y[r][m * kRun] *= 1.0f / static_cast<float>(traits_of(kFormat).steps);
      if constexpr (kScalesSums) y[r][m * kRun] *= scale_to_float(*Row::scales_of<kFormat>(row[r]));
    }
  }
}

// ---- fp8 ----------------------------------------------------------------------------------------------

// Inputs whose products are one chain of float32 before they are added to the total: short chains round less,
// and weights of one chain share a scale.
template <PackedFormat kFormat>
constexpr int64_t kChain = (Traits<kFormat>::kScalesSums ? 4 : 1) * kPackedBlock;

template <class Isa, PackedFormat kFormat, int kS, int kM>
void fp8_tile(const PackedArgs& args, const Row* row, int64_t first_row, float* const* y) {
  const int64_t width = args.weight.blocks * kPackedBlock, ahead = read_ahead_bytes();
  constexpr bool kScalesSums = Traits<kFormat>::kScalesSums;
  const float* x = args.x + first_row * width;
  typename Isa::Floats total[kS][kM], sum[kS][kM];
  for (int r = 0; r < kS; ++r) {
    for (int m = 0; m < kM; ++m) total[r][m] = Isa::zero();
  }
  for (int64_t begin = 0; begin < width; begin += kChain<kFormat>) {
#pragma GCC unroll 4
    for (int r = 0; r < kS; ++r) {
#pragma GCC unroll 4
      for (int m = 0; m < kM; ++m) sum[r][m] = Isa::zero();
    }
    const int64_t end = min_of(width, begin + kChain<kFormat>);
    for (int64_t line = begin; line < end; line += kCacheLineBytes) {
#pragma GCC unroll 4
      for (int r = 0; r < kS; ++r) prefetch_quants(row[r].quants + line + ahead, kCacheLineBytes);
#pragma GCC unroll 4
      for (int64_t i = line; i < line + kCacheLineBytes; i += 32) {
#pragma GCC unroll 4
        for (int r = 0; r < kS; ++r) {
          typename Isa::Floats weight[2];
          Isa::dequantize_fp8(row[r].quants + i, weight);
#pragma GCC unroll 4
          for (int m = 0; m < kM; ++m) {
            sum[r][m] = Isa::fma(weight[0], Isa::load(x + m * width + i), sum[r][m]);
            sum[r][m] = Isa::fma(weight[1], Isa::load(x + m * width + i + 16), sum[r][m]);
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kS; ++r) {
#pragma GCC unroll 4
      for (int m = 0; m < kM; ++m) {
        if constexpr (kScalesSums) {
          total[r][m] = Isa::add(total[r][m], sum[r][m]);
        } else {
          const float scale = scale_to_float(Row::scales_of<kFormat>(row[r])[begin / kPackedBlock]);
          total[r][m] = Isa::fma(Isa::all(scale), sum[r][m], total[r][m]);
        }
      }
    }
  }
  for (int r = 0; r < kS; ++r) {
    const float of_row = kScalesSums ? scale_to_float(*Row::scales_of<kFormat>(row[r])) : 1.0f;
    const float scale = of_row * 256.0f;  // see dequantize_fp8
    for (int m = 0; m < kM; ++m) y[r][m * kRun] = horizontal_sum(Isa::half(total[r][m])) * scale;
  }
}

// ---- outputs ------------------------------------------------------------------------------------------

// Multiplies all rows of x with kS weight rows: kM rows of x at a time, with kW weight rows.
template <class Isa, PackedFormat kFormat, int kS>
void tile(const PackedArgs& args, const Row (&row)[kS], float* const (&y)[kS]) {
  int64_t m = 0;
  const auto rows = [&](auto count) {
    constexpr int kM = decltype(count)::value, kMost = Isa::kAccumulators / kM, kW = kMost < kS ? kMost : kS;
    static_assert(kS % kW == 0);
    for (int r = 0; r < kS; r += kW) {
      float* to[kW];
      for (int i = 0; i < kW; ++i) to[i] = y[r + i] + m * kRun;
      if constexpr (Traits<kFormat>::kIsFloat) {
        fp8_tile<Isa, kFormat, kW, kM>(args, row + r, m, to);
      } else {
        integer_tile<Isa, kFormat, kW, kM>(args, row + r, m, to);
      }
    }
    m += kM;
  };
  while (args.rows - m >= 4) rows(Constant<4>());
  if (args.rows - m >= 2) rows(Constant<2>());
  if (args.rows - m >= 1) rows(Constant<1>());
}

template <class Element>
void finish(const PackedArgs& args, float* y, int64_t begin, int64_t count) {
  using Storage = typename Element::Storage;
  const auto* bias = static_cast<const Storage*>(args.bias);
  const auto* residual = static_cast<const Storage*>(args.residual);
  with_activation(args.activation, [&](auto tag) {
    for (int64_t m = 0; m < args.rows; ++m) {
      const int64_t at = m * args.weight.out_features + begin;
      for (int64_t i = 0; i < kRun; ++i) y[m * kRun + i] *= args.weight.multiplier;
      epilogue<Element, decltype(tag)::value>(y + m * kRun, nullptr, bias != nullptr ? bias + begin : nullptr,
                                              residual != nullptr ? residual + at : nullptr,
                                              static_cast<Storage*>(args.out) + at, count);
    }
  });
}

// Outputs [begin, end) as kS streams of equal length; returns where they end.
template <int kS, class Tile>
int64_t streams(const PackedArgs& args, int64_t begin, int64_t end, const Tile& tile) {
  alignas(32) float y[kS][kDequantizedRows * kRun] = {};
  const int64_t length = (end - begin) / kS;
  for (int64_t i = 0; i < length; i += kRun) {
    const int64_t count = min_of(kRun, length - i);
    for (int64_t j = 0; j < count; ++j) {
      Row row[kS];
      float* to[kS];
      for (int s = 0; s < kS; ++s) {
        row[s] = Row::of(args, begin + s * length + i + j);
        to[s] = y[s] + j;
      }
      tile(row, to);
    }
    for (int s = 0; s < kS; ++s) {
      with_element(args.dtype, [&](auto element) {
        finish<decltype(element)>(args, y[s], begin + s * length + i, count);
      });
    }
  }
  return begin + kS * length;
}

template <class Isa, PackedFormat kFormat>
void range_of(const PackedArgs& args, int64_t begin, int64_t end) {
  const auto as = [&](auto count) {
    constexpr int kS = decltype(count)::value;
    begin = streams<kS>(args, begin, end,
                        [&](const auto& row, const auto& y) { tile<Isa, kFormat, kS>(args, row, y); });
  };
  if (!Traits<kFormat>::kIsFloat && args.rows == 1 && cpu_tuning().follows_streams) {
    as(Constant<kFollowedStreams>());
  } else {
    as(Constant<kStreams>());
  }
  as(Constant<1>());
}

template <class Isa>
HF_INLINE void range(const PackedArgs& args, int64_t begin, int64_t end) {
  return with_format(args.weight.format,
                     [&](auto tag) { return range_of<Isa, decltype(tag)::value>(args, begin, end); });
}

}  // namespace
}  // namespace hf_fastpath
