// What: products of many rows of x in 16 bits with a weight, in the tiles of AMX, which multiply bfloat16 and
//   sum in float32. Of float16 each value becomes the sum of two bfloat16, its first eight significant bits
//   and what these leave, in x and in the weight; of the four products that of both rests is left out: it is
//   less than 2^-14 of the whole. Quantized weights are widened with their scale, rounded once to bfloat16,
//   or for x in float16 in two; fp8 is exact in one, and its row's scale is applied to the sums. Subnormal
//   bfloat16 count as zeros.
// Work split: a call is a strip of outputs and all rows of x. A block of inputs at a time, 32 outputs are
//   widened into the first-level cache, 32 rows of x at a time pass over them, and sums wait in the
//   second-level cache for the next block. While x passes over 32 outputs, the next are widened.
// Traffic: the weight once; a block of x from the second-level cache once for 32 outputs, and x from memory
//   once a strip.
// Roofline: products of tiles, 64 cycles for 32 outputs, 32 rows and 32 inputs, and 192 in float16.
#include "common/amx_tiles.h"
#include "common/epilogue_avx2.h"
#include "gemm/gemm_cpu.h"
#include "packed_gemm/packed_widen_avx512.h"

namespace hf_fastpath {
namespace {

constexpr int kPair = 2;                      // tiles of outputs that meet as many of x
constexpr int kPairRows = kPair * kTileRows;  // outputs or rows of x in these
constexpr int64_t kTileSums = kTileRows * kTileRows;

// bfloat16 that a value of Element becomes, and inputs of a block: the more, the fewer sums wait; a quarter
// takes up to 12 % longer.
template <class Element>
constexpr int kPartsOf = tile_parts(std::is_same_v<Element, F16> ? DType::kFloat16 : DType::kBFloat16);
template <class Element>
constexpr int64_t kDepth = 1024 / kPartsOf<Element>;

template <class Element>
HF_INLINE void in_parts(__m512i bits, __m512i (&to)[kPartsOf<Element>]) {
  if constexpr (kPartsOf<Element> == 1) {
    to[0] = bits;
  } else {
    const __m512 front = _mm512_cvtph_ps(_mm512_castsi512_si256(bits));
    const __m512 back = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1));
    to[0] = narrow(front, back);
    to[1] = narrow(rest_of(front), rest_of(back));
  }
}

// ---- weights ------------------------------------------------------------------------------------------
// 32 outputs of a block of inputs become tiles, [steps of 32 inputs][parts][two of outputs]. Of kPackedBlock
// inputs they are widened in kUnits units.

constexpr int64_t kUnits = kPairRows;
constexpr int64_t kUnitsAhead = 4;  // rows or, transposed, units that are asked for ahead

// Which outputs, of those before `end`, and their tiles of a block's first inputs.
struct Outputs {
  int64_t first, end;
  uint16_t* tiles;

  // A row of theirs, the last again behind it, and where it is in the tiles.
  int64_t row(int64_t unit) const { return min_of(first + unit, end - 1); }
  uint16_t* row_tiles(int64_t unit) const {
    return tiles + unit / kTileRows * kTileElements + unit % kTileRows * kTileInputs;
  }
};

// A weight of Element. A unit is a row; transposed, where pairs of inputs change places with outputs' tiles,
// two pairs of inputs.
template <class Element, bool kIsTransposed>
struct Plain {
  static constexpr int kParts = kPartsOf<Element>;
  static constexpr bool kTransposed = kIsTransposed;
  const uint16_t* weight;
  int64_t stride, in_features;

  HF_INLINE Plain of(const GemmArgs& args) {
    return {static_cast<const uint16_t*>(args.weight), args.weight_stride, args.in_features};
  }

  // Inputs from k on.
  HF_INLINE void widen(const Plain& weight, const Outputs& outputs, int64_t unit, int64_t k) {
    if constexpr (kTransposed) {
      widen_columns(weight, outputs, unit, k);
    } else {
      widen_rows(weight, outputs, unit, k);
    }
  }

 private:
  HF_INLINE void widen_rows(const Plain& rows, const Outputs& outputs, int64_t unit, int64_t k) {
    const uint16_t* from = rows.weight + outputs.row(unit) * rows.stride + k;
    uint16_t* const to = outputs.row_tiles(unit);
    const int64_t left = rows.in_features - k;
    const auto stretch = [&](int s, __m512i bits) __attribute__((always_inline)) {
      prefetch(from + s * kTileInputs + kUnitsAhead * rows.stride);
      __m512i parts[kParts];
      in_parts<Element>(bits, parts);
      for (int part = 0; part < kParts; ++part)
        _mm512_store_si512(to + (s * kParts + part) * kPair * kTileElements, parts[part]);
    };
    if (left >= kPackedBlock) {
#pragma GCC unroll 4
      for (int s = 0; s < kStretches; ++s) stretch(s, _mm512_loadu_si512(from + s * kTileInputs));
    } else {
      for (int s = 0; s < kStretches; ++s) {
        const __mmask32 mask = first_of_32(left - s * kTileInputs);
        stretch(s, _mm512_maskz_loadu_epi16(mask, from + s * kTileInputs));
      }
    }
  }

  HF_INLINE void widen_columns(const Plain& columns, const Outputs& outputs, int64_t unit, int64_t k) {
    const __mmask32 mask = first_of_32(outputs.end - outputs.first);
    const auto inputs = [&](int64_t input, __m512i(&parts)[kParts]) __attribute__((always_inline)) {
      const uint16_t* from = columns.weight + input * columns.stride + outputs.first;
      prefetch(from + kUnitsAhead * 4 * columns.stride);
      const bool exists = input < columns.in_features;
      in_parts<Element>(_mm512_maskz_loadu_epi16(exists ? mask : 0, from), parts);
    };
    alignas(64) static constexpr uint16_t kFront[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                                        37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                        11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i front = _mm512_load_si512(kFront), back = _mm512_add_epi16(front, _mm512_set1_epi16(16));
    for (int64_t pair = 2 * unit; pair < 2 * unit + 2; ++pair) {
      __m512i even[kParts], odd[kParts];
      inputs(k + 2 * pair, even);
      inputs(k + 2 * pair + 1, odd);
      uint16_t* const to = outputs.tiles + pair / kTilePairs * kParts * kPair * kTileElements +
                           pair % kTilePairs * 2 * kTileRows;
      for (int part = 0; part < kParts; ++part) {
        uint16_t* const tiles = to + part * kPair * kTileElements;
        _mm512_store_si512(tiles, _mm512_permutex2var_epi16(even[part], front, odd[part]));
        _mm512_store_si512(tiles + kTileElements, _mm512_permutex2var_epi16(even[part], back, odd[part]));
      }
    }
  }
};

// A quantized weight; a unit is a row.
template <class Element, PackedForm kForm>
struct Packed : SumScaledWeight<kForm> {
  static constexpr int kParts = kForm == PackedForm::kFp8 ? 1 : kPartsOf<Element>;
  static constexpr bool kTransposed = false;
  using Rows = PackedWeight<kForm>;

  HF_INLINE Packed of(const GemmArgs& args) { return {SumScaledWeight<kForm>::of(*args.packed)}; }

  HF_INLINE void widen(const Packed& weight, const Outputs& outputs, int64_t unit, int64_t k) {
    const int64_t row = outputs.row(unit), b = k / kPackedBlock;
    for (int64_t line = 0; line < Rows::kBytes; line += kCacheLineBytes)
      prefetch(Rows::block(weight.rows, row + kUnitsAhead, b) + line);
    uint16_t* const to = outputs.row_tiles(unit);
    const auto write = [&](int s, int part, __m512i words) __attribute__((always_inline)) {
      _mm512_store_si512(to + (s * kParts + part) * kPair * kTileElements, words);
    };
    widen_block<kForm, BF16, kParts>(weight.rows, row, b, 1.0f, weight.values, write);
  }
};

// 32 outputs of a block on their way into tiles.
template <class Weight>
struct Widening {
  static constexpr int64_t kBlockElements = kStretches * Weight::kParts * kPair * kTileElements;
  const Weight& weight;
  Outputs outputs;
  int64_t k, blocks;            // the first input, and how many times kPackedBlock
  int64_t unit = 0, block = 0;  // the next
};

// The next `count` units, as far as there are some.
template <class Weight>
HF_INLINE void widen_next(Widening<Weight>& next, int64_t count) {
  const int64_t end = next.blocks > 0 ? kUnits : 0;
  for (int64_t i = 0; i < count && next.unit < end; ++i) {
    Outputs outputs = next.outputs;
    outputs.tiles += next.block * Widening<Weight>::kBlockElements;
    Weight::widen(next.weight, outputs, next.unit, next.k + next.block * kPackedBlock);
    if (++next.block == next.blocks) next.block = 0, ++next.unit;
  }
}

// ---- products -----------------------------------------------------------------------------------------

template <int kTile>
HF_INLINE void load_pair(const uint16_t* from) {
  load_tile<kTile>(from, kTileBytes);
  load_tile<kTile + 1>(from + kTileElements, kTileBytes);
}

// Sums t * kPair + g of tile t of outputs and tile g of x; transposed, rows of sums are rows of x.
template <int kGroups, bool kTransposed>
HF_INLINE void multiply_pairs() {
  const auto multiply = [](auto t, auto g) __attribute__((always_inline)) {
    constexpr int kT = decltype(t)::value, kG = decltype(g)::value, kSum = kT * kPair + kG;
    if constexpr (kTransposed) {
      multiply_bf16<kSum, 4 + kG, 6 + kT>();
    } else {
      multiply_bf16<kSum, 6 + kT, 4 + kG>();
    }
  };
  for_each_index(Indices<kPair>(), [&](auto t) __attribute__((always_inline)) {
    for_each_index(Indices<kGroups>(), [&](auto g) __attribute__((always_inline)) { multiply(t, g); });
  });
}

// Adds to sums the products of 32 outputs and up to 32 rows of x, `steps` times 32 inputs. With each of these
// `units` of the next outputs are widened.
template <int kGroups, int kXParts, class Weight>
HF_INLINE void multiply(const uint16_t* weights, const uint16_t* x, int64_t steps, float* sums, bool first,
                        Widening<Weight>& next, int64_t units) {
  constexpr int64_t kXPart = kGroups * kTileElements, kPart = kPair * kTileElements;
  constexpr Indices<kPair * kPair> kEachSum;
  constexpr auto kTransposed = Weight::kTransposed;
  const auto load_x = [&](int part) __attribute__((always_inline)) {
    load_tile<4>(x + part * kXPart, kTileBytes);
    if constexpr (kGroups == 2) load_tile<5>(x + part * kXPart + kTileElements, kTileBytes);
  };
  for_each_index(kEachSum, [&](auto sum) __attribute__((always_inline)) {
    if (first) {
      zero_tile<sum.value>();
    } else {
      load_tile<sum.value>(sums + sum.value * kTileSums, kTileBytes);
    }
  });
  for (int64_t step = 0; step < steps; ++step) {
    load_pair<6>(weights);
    if constexpr (kXParts == 2) {
      load_x(1);
      multiply_pairs<kGroups, kTransposed>();
    }
    load_x(0);
    multiply_pairs<kGroups, kTransposed>();
    if constexpr (Weight::kParts == 2) {
      load_pair<6>(weights + kPart);
      multiply_pairs<kGroups, kTransposed>();
    }
    widen_next(next, units);
    weights += Weight::kParts * kPart;
    x += kXParts * kXPart;
  }
  for_each_index(kEachSum, [&](auto sum) __attribute__((always_inline)) {
    store_tile<sum.value>(sums + sum.value * kTileSums, kTileBytes);
  });
}

// ---- outputs ------------------------------------------------------------------------------------------

// y[m * kTileRows + r] of 16 outputs r and rows m. Whether all are finite.
template <bool kTransposed>
bool rows_of_sums(const float* sums, float* y) {
  if constexpr (!kTransposed) return rows_of_x<false, 1>(sums, y);
  __mmask16 odd = 0;
  for (int64_t i = 0; i < kTileSums; i += kTileRows) {
    const __m512 row = _mm512_load_ps(sums + i);
    odd |= _mm512_fpclass_ps_mask(row, 0x99);  // NaNs and infinities
    _mm512_store_ps(y + i, row);
  }
  return odd == 0;
}

// 32 sums of each of up to 32 rows of x, from `row` on, to outputs [n, n + count). Whether all are finite.
template <class Element, bool kTransposed, Activation kActivation>
bool finish(const GemmArgs& args, const float* sums, const float* scales, int64_t n, int64_t count,
            int64_t row) {
  using Storage = typename Element::Storage;
  const auto* bias = static_cast<const Storage*>(args.bias);
  const auto* residual = static_cast<const Storage*>(args.residual);
  auto* const out = static_cast<Storage*>(args.out);
  const bool plain = kActivation == Activation::kNone && bias == nullptr && residual == nullptr;
  bool finite = true;
  for (int64_t g = 0; g < kPair && row < args.rows; ++g) {
    alignas(64) float y[kPair][kTileSums];
    for (int64_t t = 0; t < kPair; ++t) {
      finite = rows_of_sums<kTransposed>(sums + (t * kPair + g) * kTileSums, y[t]) && finite;
    }
    for (int64_t m = 0; m < kTileRows && row < args.rows; ++m, ++row) {
      __m512 front = _mm512_load_ps(y[0] + m * kTileRows), back = _mm512_load_ps(y[1] + m * kTileRows);
      if (scales != nullptr) {
        front = _mm512_mul_ps(front, _mm512_load_ps(scales));
        back = _mm512_mul_ps(back, _mm512_load_ps(scales + kTileRows));
      }
      const int64_t at = row * args.out_features + n;
      if (plain && count == kPairRows) {
        _mm512_storeu_si512(out + at, rounded<Element>(front, back));
        continue;
      }
      alignas(64) float both[kPairRows];
      _mm512_store_ps(both, front);
      _mm512_store_ps(both + kTileRows, back);
      epilogue<Element, kActivation>(both, nullptr, bias != nullptr ? bias + n : nullptr,
                                     residual != nullptr ? residual + at : nullptr, out + at, count);
    }
  }
  return finite;
}

template <class Element, class Weight>
bool strip(const GemmArgs& args, int64_t begin, int64_t end, float* scratch) {
  constexpr int64_t kBlocks = kDepth<Element> / kPackedBlock;
  alignas(64) uint16_t tiles[2][kBlocks * Widening<Weight>::kBlockElements];
  alignas(64) float scales[kPairRows];
  const Weight weight = Weight::of(args);
  const int64_t blocks = gemm_tiled_width(args.in_features) / kPackedBlock;
  const int64_t groups = (args.rows + kTileRows - 1) / kTileRows, pairs = (groups + kPair - 1) / kPair;
  int turn = 0;
  const auto widening = [&](int64_t n, int64_t block, int to) -> Widening<Weight> {
    return {weight, {n, end, tiles[to]}, block * kPackedBlock, min_of(kBlocks, blocks - block)};
  };
  Widening<Weight> first = widening(begin, 0, turn);
  widen_next(first, kUnits * kBlocks);
  use_tiles_for(kTileRows, kTileRows);
  bool finite = true;
  for (int64_t block = 0; block < blocks; block += kBlocks) {
    const int64_t steps = min_of(kBlocks, blocks - block) * kStretches;
    const bool last = block + kBlocks >= blocks;
    for (int64_t n = begin; n < end; n += kPairRows, turn ^= 1) {
      const bool same = n + kPairRows < end;
      Widening<Weight> next =
          widening(same ? n + kPairRows : begin, same ? block : block + kBlocks, turn ^ 1);
      const int64_t units = (kUnits * kBlocks + pairs * steps - 1) / (pairs * steps);
      const uint16_t* x = args.tiles + block * kPackedBlock * groups * kTileRows * kPartsOf<Element>;
      float* sums = scratch + (n - begin) * pairs * kPairRows;
      if (last && args.packed != nullptr) sum_factors(*args.packed, n, end, kPairRows, scales);
      for (int64_t g = 0; g < groups; g += kPair, sums += kPair * kPair * kTileSums) {
        const int64_t some = min_of(kPair, groups - g);
        const auto multiply_some = some == kPair ? multiply<kPair, kPartsOf<Element>, Weight>
                                                 : multiply<1, kPartsOf<Element>, Weight>;
        multiply_some(tiles[turn], x, steps, sums, block == 0, next, units);
        x += some * kTileElements * kPartsOf<Element> * steps;
        if (!last) continue;
        with_activation(args.activation, [&](auto activation) {
          const auto finish_some = finish<Element, Weight::kTransposed, decltype(activation)::value>;
          finite = finish_some(args, sums, args.packed != nullptr ? scales : nullptr, n,
                               min_of(kPairRows, end - n), g * kTileRows) &&
                   finite;
        });
      }
      widen_next(next, kUnits * kBlocks);
    }
  }
  release_tiles();
  return finite || kPartsOf<Element> == 1;
}

template <class Element>
bool strip_of(const GemmArgs& args, int64_t begin, int64_t end, float* scratch) {
  if (args.packed == nullptr) {
    return (args.transposed ? strip<Element, Plain<Element, true>>
                            : strip<Element, Plain<Element, false>>)(args, begin, end, scratch);
  }
  switch (args.packed->form) {
    case PackedForm::kInt8:
      return strip<Element, Packed<Element, PackedForm::kInt8>>(args, begin, end, scratch);
    case PackedForm::kFp8:
      return strip<Element, Packed<Element, PackedForm::kFp8>>(args, begin, end, scratch);
    case PackedForm::kInt4:
      return strip<Element, Packed<Element, PackedForm::kInt4>>(args, begin, end, scratch);
    default:
      return strip<Element, Packed<Element, PackedForm::kInt4G32>>(args, begin, end, scratch);
  }
}

// ---- x ------------------------------------------------------------------------------------------------

template <class Element>
void tiles_of(const GemmArgs& args, const uint16_t* x, int64_t stride, int64_t begin, int64_t end,
              uint16_t* tiles) {
  constexpr int kParts = kPartsOf<Element>;
  const int64_t groups = (args.rows + kTileRows - 1) / kTileRows, width = gemm_tiled_width(args.in_features);
  for (int64_t first = 0; first < width; first += kDepth<Element>) {
    const int64_t depth = min_of(kDepth<Element>, width - first);
    for (int64_t group = begin; group < end; ++group) {
      const int64_t pair = group / kPair * kPair, some = min_of(kPair, groups - pair);
      uint16_t* to = tiles + (first * groups + pair * depth) * kTileRows * kParts;
      to += (group - pair) * kTileElements;
      const int64_t rows = min_of(kTileRows, args.rows - group * kTileRows);
      for (int64_t k = first; k < first + depth; k += kTileInputs) {
        const __mmask32 mask = first_of_32(args.in_features - k);
        __m512i v[kParts][kTileRows] = {};
        for (int64_t m = 0; m < rows; ++m) {
          __m512i parts[kParts];
          in_parts<Element>(_mm512_maskz_loadu_epi16(mask, x + (group * kTileRows + m) * stride + k), parts);
          for (int part = 0; part < kParts; ++part) v[part][m] = parts[part];
        }
        for (int part = 0; part < kParts; ++part, to += some * kTileElements) {
          if (!args.transposed) transpose_16(v[part]);
          for (int64_t i = 0; i < kTileRows; ++i) _mm512_store_si512(to + i * kTileInputs, v[part][i]);
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
