// Tile registers of AMX, as inline assembly: compilers' intrinsics take literals for registers and do not say
// that they read memory. Only *_avx512.cpp include this header; linkage is internal, as in avx2_math.h.
#pragma once

#include <utility>

#include "common/avx512_math.h"

namespace hf_fastpath {
namespace {

constexpr int kAmxRows = 16;      // of a tile register
constexpr int kAmxRowBytes = 64;  // of its rows
constexpr int kAmxPairs = 16;     // pairs of 16-bit inputs that one product sums over
constexpr int kAmxInputs = 32;    // the same in inputs
constexpr int64_t kAmxElements = kAmxRows * kAmxInputs;

// Sizes of the eight registers; a thread has to set them before it uses one.
struct TileSizes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t tile_rows, int64_t bytes) {
    rows[tile] = static_cast<uint8_t>(tile_rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};
static_assert(sizeof(TileSizes) == 64);

HF_INLINE void use_tiles(const TileSizes& sizes) { asm volatile("ldtilecfg %0" ::"m"(sizes) : "memory"); }
// Is called behind the last product: a thread without live tiles is cheaper to switch.
HF_INLINE void release_tiles() { asm volatile("tilerelease" ::: "memory"); }

template <int kTile>
HF_INLINE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

template <int kTile>
HF_INLINE void load_tile(const void* from, int64_t stride_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride_bytes), "i"(kTile) : "memory");
}

template <int kTile>
HF_INLINE void store_tile(void* to, int64_t stride_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride_bytes), "i"(kTile) : "memory");
}

// float32 kAccumulator[r][c] += sum over pairs p and both of a pair of bfloat16 kRows[r][p] * kColumns[p][c].
template <int kAccumulator, int kRows, int kColumns>
HF_INLINE void multiply_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kAccumulator), "i"(kRows), "i"(kColumns));
}

// Rows and columns of 16 times 16 32-bit values change places.
HF_INLINE void transpose_16(__m512i (&v)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // quarters q of v[4 b + i]: column 4 q + i of rows 4 b to 4 b + 3
    const __m512i front = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x44);
    const __m512i front_high = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xee);
    const __m512i back = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x44);
    const __m512i back_high = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xee);
    t[i] = _mm512_shuffle_i32x4(front, back, 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(front, back, 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(front_high, back_high, 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(front_high, back_high, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) v[i] = t[i];
}

// The first eight significant bits of 32 float32, in order.
HF_INLINE __m512i narrow(__m512 first, __m512 second) {
  alignas(64) static constexpr uint16_t kUpper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                      23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                      45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return _mm512_permutex2var_epi16(_mm512_castps_si512(first), _mm512_load_si512(kUpper),
                                   _mm512_castps_si512(second));
}

// What narrow() cuts off.
HF_INLINE __m512 rest_of(__m512 x) {
  const __m512i kept =
      _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(static_cast<int>(0xffff0000)));
  return _mm512_sub_ps(x, _mm512_castsi512_ps(kept));
}

template <int kCount>
using Indices = std::make_integer_sequence<int, kCount>;

// body with each of the indices, as constants.
template <int... kIndex, class Body>
HF_INLINE void for_each_index(std::integer_sequence<int, kIndex...>, const Body& body) {
  (body(std::integral_constant<int, kIndex>{}), ...);
}

// Registers 0 to 3 for accumulators of `rows` weight rows and `columns` columns, 4 and 5 for pairs of inputs
// of these columns, 6 and 7 for inputs of these rows.
inline void use_tiles_for(int64_t rows, int64_t columns) {
  TileSizes sizes;
  for (int tile = 0; tile < 4; ++tile) sizes.set(tile, rows, columns * 4);
  for (int tile = 4; tile < 6; ++tile) sizes.set(tile, kAmxPairs, columns * 4);
  for (int tile = 6; tile < 8; ++tile) sizes.set(tile, rows, kAmxRowBytes);
  use_tiles(sizes);
}

// y[m * kAmxRows + r] of 16 outputs, from kGroups times accumulators[r][c], where kInTwo adds each two
// columns eight apart. Whether all accumulators are finite.
template <bool kInTwo, int kGroups>
bool rows_of_x(const float* accumulators, float* y) {
  __mmask16 odd = 0;
  for (int g = 0; g < kGroups; ++g, accumulators += kAmxRows * kAmxRows) {
    __m512i v[kAmxRows];
    for (int r = 0; r < kAmxRows; ++r) {
      v[r] = _mm512_load_si512(accumulators + r * kAmxRows);
      odd |= _mm512_fpclass_ps_mask(_mm512_castsi512_ps(v[r]), 0x99);  // NaNs and infinities
    }
    transpose_16(v);
    constexpr int kRows = kInTwo ? kAmxRows / 2 : kAmxRows;
    for (int m = 0; m < kRows; ++m, y += kAmxRows) {
      __m512 row = _mm512_castsi512_ps(v[m]);
      if constexpr (kInTwo) row = _mm512_add_ps(row, _mm512_castsi512_ps(v[m + kRows]));
      _mm512_storeu_ps(y, row);
    }
  }
  return odd == 0;
}

}  // namespace
}  // namespace hf_fastpath
