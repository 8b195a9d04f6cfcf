// The innermost product of gemv_linear.h and packed_floats_avx2.cpp. Only these include this header; linkage
// is internal, as in avx2_math.h.
#pragma once

#include "common/avx2_math.h"
#include "gemv/gemv_cpu.h"

namespace hf_fastpath {
namespace {

// Streams of weight rows: four reach the read bandwidth. With more than two rows of x, six, three of which
// pass over a block of x at once: as many accumulators as registers hold, and x read from the second-level
// cache less often.
constexpr int kFewStreams = 4, kRowStreams = 6;

// Where a tile's weight rows are.
template <class Element, int kTile>
struct TileRows {
  const typename Element::Storage* row[kTile];
};

// total[r * kStride + m] += sum over n inputs of w[r] * x[m], lane by lane, for kW weight rows and kM rows
// of x.
template <class Vector, class Element, int kW, int kM, int kStride>
HF_INLINE void accumulate(const typename Element::Storage* const* rows, const typename Vector::Input* x,
                          int64_t x_stride, int64_t n, int64_t ahead, typename Vector::Type* total) {
  constexpr int64_t kLine = kCacheLineBytes / static_cast<int64_t>(sizeof(typename Element::Storage));
  // All loops over the accumulators are unrolled where GCC is told so: it keeps them in memory otherwise.
  typename Vector::Type sum[kW][kM];
  const typename Element::Storage* w[kW];
#pragma GCC unroll 8
  for (int r = 0; r < kW; ++r) {
    w[r] = rows[r];
#pragma GCC unroll 8
    for (int m = 0; m < kM; ++m) sum[r][m] = Vector::zero();
  }
  const auto step = [&](int64_t k, auto load) __attribute__((always_inline)) {
    typename Vector::Operand weight[kW];
#pragma GCC unroll 8
    for (int r = 0; r < kW; ++r) weight[r] = load(w[r] + k);
    const typename Vector::Input* here = x + k;
    if constexpr (kM > 4) asm("" : "+r"(here));  // or GCC keeps a pointer a row of x, most of them in memory
#pragma GCC unroll 8
    for (int m = 0; m < kM; ++m) {
      typename Vector::Operand value = Vector::load(here + m * x_stride);
      if constexpr (kW > 1) asm("" : "+v"(value));  // one load for all rows, not one an FMA
#pragma GCC unroll 8
      for (int r = 0; r < kW; ++r) sum[r][m] = Vector::fma(weight[r], value, sum[r][m]);
    }
  };
  const auto whole = [](const auto* from) { return Vector::template load<Element>(from); };
  int64_t k = 0;
  for (; k + kLine <= n; k += kLine) {
    if (ahead != 0) {
#pragma GCC unroll 8
      for (int r = 0; r < kW; ++r) {
        _mm_prefetch(reinterpret_cast<const char*>(w[r] + k) + ahead, _MM_HINT_T0);
      }
    }
    for (int64_t j = 0; j < kLine; j += Vector::kWidth) step(k + j, whole);
  }
  for (; k + Vector::kWidth <= n; k += Vector::kWidth) step(k, whole);
  if (k < n) step(k, [=](const auto* from) { return Vector::template load<Element>(from, n - k); });
#pragma GCC unroll 8
  for (int r = 0; r < kW; ++r) {
#pragma GCC unroll 8
    for (int m = 0; m < kM; ++m) {
      total[r * kStride + m] = Vector::add(total[r * kStride + m], sum[r][m]);
    }
  }
}

// Does the same for `rows` rows of x, at most kM, and all weight rows of a tile.
template <class Vector, class Element, int kTile, int kM, int kStride = kMaxRows>
void accumulate_rows(int64_t rows, const TileRows<Element, kTile>& w, const typename Vector::Input* x,
                     int64_t x_stride, int64_t n, int64_t ahead, typename Vector::Type* total) {
  if constexpr (kM > 1) {
    if (rows < kM) {
      return accumulate_rows<Vector, Element, kTile, kM - 1, kStride>(rows, w, x, x_stride, n, ahead, total);
    }
  }
  constexpr int kW = kTile == kRowStreams ? kTile / 2 : kTile;
  for (int r = 0; r < kTile; r += kW) {
    accumulate<Vector, Element, kW, kM, kStride>(w.row + r, x, x_stride, n, ahead, total + r * kStride);
  }
}

}  // namespace
}  // namespace hf_fastpath
