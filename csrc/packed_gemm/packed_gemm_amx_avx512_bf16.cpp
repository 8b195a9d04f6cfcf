// What: products of up to 64 rows of x in 16 bits with a quantized weight, in the tiles of AMX. Weights are
//   dequantized into tiles of bfloat16: with their scale, rounded once, for x in bfloat16; for float16 in
//   two, the first eight significant bits and what these leave, rounded once, and x likewise. Of the four
//   products the two rests' is left out: it is less than 2^-14 of the whole. fp8 and bytes are exact in one,
//   and a row's scale is applied to the accumulators. Subnormal bfloat16 count as zeros.
// Work split: a thread takes a range of outputs, 16 or 32 at a time. While a block of 128 inputs of theirs is
//   multiplied, the next is dequantized into the other half of a buffer in the first-level cache.
// Traffic: quants and scales once; x from the second-level cache once for these outputs.
// Roofline: read bandwidth up to 16 rows of bfloat16, then issue: dequantizing takes 8 to 20 instructions for
//   32 weights, beside one product of tiles a group of 16 rows, or three of float16.
#include "common/amx_tiles.h"
#include "packed_gemv/packed_gemv_block.h"
#include "weights/packed_dequantize_avx512.h"

namespace hf_fastpath {
namespace {

static_assert(kRun == kAmxRows && kSubBlock == kAmxInputs);

// Blocks ahead in its row that quants are asked for.
constexpr int64_t kAheadBlocks = 4;

// How a product uses the registers of use_tiles_for().
template <PackedFormat kFormat, bool kInTwo, int kGroups>
struct Registers {
  static constexpr int kTerms = kInTwo && !Traits<kFormat>::kScalesSums ? 2 : 1;  // of a weight
  static constexpr int kTiles = kTerms == 1 && kGroups <= 2 ? 2 : 1;              // of weight rows
  static constexpr int kRows = kTiles * kAmxRows;
  static constexpr int kWeights = kTiles * kTerms;
  static constexpr int kAccumulators = kTiles * kGroups;
  // Chains of sums: of every other product where registers are left, as short chains round less.
  static constexpr int kChains = kAccumulators <= 2 ? 2 : 1;
  static constexpr int64_t kBuffer = kSubBlocks * kWeights * kAmxElements;

  using Weight = PackedRows<kFormat>;

  // Block b of rows n + [begin, end) to their places in the buffer. Rows behind the last are that again.
  HF_INLINE void dequantize(Weight weight, int64_t last, int64_t n, int64_t b, int begin, int end,
                            const Fp8Values& values, uint16_t* buffer) {
    constexpr int64_t kBytes = Weight::kBytes;
    const int64_t row_bytes = weight.blocks * kBytes;
    const bool in_row = b + kAheadBlocks < weight.blocks;
    const int64_t ahead = kAheadBlocks * kBytes + (in_row ? 0 : (kRows - 1) * row_bytes);
#pragma GCC unroll 1
    for (int r = begin; r < end; ++r) {
      const int64_t row = min_of(n + r, last);
      const uint8_t* quants = Weight::block(weight, row, b);
      for (int64_t line = 0; line < kBytes; line += kCacheLineBytes) prefetch(quants + ahead + line);
      uint16_t* const to = buffer + r / kAmxRows * kAmxElements + r % kAmxRows * kAmxInputs;
      dequantize_block<kFormat, BF16, kTerms>(
          weight, row, b, 1.0f, values, [&](int s, int term, __m512i words) {
            _mm512_store_si512(to + (s * kWeights + term) * kAmxElements, words);
          });
    }
  }

  // Scales that are read with block b of the rows behind the next kRows.
  HF_INLINE void prefetch_scales(Weight weight, int64_t n, int64_t b) {
    if constexpr (Traits<kFormat>::kScalesSums) return;
    constexpr int64_t kBytes = kRows * Traits<kFormat>::kBlockScaleBytes;
    const int64_t first = (n + kRows) * weight.groups;
    const auto* from = reinterpret_cast<const char*>(weight.scales + first) + b * kBytes;
    for (int64_t line = 0; line < kBytes; line += kCacheLineBytes) prefetch(from + line);
    if constexpr (Traits<kFormat>::kHasZeros) {
      prefetch(weight.zeros + first + b * kRows * Traits<kFormat>::kZerosPerBlock);
    }
  }

  // Adds the products of sub-block kS of a block in the buffer with one term of x; x: its tile of the first
  // group, which lies `group` elements before the next's.
  template <int kS, int kXTerm>
  HF_INLINE void multiply(const uint16_t* buffer, const uint16_t* x, int64_t group) {
    if constexpr (kXTerm == 0) {
      for_each_index(Indices<kWeights>(), [&](auto w) __attribute__((always_inline)) {
        load_tile<6 + w.value>(buffer + (kS * kWeights + w.value) * kAmxElements, kAmxRowBytes);
      });
    }
    for_each_index(Indices<(kGroups + 1) / 2>(), [&](auto pair) __attribute__((always_inline)) {
      constexpr int kFirst = 2 * decltype(pair)::value;
      constexpr Indices<(kFirst + 1 < kGroups ? 2 : 1)> kEach;
      for_each_index(kEach, [&](auto g) __attribute__((always_inline)) {
        load_tile<4 + g.value>(x + (kFirst + g.value) * group, kAmxRowBytes);
      });
      // What is left of both is not multiplied: it is less than 2^-14 of a product.
      for_each_index(
          Indices<(kXTerm == 1 ? kTiles : kWeights)>(), [&](auto w) __attribute__((always_inline)) {
            for_each_index(kEach, [&](auto g) __attribute__((always_inline)) {
              constexpr int kW = decltype(w)::value, kG = decltype(g)::value, kTile = kTiles == 2 ? kW : 0;
              constexpr int kAccumulator =
                  (kTile * kGroups + kFirst + kG) * kChains + (kS + kW - kTile + kXTerm) % kChains;
              multiply_bf16<kAccumulator, 6 + kW, 4 + kG>();
            });
          });
    });
  }
};

template <class Element, PackedFormat kFormat, int kGroups>
bool tiles_range(const PackedArgs& args, int64_t begin, int64_t end) {
  constexpr bool kInTwo = std::is_same_v<Element, F16>;
  using Registers = Registers<kFormat, kInTwo, kGroups>;
  constexpr int kQuarter = Registers::kRows / kSubBlocks;
  constexpr Indices<Registers::kAccumulators * Registers::kChains> kEachAccumulator;
  alignas(64) uint16_t buffer[2][Registers::kBuffer];
  alignas(64) float accumulators[Registers::kAccumulators * Registers::kChains][kAmxRows * kAmxRows];
  alignas(64) float y[kMaxPackedAmxRows * kRun];
  const int64_t group = args.weight.blocks * kSubBlocks * kAmxElements;  // elements of x
  const auto weight = Registers::Weight::of(args.weight);
  const int64_t last = end - 1;
  Fp8Values
      values;  // by itself, so that the compiler keeps it in registers: in a SumScaledWeight it does not
  if constexpr (kLooksUp<kFormat>) values = fp8_values<BF16>(1.0f);
  use_tiles_for(kAmxRows, kAmxRows);
  int turn = 0;
  Registers::dequantize(weight, last, begin, 0, 0, Registers::kRows, values, buffer[turn]);
  bool finite = true;
  for (int64_t n = begin; n < end; n += Registers::kRows) {
    for_each_index(kEachAccumulator,
                   [&](auto sum) __attribute__((always_inline)) { zero_tile<sum.value>(); });
    const uint16_t* x = args.tiles;
    for (int64_t b = 0; b < args.weight.blocks; ++b, turn ^= 1) {
      const bool same = b + 1 < args.weight.blocks;
      const int64_t then = same ? n : n + Registers::kRows, block = same ? b + 1 : 0;  // what is dequantized
      Registers::prefetch_scales(weight, n, b);
      for_each_index(Indices<int(kSubBlocks)>(), [&](auto s) __attribute__((always_inline)) {
        constexpr int kS = decltype(s)::value, kFirst = kS * kQuarter;
        // Few products hide no more of it in two parts.
        constexpr int kHalf = kGroups > 1 ? kFirst + kQuarter / 2 : kFirst;
        Registers::template multiply<kS, 0>(buffer[turn], x, group);
        if constexpr (kInTwo) {
          Registers::dequantize(weight, last, then, block, kFirst, kHalf, values, buffer[turn ^ 1]);
          Registers::template multiply<kS, 1>(buffer[turn], x + kGroups * group, group);
        }
        Registers::dequantize(weight, last, then, block, kInTwo ? kHalf : kFirst, kFirst + kQuarter, values,
                              buffer[turn ^ 1]);
        x += kAmxElements;
      });
    }
    for_each_index(kEachAccumulator, [&](auto sum) __attribute__((always_inline)) {
      store_tile<sum.value>(accumulators[sum.value], kAmxRowBytes);
    });
    for (int t = 0; t < Registers::kTiles && n + t * kRun < end; ++t) {
      const int64_t first = n + t * kRun, count = min_of(kRun, end - first);
      float* const of_tile = accumulators[t * kGroups * Registers::kChains];
      if constexpr (Registers::kChains == 2) {
        for (int g = 0; g < kGroups; ++g) {
          const float* both = accumulators[(t * kGroups + g) * 2];
          for (int64_t i = 0; i < kAmxRows * kAmxRows; i += 16) {
            _mm512_store_ps(
                of_tile + g * kAmxRows * kAmxRows + i,
                _mm512_add_ps(_mm512_load_ps(both + i), _mm512_load_ps(both + kAmxRows * kAmxRows + i)));
          }
        }
      }
      finite = (rows_of_x<false, kGroups>(of_tile, y) || !kInTwo) && finite;
      if constexpr (Traits<kFormat>::kScalesSums) {
        const auto mask = static_cast<__mmask16>((1u << count) - 1);
        __m512 scales;
        if constexpr (Traits<kFormat>::kScaleBytes == 4) {
          scales = _mm512_maskz_loadu_ps(mask, weight.scales + first);
        } else {
          scales = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, weight.scales + first));
        }
        for (int64_t m = 0; m < args.rows; ++m) {
          _mm512_store_ps(y + m * kRun, _mm512_mul_ps(_mm512_load_ps(y + m * kRun), scales));
        }
      }
      finish<Element>(args, y, first, count);
    }
  }
  release_tiles();
  return finite;
}

template <class Element, PackedFormat kFormat>
bool range_in_tiles(const PackedArgs& args, int64_t begin, int64_t end) {
  switch ((args.rows + kAmxRows - 1) / kAmxRows) {
    case 1:
      return tiles_range<Element, kFormat, 1>(args, begin, end);
    case 2:
      return tiles_range<Element, kFormat, 2>(args, begin, end);
    case 3:
      return tiles_range<Element, kFormat, 3>(args, begin, end);
    default:
      return tiles_range<Element, kFormat, 4>(args, begin, end);
  }
}

}  // namespace

void packed_tiles_amx(DType dtype, int64_t rows, int64_t width, const float* x, uint16_t* tiles) {
  for (int term = 0; term < tile_terms(dtype); ++term) {
    for (int64_t first = 0; first < rows; first += kAmxRows) {
      for (int64_t k = 0; k < width; k += kAmxInputs, tiles += kAmxElements) {
        __m512i v[kAmxRows] = {};
        for (int64_t m = 0; m < min_of(kAmxRows, rows - first); ++m) {
          const float* from = x + (first + m) * width + k;
          const __m512 front = _mm512_loadu_ps(from), back = _mm512_loadu_ps(from + 16);
          v[m] = term == 0 ? narrow(front, back) : narrow(rest_of(front), rest_of(back));
        }
        transpose_16(v);
        for (int64_t pair = 0; pair < kAmxPairs; ++pair)
          _mm512_store_si512(tiles + pair * 2 * kAmxRows, v[pair]);
      }
    }
  }
}

bool packed_gemm_amx(const PackedArgs& args, int64_t begin, int64_t end) {
  const auto range = [&](auto element) {
    using Element = decltype(element);
    return with_format(args.weight.format, [&](auto tag) {
      return range_in_tiles<Element, decltype(tag)::value>(args, begin, end);
    });
  };
  return args.dtype == DType::kBFloat16 ? range(BF16{}) : range(F16{});
}

}  // namespace hf_fastpath
