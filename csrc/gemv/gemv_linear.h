// The product in nn.Linear's layout that gemv_avx2.cpp, gemv_avx512.cpp and gemv_avx512_bf16.cpp instantiate,
// each with its own vectors. Only these include this header; linkage is internal, as in avx2_math.h.
#pragma once

#include <type_traits>

#include "common/avx2_math.h"
#include "common/epilogue_avx2.h"
#include "gemv/gemv_accumulate.h"
#include "gemv/gemv_cpu.h"

namespace hf_fastpath {
namespace {

constexpr int64_t kFewRows = 2;
// Bytes of a row of x that make a block: the rows stay in the first-level cache while the streams pass over
// them in turn. A block's sums are one chain of float32 before they are added to the total: short chains
// round less.
constexpr int64_t kBlockBytes = 1024;
// Outputs of a stream computed before bias and activation are applied to them, eight at a time.
constexpr int64_t kRun = 16;

// Rows of x as Vector takes them.
template <class Vector>
HF_INLINE const typename Vector::Input* rows_of_x(const LinearArgs& args) {
  if constexpr (std::is_same_v<typename Vector::Input, float>) {
    return args.x;
  } else {
    return args.laid_out;
  }
}

// The sum of eight lanes, added in float64: these last additions are the ones of the full magnitude.
HF_INLINE float rounded_sum(__m256 v) {
  const __m256d pairs =
      _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(v)), _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)));
  const __m128d sum = _mm_add_pd(_mm256_castpd256_pd128(pairs), _mm256_extractf128_pd(pairs, 1));
  return static_cast<float>(_mm_cvtsd_f64(_mm_add_sd(sum, _mm_unpackhi_pd(sum, sum))));
}

// The sums of four times eight lanes in float32, for outputs of 16 bits: those round them much more.
HF_INLINE __m128 four_sums(const __m256 (&v)[4]) {
  const __m256 halves = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

// y[r][m * kRun] = the dot product of weight row r and row m of x, for one tile of weight rows. Rows of x
// pass in groups of about equal size; an output's sums run in the same order whatever their number.
template <class Vector, class Element, int kTile>
void dot_tile(const LinearArgs& args, TileRows<Element, kTile> w, float* const (&y)[kTile]) {
  constexpr int kFour = 4;  // rows of x whose lanes are added up together
  constexpr int64_t kBlock = kBlockBytes / static_cast<int64_t>(sizeof(typename Vector::Input));
  const int64_t padded_rows = (args.rows + kFour - 1) / kFour * kFour;
  typename Vector::Type total[kTile * kMaxRows];
  for (int r = 0; r < kTile; ++r) {
    for (int64_t m = 0; m < padded_rows; ++m) total[r * kMaxRows + m] = Vector::zero();
  }
  constexpr int kMost = kTile == kFewStreams ? kFewRows : Vector::kRows;
  const int64_t groups = (args.rows + kMost - 1) / kMost;
  const int64_t ahead = args.ahead != 0 ? args.ahead : read_ahead_bytes();
  for (int64_t k = 0; k < args.in_features; k += kBlock) {
    const int64_t n = min_of(kBlock, args.in_features - k);
    for (int64_t g = 0, m = 0; g < groups; ++g) {
      const int64_t rows = (args.rows - m + groups - g - 1) / (groups - g);
      accumulate_rows<Vector, Element, kTile, kMost>(rows, w, rows_of_x<Vector>(args) + m * args.x_stride + k,
                                                     args.x_stride, n, m == 0 ? ahead : 0, total + m);
      m += rows;
    }
    for (int r = 0; r < kTile; ++r) w.row[r] += n;
  }
  for (int r = 0; r < kTile; ++r) {
    for (int64_t m = 0; m < args.rows; m += kFour) {
      __m256 sums[kFour];
      for (int i = 0; i < kFour; ++i) sums[i] = Vector::half(total[r * kMaxRows + m + i]);
      alignas(16) float four[kFour];
      if constexpr (sizeof(typename Element::Storage) == 2) {
        _mm_store_ps(four, four_sums(sums));
      } else {
        for (int i = 0; i < kFour; ++i) four[i] = rounded_sum(sums[i]);
      }
      for (int64_t i = 0; i < min_of(kFour, args.rows - m); ++i) y[r][(m + i) * kRun] = four[i];
    }
  }
}

template <class Element>
void epilogue_rows(const LinearArgs& args, const float* y, int64_t y_stride, const float* up, int64_t begin,
                   int64_t count) {
  using Storage = typename Element::Storage;
  const auto* bias = static_cast<const Storage*>(args.bias);
  const auto* residual = static_cast<const Storage*>(args.residual);
  with_activation(args.activation, [&](auto tag) {
    for (int64_t m = 0; m < args.rows; ++m) {
      epilogue<Element, decltype(tag)::value>(
          y + m * y_stride, up != nullptr ? up + m * y_stride : nullptr,
          bias != nullptr ? bias + begin : nullptr,
          residual != nullptr ? residual + m * args.out_features + begin : nullptr,
          static_cast<Storage*>(args.out) + m * args.out_stride + begin, count);
    }
  });
}

// Outputs [begin, end) as kStreams streams of equal length, or with a gate as half as many of both weights;
// returns where the streams end, fewer than kStreams outputs before `end`. The sums of an output run in the
// same order whatever the number of streams.
template <class Vector, class Element, int kStreams, bool kGated>
int64_t linear_streams(const LinearArgs& args, int64_t begin, int64_t end) {
  using Storage = typename Element::Storage;
  constexpr int kEach = kGated ? kStreams / 2 : kStreams;
  alignas(32) float y[kStreams][kMaxRows * kRun];
  const int64_t length = (end - begin) / kEach;
  for (int64_t i = 0; i < length; i += kRun) {
    const int64_t count = min_of(kRun, length - i);
    for (int64_t j = 0; j < count; ++j) {
      TileRows<Element, kStreams> w;
      float* to[kStreams];
      for (int s = 0; s < kStreams; ++s) {
        const bool is_up = kGated && s >= kEach;
        const auto* weight = static_cast<const Storage*>(is_up ? args.up_weight : args.weight);
        w.row[s] =
            weight + (begin + s % kEach * length + i + j) * (is_up ? args.up_stride : args.weight_stride);
        to[s] = y[s] + j;
      }
      dot_tile<Vector, Element, kStreams>(args, w, to);
    }
    for (int s = 0; s < kEach; ++s) {
      epilogue_rows<Element>(args, y[s], kRun, kGated ? y[kEach + s] : nullptr, begin + s * length + i,
                             count);
    }
  }
  return begin + kEach * length;
}

template <class Vector, class Element>
HF_INLINE void linear_range_of(const LinearArgs& args, int64_t begin, int64_t end) {
  const bool few = args.rows <= kFewRows;
  if (args.up_weight != nullptr) {
    begin = (few ? linear_streams<Vector, Element, kFewStreams, true>
                 : linear_streams<Vector, Element, kRowStreams, true>)(args, begin, end);
    linear_streams<Vector, Element, 2, true>(args, begin, end);
  } else {
    begin = (few ? linear_streams<Vector, Element, kFewStreams, false>
                 : linear_streams<Vector, Element, kRowStreams, false>)(args, begin, end);
    linear_streams<Vector, Element, 1, false>(args, begin, end);
  }
}

template <class Vector>
HF_INLINE void linear_range(const LinearArgs& args, int64_t begin, int64_t end) {
  with_element(args.dtype,
               [&](auto element) { linear_range_of<Vector, decltype(element)>(args, begin, end); });
}

}  // namespace
}  // namespace hf_fastpath
