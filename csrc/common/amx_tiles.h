// Tile registers of AMX, as inline assembly: compilers' intrinsics take literals for registers and do not say
// that they read memory. Included by *_avx512.cpp only; internal linkage as in avx2_math.h.
#pragma once

#include "common/avx512_math.h"

namespace hf_fastpath {
namespace {

constexpr int kTileRows = 16;    // of a tile register
constexpr int kTileBytes = 64;   // of its rows
constexpr int kTilePairs = 16;   // pairs of 16-bit inputs that one product sums over
constexpr int kTileInputs = 32;  // the same in inputs

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
// Behind the last product: a thread without live tiles is cheaper to switch.
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

// float32 kSum[r][c] += sum over pairs p and both of a pair of bfloat16 kRows[r][p] * kColumns[p][c].
template <int kSum, int kRows, int kColumns>
HF_INLINE void multiply_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kRows), "i"(kColumns));
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

}  // namespace
}  // namespace hf_fastpath
