// The blocked product that gemm_avx2.cpp and gemm_avx512.cpp instantiate, each with its own vectors. Only
// these include this header; linkage is internal, as in avx2_math.h.
#pragma once

#include <utility>

#include "common/avx2_math.h"
#include "common/epilogue_avx2.h"
#include "gemm/gemm_cpu.h"

namespace hf_fastpath {
namespace {

// Rows of x that pass over a panel while it stays in the first-level cache: 192 KiB of float32.
constexpr int64_t kRowBlock = 192;

// ---- a block of the weight, widened to float32 --------------------------------------------------------

// to[k * step + r] = w[r][k] for 16 weight rows and 8 inputs: 16-bit values are transposed before they are
// widened.
template <class Element>
HF_INLINE void transpose_tile(const uint16_t* w, int64_t stride, float* to, int64_t step) {
  __m256i row[8];  // rows r and r + 8
#pragma GCC unroll 8
  for (int r = 0; r < 8; ++r) {
    const auto* low = reinterpret_cast<const __m128i*>(w + r * stride);
    const auto* high = reinterpret_cast<const __m128i*>(w + (r + 8) * stride);
    row[r] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(low)), _mm_loadu_si128(high), 1);
  }
  __m256i pair[8];  // [inputs 0 to 3 of rows 0, 1 | 2, 3 | 4, 5 | 6, 7], then inputs 4 to 7
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    pair[i] = _mm256_unpacklo_epi16(row[2 * i], row[2 * i + 1]);
    pair[i + 4] = _mm256_unpackhi_epi16(row[2 * i], row[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {  // inputs 2 k and 2 k + 1
    const __m256i* from = pair + k / 2 * 4;
    const __m256i front =
        k % 2 ? _mm256_unpackhi_epi32(from[0], from[1]) : _mm256_unpacklo_epi32(from[0], from[1]);
    const __m256i back =
        k % 2 ? _mm256_unpackhi_epi32(from[2], from[3]) : _mm256_unpacklo_epi32(from[2], from[3]);
    const __m256i even = _mm256_unpacklo_epi64(front, back), odd = _mm256_unpackhi_epi64(front, back);
    float* out = to + 2 * k * step;
    _mm256_store_ps(out, Element::widen(_mm256_castsi256_si128(even)));
    _mm256_store_ps(out + 8, Element::widen(_mm256_extracti128_si256(even, 1)));
    _mm256_store_ps(out + step, Element::widen(_mm256_castsi256_si128(odd)));
    _mm256_store_ps(out + step + 8, Element::widen(_mm256_extracti128_si256(odd, 1)));
  }
}

// The same of float32.
template <class Element>
HF_INLINE void transpose_tile(const float* w, int64_t stride, float* to, int64_t step) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half, w += 8 * stride, to += 8) {
    __m256 row[4], pair[4];  // inputs 0 to 3 of rows r and r + 4, then inputs 4 to 7
#pragma GCC unroll 2
    for (int first = 0; first < 8; first += 4) {
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        const __m128 low = _mm_loadu_ps(w + r * stride + first);
        row[r] =
            _mm256_insertf128_ps(_mm256_castps128_ps256(low), _mm_loadu_ps(w + (r + 4) * stride + first), 1);
      }
      pair[0] = _mm256_unpacklo_ps(row[0], row[1]), pair[1] = _mm256_unpacklo_ps(row[2], row[3]);
      pair[2] = _mm256_unpackhi_ps(row[0], row[1]), pair[3] = _mm256_unpackhi_ps(row[2], row[3]);
      float* out = to + first * step;
      _mm256_store_ps(out, _mm256_shuffle_ps(pair[0], pair[1], 0x44));
      _mm256_store_ps(out + step, _mm256_shuffle_ps(pair[0], pair[1], 0xee));
      _mm256_store_ps(out + 2 * step, _mm256_shuffle_ps(pair[2], pair[3], 0x44));
      _mm256_store_ps(out + 3 * step, _mm256_shuffle_ps(pair[2], pair[3], 0xee));
    }
  }
}

// panel[k * kN + r] = w[r][k] of an nn.Linear weight; zeros for rows from `count` and inputs from `length`
// on.
template <class Element, int kN>
void fill_panel(const typename Element::Storage* w, int64_t stride, int64_t count, int64_t length,
                int64_t depth, float* panel) {
  constexpr int64_t kLine = kCacheLineBytes / static_cast<int64_t>(sizeof(typename Element::Storage));
  for (int64_t group = 0; group < kN; group += 16) {
    const auto* rows = w + group * stride;
    float* to = panel + group;
    int64_t k = 0;
    if (count >= group + 16) {
      for (; k + 8 <= length; k += 8) {
        if (k % kLine == 0) {  // the block that follows, read when this one has been multiplied
          for (int r = 0; r < 16; ++r) {
            _mm_prefetch(reinterpret_cast<const char*>(rows + r * stride + k + kGemmDepth), _MM_HINT_T1);
          }
        }
        transpose_tile<Element>(rows + k, stride, to + k * kN, kN);
      }
    }
    for (; k < depth; k += 8) {
      for (int r = 0; r < 16; ++r) {
        const int64_t left = group + r < count ? min_of(8, length - k) : 0;
        alignas(32) float wide[8] = {};
        if (left == 8) _mm256_store_ps(wide, Element::load(rows + r * stride + k));
        if (left > 0 && left < 8) _mm256_store_ps(wide, Element::load(rows + r * stride + k, left));
        for (int i = 0; i < 8; ++i) to[(k + i) * kN + r] = wide[i];
      }
    }
  }
}

// Takes all panels of a Conv1D weight's block at once, w[k][r] with `columns` outputs: its rows are read from
// end to end.
template <class Element, int kN>
void fill_panels(const typename Element::Storage* w, int64_t stride, int64_t columns, int64_t length,
                 int64_t depth, float* block) {
  constexpr int64_t kLine = kCacheLineBytes / static_cast<int64_t>(sizeof(typename Element::Storage));
  constexpr int64_t kAhead = 16;  // rows: pages apart, where no prefetcher of the hardware follows
  for (int64_t k = 0; k < depth; ++k, w += stride) {
    for (int64_t r = 0; r < columns; r += kLine) {
      _mm_prefetch(reinterpret_cast<const char*>(w + kAhead * stride + r), _MM_HINT_T0);
    }
    for (int64_t r = 0; r < (columns + kN - 1) / kN * kN; r += kLanes) {
      const int64_t left = k < length ? min_of(kLanes, columns - r) : 0;
      __m256 wide = _mm256_setzero_ps();
      if (left == kLanes) wide = Element::load(w + r);
      if (left > 0 && left < kLanes) wide = Element::load(w + r, left);
      _mm256_store_ps(block + r / kN * kN * kGemmDepth + k * kN + r % kN, wide);
    }
  }
}

// ---- products -----------------------------------------------------------------------------------------

// accumulators[m][n] (+)= sum over k of x[m][k] * panel[k][n], for kM rows and two vectors of outputs.
template <class Vector, int kM>
void multiply_tile(const float* x, const float* panel, int64_t depth, float* accumulators, bool add) {
  constexpr int kN = 2 * Vector::kWidth;
  typename Vector::Type sum[kM][2];
#pragma GCC unroll 16
  for (int m = 0; m < kM; ++m) sum[m][0] = sum[m][1] = Vector::zero();
  const float* stop = x + depth;
  const float* next = x + kM * kGemmDepth;
  while (x < stop) {
    // The tile of x that comes next: kM rows of kGemmDepth, over depth / 4 turns.
#pragma GCC unroll 3
    for (int line = 0; line < (kM + 3) / 4; ++line, next += 16) {
      _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T0);
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k, ++x, panel += kN) {
      const auto first = Vector::load(panel), second = Vector::load(panel + Vector::kWidth);
#pragma GCC unroll 16
      for (int m = 0; m < kM; ++m) {
        const auto value = Vector::broadcast(x + m * kGemmDepth);
        sum[m][0] = Vector::fma(first, value, sum[m][0]);
        sum[m][1] = Vector::fma(second, value, sum[m][1]);
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kM; ++m) {
    float* to = accumulators + m * kGemmStrip;
    if (add) {
      sum[m][0] = Vector::add(sum[m][0], Vector::load(to));
      sum[m][1] = Vector::add(sum[m][1], Vector::load(to + Vector::kWidth));
    }
    Vector::store(to, sum[m][0]);
    Vector::store(to + Vector::kWidth, sum[m][1]);
  }
}

using MultiplyTile = void(const float* x, const float* panel, int64_t depth, float* accumulators, bool add);

template <class Vector, int... kM>
constexpr MultiplyTile* tile_of(int rows, std::integer_sequence<int, kM...>) {
  MultiplyTile* found = nullptr;
  ((found = rows == kM + 1 ? &multiply_tile<Vector, kM + 1> : found), ...);
  return found;
}

// Rows in tiles of nearly equal height: a tile of one or two rows would wait for its own accumulators.
template <class Vector>
void multiply_rows(const float* x, int64_t rows, const float* panel, int64_t depth, float* accumulators,
                   bool add) {
  const int64_t tiles = (rows + Vector::kRows - 1) / Vector::kRows;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t begin = rows * tile / tiles, end = rows * (tile + 1) / tiles;
    MultiplyTile* multiply =
        tile_of<Vector>(static_cast<int>(end - begin), std::make_integer_sequence<int, Vector::kRows>{});
    multiply(x + begin * kGemmDepth, panel, depth, accumulators + begin * kGemmStrip, add);
  }
}

template <class Vector, class Element>
void strip_of(const GemmArgs& args, int64_t row_begin, int64_t row_end, int64_t begin, int64_t end,
              float* scratch) {
  using Storage = typename Element::Storage;
  constexpr int kN = 2 * Vector::kWidth;
  const int64_t rows = row_end - row_begin, stride = args.weight_stride;
  float* block = scratch;
  float* accumulators = scratch + kGemmStrip * kGemmDepth;
  const auto* weight = static_cast<const Storage*>(args.weight);
  for (int64_t k = 0; k < args.in_features; k += kGemmDepth) {
    const int64_t length = min_of(kGemmDepth, args.in_features - k), depth = (length + 7) / 8 * 8;
    if (args.transposed) {
      fill_panels<Element, kN>(weight + k * stride + begin, stride, end - begin, length, depth, block);
    } else {
      for (int64_t n = begin; n < end; n += kN) {
        fill_panel<Element, kN>(weight + n * stride + k, stride, min_of(kN, end - n), length, depth,
                                block + (n - begin) * kGemmDepth);
      }
    }
    const float* x = args.x + k * args.rows + row_begin * kGemmDepth;
    for (int64_t row = 0; row < rows; row += kRowBlock) {
      for (int64_t n = 0; n < end - begin; n += kN) {
        multiply_rows<Vector>(x + row * kGemmDepth, min_of(kRowBlock, rows - row), block + n * kGemmDepth,
                              depth, accumulators + row * kGemmStrip + n, k > 0);
      }
    }
  }
  const auto* bias = static_cast<const Storage*>(args.bias);
  const auto* residual = static_cast<const Storage*>(args.residual);
  with_activation(args.activation, [&](auto tag) {
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t at = (row_begin + row) * args.out_features + begin;
      epilogue<Element, decltype(tag)::value>(
          accumulators + row * kGemmStrip, nullptr, bias != nullptr ? bias + begin : nullptr,
          residual != nullptr ? residual + at : nullptr, static_cast<Storage*>(args.out) + at, end - begin);
    }
  });
}

// A GemmStrip.
template <class Vector>
void strip(const GemmArgs& args, int64_t row_begin, int64_t row_end, int64_t begin, int64_t end,
           float* scratch) {
  with_element(args.dtype, [&](auto element) {
    strip_of<Vector, decltype(element)>(args, row_begin, row_end, begin, end, scratch);
  });
}

}  // namespace
}  // namespace hf_fastpath
