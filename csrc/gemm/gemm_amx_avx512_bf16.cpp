// What: products of many rows of x in 16 bits with a weight, in the tiles of AMX, which multiply bfloat16 and
//   sum in float32. Of float16 each value becomes the sum of two bfloat16, its first eight significant bits
//   and what these leave, in x and in the weight; of the four products that of both rests is left out: it is
//   less than 2^-14 of the whole. Quantized weights are dequantized with their scale, rounded once to
//   bfloat16, or for x in float16 in two; fp8 is exact in one, and its row's scale is applied to the
//   accumulators. Subnormal bfloat16 count as zeros.
// Work split: a call is a strip of outputs and all rows of x. A block of inputs at a time, 32 outputs are
//   staged into the first-level cache, 32 rows of x at a time pass over them, and accumulators wait in the
//   second-level cache for the next block. While x passes over 32 outputs, the next are staged.
// Traffic: the weight once; a block of x from the second-level cache once for 32 outputs, and x from memory
//   once a strip.
// Roofline: products of tiles, 64 cycles for 32 outputs, 32 rows and 32 inputs, and 192 in float16.
#include "common/amx_tiles.h"
#include "common/epilogue_avx2.h"
#include "gemm/gemm_cpu.h"
#include "weights/packed_dequantize_avx512.h"

namespace hf_fastpath {
namespace {

constexpr int kPair = 2;                     // tiles of outputs that meet as many of x
constexpr int kPairRows = kPair * kAmxRows;  // outputs or rows of x in these
constexpr int64_t kAmxAccumulators = kAmxRows * kAmxRows;

// bfloat16 that a value of Element becomes, and inputs of a block: the more, the fewer accumulators wait; a
// quarter takes up to 12 % longer.
template <class Element>
constexpr int kTermsOf = tile_terms(std::is_same_v<Element, F16> ? DType::kFloat16 : DType::kBFloat16);
template <class Element>
constexpr int64_t kDepth = 1024 / kTermsOf<Element>;

template <class Element>
HF_INLINE void in_terms(__m512i bits, __m512i (&to)[kTermsOf<Element>]) {
  if constexpr (kTermsOf<Element> == 1) {
    to[0] = bits;
  } else {
    const __m512 front = _mm512_cvtph_ps(_mm512_castsi512_si256(bits));
    const __m512 back = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1));
    to[0] = narrow(front, back);
    to[1] = narrow(rest_of(front), rest_of(back));
  }
}

// ---- weights ------------------------------------------------------------------------------------------
// 32 outputs of a block of inputs become tiles, [steps of 32 inputs][terms][two of outputs]. Of kPackedBlock
// inputs they are staged in kUnits units.

constexpr int64_t kUnits = kPairRows;
constexpr int64_t kUnitsAhead = 4;  // rows or, transposed, units that are asked for ahead

// Which outputs, of those before `end`, and their tiles of a block's first inputs.
struct Outputs {
  int64_t first, end;
  uint16_t* tiles;

  // A row of theirs, the last again behind it, and where it is in the tiles.
  int64_t row(int64_t unit) const { return min_of(first + unit, end - 1); }
  uint16_t* row_tiles(int64_t unit) const {
    return tiles + unit / kAmxRows * kAmxElements + unit % kAmxRows * kAmxInputs;
  }
};

// A weight of Element. A unit is a row; transposed, where pairs of inputs change places with outputs' tiles,
// two pairs of inputs.
template <class Element, bool kIsTransposed>
struct Plain {
  static constexpr int kTerms = kTermsOf<Element>;
  static constexpr bool kTransposed = kIsTransposed;
  const uint16_t* weight;
  int64_t stride, in_features;

  HF_INLINE Plain of(const GemmArgs& args) {
    return {static_cast<const uint16_t*>(args.weight), args.weight_stride, args.in_features};
  }

  // Inputs from k on.
  HF_INLINE void stage(const Plain& weight, const Outputs& outputs, int64_t unit, int64_t k) {
    if constexpr (kTransposed) {
      stage_columns(weight, outputs, unit, k);
    } else {
      stage_rows(weight, outputs, unit, k);
    }
  }

 private:
  HF_INLINE void stage_rows(const Plain& rows, const Outputs& outputs, int64_t unit, int64_t k) {
    const uint16_t* from = rows.weight + outputs.row(unit) * rows.stride + k;
    uint16_t* const to = outputs.row_tiles(unit);
    const int64_t left = rows.in_features - k;
    const auto sub_block = [&](int s, __m512i bits) __attribute__((always_inline)) {
      prefetch(from + s * kAmxInputs + kUnitsAhead * rows.stride);
      __m512i terms[kTerms];
      in_terms<Element>(bits, terms);
      for (int term = 0; term < kTerms; ++term)
        _mm512_store_si512(to + (s * kTerms + term) * kPair * kAmxElements, terms[term]);
    };
    if (left >= kPackedBlock) {
#pragma GCC unroll 4
      for (int s = 0; s < kSubBlocks; ++s) sub_block(s, _mm512_loadu_si512(from + s * kAmxInputs));
    } else {
      for (int s = 0; s < kSubBlocks; ++s) {
        const __mmask32 mask = first_of_32(left - s * kAmxInputs);
        sub_block(s, _mm512_maskz_loadu_epi16(mask, from + s * kAmxInputs));
      }
    }
  }

  HF_INLINE void stage_columns(const Plain& columns, const Outputs& outputs, int64_t unit, int64_t k) {
    const __mmask32 mask = first_of_32(outputs.end - outputs.first);
    const auto inputs = [&](int64_t input, __m512i(&terms)[kTerms]) __attribute__((always_inline)) {
      const uint16_t* from = columns.weight + input * columns.stride + outputs.first;
      prefetch(from + kUnitsAhead * 4 * columns.stride);
      const bool exists = input < columns.in_features;
      in_terms<Element>(_mm512_maskz_loadu_epi16(exists ? mask : 0, from), terms);
    };
    alignas(64) static constexpr uint16_t kFront[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                                        37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                        11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i front = _mm512_load_si512(kFront), back = _mm512_add_epi16(front, _mm512_set1_epi16(16));
    for (int64_t pair = 2 * unit; pair < 2 * unit + 2; ++pair) {
      __m512i even[kTerms], odd[kTerms];
      inputs(k + 2 * pair, even);
      inputs(k + 2 * pair + 1, odd);
      uint16_t* const to =
          outputs.tiles + pair / kAmxPairs * kTerms * kPair * kAmxElements + pair % kAmxPairs * 2 * kAmxRows;
      for (int term = 0; term < kTerms; ++term) {
        uint16_t* const tiles = to + term * kPair * kAmxElements;
        _mm512_store_si512(tiles, _mm512_permutex2var_epi16(even[term], front, odd[term]));
        _mm512_store_si512(tiles + kAmxElements, _mm512_permutex2var_epi16(even[term], back, odd[term]));
      }
    }
  }
};

// A quantized weight; a unit is a row.
template <class Element, PackedFormat kFormat>
struct Packed : SumScaledRows<kFormat> {
  static constexpr int kTerms = Traits<kFormat>::kScalesSums ? 1 : kTermsOf<Element>;
  static constexpr bool kTransposed = false;
  using Rows = PackedRows<kFormat>;

  HF_INLINE Packed of(const GemmArgs& args) { return {SumScaledRows<kFormat>::of(*args.packed)}; }

  HF_INLINE void stage(const Packed& weight, const Outputs& outputs, int64_t unit, int64_t k) {
    const int64_t row = outputs.row(unit), b = k / kPackedBlock;
    for (int64_t line = 0; line < Rows::kBytes; line += kCacheLineBytes)
      prefetch(Rows::block(weight.rows, row + kUnitsAhead, b) + line);
    uint16_t* const to = outputs.row_tiles(unit);
    const auto write = [&](int s, int term, __m512i words) __attribute__((always_inline)) {
      _mm512_store_si512(to + (s * kTerms + term) * kPair * kAmxElements, words);
    };
    dequantize_block<kFormat, BF16, kTerms>(weight.rows, row, b, 1.0f, weight.values, write);
  }
};

// 32 outputs of a block on their way into tiles.
template <class Weight>
struct Staging {
  static constexpr int64_t kBlockElements = kSubBlocks * Weight::kTerms * kPair * kAmxElements;
  const Weight& weight;
  Outputs outputs;
  int64_t k, blocks;            // the first input, and how many times kPackedBlock
  int64_t unit = 0, block = 0;  // the next
};

// The next `count` units, as far as there are some.
template <class Weight>
HF_INLINE void stage_next(Staging<Weight>& next, int64_t count) {
  const int64_t end = next.blocks > 0 ? kUnits : 0;
  for (int64_t i = 0; i < count && next.unit < end; ++i) {
    Outputs outputs = next.outputs;
    outputs.tiles += next.block * Staging<Weight>::kBlockElements;
    Weight::stage(next.weight, outputs, next.unit, next.k + next.block * kPackedBlock);
    if (++next.block == next.blocks) next.block = 0, ++next.unit;
  }
}

// ---- products -----------------------------------------------------------------------------------------

template <int kTile>
HF_INLINE void load_pair(const uint16_t* from) {
  load_tile<kTile>(from, kAmxRowBytes);
  load_tile<kTile + 1>(from + kAmxElements, kAmxRowBytes);
}

// Accumulators t * kPair + g of tile t of outputs and tile g of x; transposed, rows of accumulators are rows
// of x.
template <int kGroups, bool kTransposed>
HF_INLINE void multiply_pairs() {
  const auto multiply = [](auto t, auto g) __attribute__((always_inline)) {
    constexpr int kT = decltype(t)::value, kG = decltype(g)::value, kAccumulator = kT * kPair + kG;
    if constexpr (kTransposed) {
      multiply_bf16<kAccumulator, 4 + kG, 6 + kT>();
    } else {
      multiply_bf16<kAccumulator, 6 + kT, 4 + kG>();
    }
  };
  for_each_index(Indices<kPair>(), [&](auto t) __attribute__((always_inline)) {
    for_each_index(Indices<kGroups>(), [&](auto g) __attribute__((always_inline)) { multiply(t, g); });
  });
}

// Adds to accumulators the products of 32 outputs and up to 32 rows of x, `steps` times 32 inputs. With each
// of these `units` of the next outputs are staged.
template <int kGroups, int kXTerms, class Weight>
HF_INLINE void multiply(const uint16_t* weights, const uint16_t* x, int64_t steps, float* accumulators,
                        bool first, Staging<Weight>& next, int64_t units) {
  constexpr int64_t kXTerm = kGroups * kAmxElements, kTerm = kPair * kAmxElements;
  constexpr Indices<kPair * kPair> kEachAccumulator;
  constexpr auto kTransposed = Weight::kTransposed;
  const auto load_x = [&](int term) __attribute__((always_inline)) {
    load_tile<4>(x + term * kXTerm, kAmxRowBytes);
    if constexpr (kGroups == 2) load_tile<5>(x + term * kXTerm + kAmxElements, kAmxRowBytes);
  };
  for_each_index(kEachAccumulator, [&](auto sum) __attribute__((always_inline)) {
    if (first) {
      zero_tile<sum.value>();
    } else {
      load_tile<sum.value>(accumulators + sum.value * kAmxAccumulators, kAmxRowBytes);
    }
  });
  for (int64_t step = 0; step < steps; ++step) {
    load_pair<6>(weights);
    if constexpr (kXTerms == 2) {
      load_x(1);
      multiply_pairs<kGroups, kTransposed>();
    }
    load_x(0);
    multiply_pairs<kGroups, kTransposed>();
    if constexpr (Weight::kTerms == 2) {
      load_pair<6>(weights + kTerm);
      multiply_pairs<kGroups, kTransposed>();
    }
    stage_next(next, units);
    weights += Weight::kTerms * kTerm;
    x += kXTerms * kXTerm;
  }
  for_each_index(kEachAccumulator, [&](auto sum) __attribute__((always_inline)) {
    store_tile<sum.value>(accumulators + sum.value * kAmxAccumulators, kAmxRowBytes);
  });
}

// ---- outputs ------------------------------------------------------------------------------------------

// y[m * kAmxRows + r] of 16 outputs r and rows m. Whether all are finite.
template <bool kTransposed>
bool rows_of_accumulators(const float* accumulators, float* y) {
  if constexpr (!kTransposed) return rows_of_x<false, 1>(accumulators, y);
  __mmask16 odd = 0;
  for (int64_t i = 0; i < kAmxAccumulators; i += kAmxRows) {
    const __m512 row = _mm512_load_ps(accumulators + i);
    odd |= _mm512_fpclass_ps_mask(row, 0x99);  // NaNs and infinities
    _mm512_store_ps(y + i, row);
  }
  return odd == 0;
}

// 32 accumulators of each of up to 32 rows of x, from `row` on, to outputs [n, n + count). Whether all are
// finite.
template <class Element, bool kTransposed, Activation kActivation>
bool finish(const GemmArgs& args, const float* accumulators, const float* scales, int64_t n, int64_t count,
            int64_t row) {
  using Storage = typename Element::Storage;
  const auto* bias = static_cast<const Storage*>(args.bias);
  const auto* residual = static_cast<const Storage*>(args.residual);
  auto* const out = static_cast<Storage*>(args.out);
  const bool plain = kActivation == Activation::kNone && bias == nullptr && residual == nullptr;
  bool finite = true;
  for (int64_t g = 0; g < kPair && row < args.rows; ++g) {
    alignas(64) float y[kPair][kAmxAccumulators];
    for (int64_t t = 0; t < kPair; ++t) {
      finite = rows_of_accumulators<kTransposed>(accumulators + (t * kPair + g) * kAmxAccumulators, y[t]) &&
               finite;
    }
    for (int64_t m = 0; m < kAmxRows && row < args.rows; ++m, ++row) {
      __m512 front = _mm512_load_ps(y[0] + m * kAmxRows), back = _mm512_load_ps(y[1] + m * kAmxRows);
      if (scales != nullptr) {
        front = _mm512_mul_ps(front, _mm512_load_ps(scales));
        back = _mm512_mul_ps(back, _mm512_load_ps(scales + kAmxRows));
      }
      const int64_t at = row * args.out_features + n;
      if (plain && count == kPairRows) {
        _mm512_storeu_si512(out + at, rounded<Element>(front, back));
        continue;
      }
      alignas(64) float both[kPairRows];
      _mm512_store_ps(both, front);
      _mm512_store_ps(both + kAmxRows, back);
      epilogue<Element, kActivation>(both, nullptr, bias != nullptr ? bias + n : nullptr,
                                     residual != nullptr ? residual + at : nullptr, out + at, count);
    }
  }
  return finite;
}

template <class Element, class Weight>
bool strip(const GemmArgs& args, int64_t begin, int64_t end, float* scratch) {
  constexpr int64_t kBlocks = kDepth<Element> / kPackedBlock;
  alignas(64) uint16_t tiles[2][kBlocks * Staging<Weight>::kBlockElements];
  alignas(64) float scales[kPairRows];
  const Weight weight = Weight::of(args);
  const int64_t blocks = gemm_padded_width(args.in_features) / kPackedBlock;
  const int64_t groups = (args.rows + kAmxRows - 1) / kAmxRows, pairs = (groups + kPair - 1) / kPair;
  int turn = 0;
  const auto staging = [&](int64_t n, int64_t block, int to) -> Staging<Weight> {
    return {weight, {n, end, tiles[to]}, block * kPackedBlock, min_of(kBlocks, blocks - block)};
  };
  Staging<Weight> first = staging(begin, 0, turn);
  stage_next(first, kUnits * kBlocks);
  use_tiles_for(kAmxRows, kAmxRows);
  bool finite = true;
  for (int64_t block = 0; block < blocks; block += kBlocks) {
    const int64_t steps = min_of(kBlocks, blocks - block) * kSubBlocks;
    const bool last = block + kBlocks >= blocks;
    for (int64_t n = begin; n < end; n += kPairRows, turn ^= 1) {
      const bool same = n + kPairRows < end;
      Staging<Weight> next = staging(same ? n + kPairRows : begin, same ? block : block + kBlocks, turn ^ 1);
      const int64_t units = (kUnits * kBlocks + pairs * steps - 1) / (pairs * steps);
      const uint16_t* x = args.tiles + block * kPackedBlock * groups * kAmxRows * kTermsOf<Element>;
      float* accumulators = scratch + (n - begin) * pairs * kPairRows;
      if (last && args.packed != nullptr) sum_factors(*args.packed, n, end, kPairRows, scales);
      for (int64_t g = 0; g < groups; g += kPair, accumulators += kPair * kPair * kAmxAccumulators) {
        const int64_t some = min_of(kPair, groups - g);
        const auto multiply_some = some == kPair ? multiply<kPair, kTermsOf<Element>, Weight>
                                                 : multiply<1, kTermsOf<Element>, Weight>;
        multiply_some(tiles[turn], x, steps, accumulators, block == 0, next, units);
        x += some * kAmxElements * kTermsOf<Element> * steps;
        if (!last) continue;
        with_activation(args.activation, [&](auto activation) {
          const auto finish_some = finish<Element, Weight::kTransposed, decltype(activation)::value>;
          finite = finish_some(args, accumulators, args.packed != nullptr ? scales : nullptr, n,
                               min_of(kPairRows, end - n), g * kAmxRows) &&
                   finite;
        });
      }
      stage_next(next, kUnits * kBlocks);
    }
  }
  release_tiles();
  return finite || kTermsOf<Element> == 1;
}

template <class Element>
bool strip_of(const GemmArgs& args, int64_t begin, int64_t end, float* scratch) {
  if (args.packed == nullptr) {
    return (args.transposed ? strip<Element, Plain<Element, true>>
                            : strip<Element, Plain<Element, false>>)(args, begin, end, scratch);
  }
  return with_format(args.packed->format, [&](auto tag) {
    return strip<Element, Packed<Element, decltype(tag)::value>>(args, begin, end, scratch);
  });
}

// ---- x ------------------------------------------------------------------------------------------------

template <class Element>
void tiles_of(const GemmArgs& args, const uint16_t* x, int64_t stride, int64_t begin, int64_t end,
              uint16_t* tiles) {
  constexpr int kTerms = kTermsOf<Element>;
  const int64_t groups = (args.rows + kAmxRows - 1) / kAmxRows, width = gemm_padded_width(args.in_features);
  for (int64_t first = 0; first < width; first += kDepth<Element>) {
    const int64_t depth = min_of(kDepth<Element>, width - first);
    for (int64_t group = begin; group < end; ++group) {
      const int64_t pair = group / kPair * kPair, some = min_of(kPair, groups - pair);
      uint16_t* to = tiles + (first * groups + pair * depth) * kAmxRows * kTerms;
      to += (group - pair) * kAmxElements;
      const int64_t rows = min_of(kAmxRows, args.rows - group * kAmxRows);
      for (int64_t k = first; k < first + depth; k += kAmxInputs) {
        const __mmask32 mask = first_of_32(args.in_features - k);
        __m512i v[kTerms][kAmxRows] = {};
        for (int64_t m = 0; m < rows; ++m) {
          __m512i terms[kTerms];
          in_terms<Element>(_mm512_maskz_loadu_epi16(mask, x + (group * kAmxRows + m) * stride + k), terms);
          for (int term = 0; term < kTerms; ++term) v[term][m] = terms[term];
        }
        for (int term = 0; term < kTerms; ++term, to += some * kAmxElements) {
          if (!args.transposed) transpose_16(v[term]);
          for (int64_t i = 0; i < kAmxRows; ++i) _mm512_store_si512(to + i * kAmxInputs, v[term][i]);
        }
      }
    }
  }
}

}  // namespace

void gemm_tiles_amx(const GemmArgs& args, const void* x, int64_t stride, int64_t begin, int64_t end,
                    uint16_t* tiles) {
  const auto of = args.dtype == DType::kFloat16 ? tiles_of<F16> : tiles_of<BF16>;
  of(args, static_cast<const uint16_t*>(x), stride, begin, end, tiles);
}

bool gemm_strip_amx(const GemmArgs& args, int64_t begin, int64_t end, float* scratch) {
  const auto of = args.dtype == DType::kFloat16 ? strip_of<F16> : strip_of<BF16>;
  return of(args, begin, end, scratch);
}

}  // namespace hf_fastpath
