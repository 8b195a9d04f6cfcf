// The products that packed_gemv_avx2.cpp, packed_gemv_avx512.cpp and packed_gemv_avx512_vnni.cpp instantiate,
// each with its own vectors. Included by these only; internal linkage as in avx2_math.h.
//
// An Isa has
//   kRows, kFloatRows     rows of x whose sums stay in registers, for integers and for fp8
//   Floats, load, zero, mul, fma, add, half     16 values; half folds them to eight lanes
//   widen(16 halves), widen_fp8(16 bytes)       as Floats
//   Pieces, pieces_of<bits>(block)              a block's quants in 16 bits
//   Total, start(8 integers), dot(total, pieces, steps)   32-bit sums of a block
//   floats(total, total)                        the sums of two blocks, eight lanes each
// Whatever the Isa, integers go through the same operations in the same order: all give the same bits.
#pragma once

#include <type_traits>

#include "common/avx2_math.h"
#include "common/epilogue_avx2.h"
#include "packed_gemv/packed_gemv_cpu.h"

namespace hf_fastpath {
namespace {

constexpr int kStreams = 4;
constexpr int64_t kAheadBytes = 2048;       // prefetched in each stream
constexpr int64_t kScalesAheadBytes = 512;  // and of its scales
constexpr int64_t kRun = 16;  // outputs of a stream before bias and activation are applied to them

// Where a stream's weight row is.
struct Row {
  const uint8_t* quants;
  const uint16_t* scales;
  const uint8_t* zeros;

  HF_INLINE Row of(const PackedArgs& args, int64_t n) {
    return {args.quants + n * args.row_bytes(), args.scales + n * args.groups,
            args.zeros != nullptr ? args.zeros + n * args.groups : nullptr};
  }
};

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

HF_INLINE float half_to_float(uint16_t bits) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits))); }

HF_INLINE void prefetch_quants(const uint8_t* quants, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += kCacheLineBytes) {
    _mm_prefetch(reinterpret_cast<const char*>(quants + line + kAheadBytes), _MM_HINT_T0);
  }
}

// ---- integers -----------------------------------------------------------------------------------------

// What the lanes' sums of blocks b and, if kBlocks is two, b + 1 are multiplied by but for the steps' size: 16
// halves.
template <PackedForm kForm, int kBlocks>
HF_INLINE __m256i scales_of(const Row& row, int64_t b) {
  if constexpr (kForm == PackedForm::kInt4G32) {
    const auto* from = reinterpret_cast<const __m128i*>(row.scales + b * kStretches);
    const __m128i eight = kBlocks == 2 ? _mm_loadu_si128(from) : _mm_loadl_epi64(from);
    return _mm256_permute4x64_epi64(_mm256_castsi128_si256(eight), 0x50);
  } else {
    int pair = 0;
    __builtin_memcpy(&pair, row.scales + b, kBlocks * sizeof(uint16_t));
    const __m256i second = _mm256_set_epi64x(0x0302030203020302, 0x0302030203020302, 0x0100010001000100,
                                             0x0100010001000100);
    return _mm256_shuffle_epi8(_mm256_set1_epi32(pair), second);
  }
}

// The sums that lanes of a block start from.
template <class Isa, PackedForm kForm>
HF_INLINE typename Isa::Total start_of(const int32_t* offsets, const Row& row, int64_t b) {
  if constexpr (bits_of(kForm) == 8) {
    return Isa::start(_mm256_setzero_si256());
  } else {  // quants are 0 to 15
    __m256i start = _mm256_load_si256(reinterpret_cast<const __m256i*>(offsets));
    if constexpr (kForm == PackedForm::kInt4) {
      start = _mm256_mullo_epi32(start, _mm256_set1_epi32(row.zeros[b]));
    }
    return Isa::start(start);
  }
}

// y[r][m * kRun] = the product of weight row r and rows first_row + m of x, but for the multiplier.
template <class Isa, PackedForm kForm, int kS, int kM>
void integer_tile(const PackedArgs& args, const Row* row, int64_t first_row, float* const* y) {
  constexpr int64_t kBytes = kPackedBlock * bits_of(kForm) / 8;
  typename Isa::Floats sum[kS][kM];
#pragma GCC unroll 4
  for (int r = 0; r < kS; ++r) {
#pragma GCC unroll 4
    for (int m = 0; m < kM; ++m) sum[r][m] = Isa::zero();
  }
  const int16_t* all_steps = args.steps + first_row * args.step_blocks * kPackedBlock;
  const float* all_sizes = args.step_sizes + first_row * args.step_blocks * kPackedLanes;
  const int32_t* all_offsets = args.step_offsets + first_row * args.step_blocks * kPackedLanes;
  const int64_t stride = args.step_blocks;
  const auto blocks = [&](int64_t b, auto count) __attribute__((always_inline)) {
    constexpr int kBlocks = decltype(count)::value;
#pragma GCC unroll 4
    for (int r = 0; r < kS; ++r) {
      const uint8_t* quants = row[r].quants + b * kBytes;
      prefetch_quants(quants, kBlocks * kBytes);
      if constexpr (kForm == PackedForm::kInt4G32) {
        _mm_prefetch(reinterpret_cast<const char*>(row[r].scales + b * kStretches) + kScalesAheadBytes,
                     _MM_HINT_T0);
      }
      typename Isa::Total first[kM];
      const auto piece = Isa::template pieces_of<bits_of(kForm)>(quants);
#pragma GCC unroll 4
      for (int m = 0; m < kM; ++m) {
        const int64_t at = m * stride + b;
        first[m] = Isa::dot(start_of<Isa, kForm>(all_offsets + at * kPackedLanes, row[r], b), piece,
                            all_steps + at * kPackedBlock);
      }
      const auto scales = Isa::widen(scales_of<kForm, kBlocks>(row[r], b));
      const auto add = [&](int m, typename Isa::Floats value) __attribute__((always_inline)) {
        const auto worth = Isa::mul(scales, Isa::load(all_sizes + (m * stride + b) * kPackedLanes));
        sum[r][m] = Isa::fma(value, worth, sum[r][m]);
      };
      if constexpr (kBlocks == 2) {
        const auto next = Isa::template pieces_of<bits_of(kForm)>(quants + kBytes);
#pragma GCC unroll 4
        for (int m = 0; m < kM; ++m) {
          const int64_t at = m * stride + b + 1;
          add(m, Isa::floats(first[m],
                             Isa::dot(start_of<Isa, kForm>(all_offsets + at * kPackedLanes, row[r], b + 1),
                                      next, all_steps + at * kPackedBlock)));
        }
      } else {
#pragma GCC unroll 4
        for (int m = 0; m < kM; ++m) add(m, Isa::floats(first[m], Isa::start(_mm256_setzero_si256())));
      }
    }
  };
  int64_t b = 0;
  for (; b + 2 <= args.blocks; b += 2) blocks(b, Constant<2>());
  if (b < args.blocks) blocks(b, Constant<1>());
#pragma GCC unroll 4
  for (int r = 0; r < kS; ++r) {
#pragma GCC unroll 4
    for (int m = 0; m < kM; ++m) y[r][m * kRun] = horizontal_sum(Isa::half(sum[r][m]));
  }
}

// ---- fp8 ----------------------------------------------------------------------------------------------

// Inputs whose products are one chain of float32 before they are added to the total: short chains round less.
constexpr int64_t kChain = 4 * kPackedBlock;

template <class Isa, PackedForm, int kS, int kM>
void fp8_tile(const PackedArgs& args, const Row* row, int64_t first_row, float* const* y) {
  const int64_t width = args.blocks * kPackedBlock;
  const float* x = args.x + first_row * width;
  typename Isa::Floats total[kS][kM], sum[kS][kM];
  for (int r = 0; r < kS; ++r) {
    for (int m = 0; m < kM; ++m) total[r][m] = Isa::zero();
  }
  for (int64_t begin = 0; begin < width; begin += kChain) {
#pragma GCC unroll 4
    for (int r = 0; r < kS; ++r) {
#pragma GCC unroll 4
      for (int m = 0; m < kM; ++m) sum[r][m] = Isa::zero();
    }
    const int64_t end = min_of(width, begin + kChain);
    for (int64_t line = begin; line < end; line += kCacheLineBytes) {
#pragma GCC unroll 4
      for (int r = 0; r < kS; ++r) prefetch_quants(row[r].quants + line, kCacheLineBytes);
#pragma GCC unroll 4
      for (int64_t i = line; i < line + kCacheLineBytes; i += 16) {
#pragma GCC unroll 4
        for (int r = 0; r < kS; ++r) {
          const auto weight = Isa::widen_fp8(row[r].quants + i);
#pragma GCC unroll 4
          for (int m = 0; m < kM; ++m) {
            sum[r][m] = Isa::fma(weight, Isa::load(x + m * width + i), sum[r][m]);
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kS; ++r) {
#pragma GCC unroll 4
      for (int m = 0; m < kM; ++m) total[r][m] = Isa::add(total[r][m], sum[r][m]);
    }
  }
  for (int r = 0; r < kS; ++r) {
    const float scale = half_to_float(row[r].scales[0]) * 256.0f;  // see widen_fp8
    for (int m = 0; m < kM; ++m) y[r][m * kRun] = horizontal_sum(Isa::half(total[r][m])) * scale;
  }
}

// ---- outputs ------------------------------------------------------------------------------------------

// All rows of x against kS weight rows: kM rows of x at a time, of kW weight rows.
template <class Isa, PackedForm kForm, int kS>
void tile(const PackedArgs& args, const Row (&row)[kS], float* const (&y)[kS]) {
  constexpr bool kFp8 = kForm == PackedForm::kFp8;
  int64_t m = 0;
  const auto rows = [&](auto count) {
    constexpr int kM = decltype(count)::value, kMost = Isa::kSums / kM, kW = kMost < kS ? kMost : kS;
    static_assert(kS % kW == 0);
    for (int r = 0; r < kS; r += kW) {
      float* to[kW];
      for (int i = 0; i < kW; ++i) to[i] = y[r + i] + m * kRun;
      if constexpr (kFp8) {
        fp8_tile<Isa, kForm, kW, kM>(args, row + r, m, to);
      } else {
        integer_tile<Isa, kForm, kW, kM>(args, row + r, m, to);
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
      const int64_t at = m * args.out_features + begin;
      for (int64_t i = 0; i < kRun; ++i) y[m * kRun + i] *= args.multiplier;
      epilogue<Element, decltype(tag)::value>(y + m * kRun, nullptr, bias != nullptr ? bias + begin : nullptr,
                                              residual != nullptr ? residual + at : nullptr,
                                              static_cast<Storage*>(args.out) + at, count);
    }
  });
}

// Outputs [begin, end) as kS streams of equal length; returns where they end.
template <int kS, class Tile>
int64_t streams(const PackedArgs& args, int64_t begin, int64_t end, const Tile& tile) {
  alignas(32) float y[kS][kPackedRows * kRun] = {};
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

template <class Isa, PackedForm kForm>
void range_of(const PackedArgs& args, int64_t begin, int64_t end) {
  begin = streams<kStreams>(args, begin, end, [&](const auto& row, const auto& y) {
    tile<Isa, kForm, kStreams>(args, row, y);
  });
  streams<1>(args, begin, end, [&](const auto& row, const auto& y) { tile<Isa, kForm, 1>(args, row, y); });
}

template <class Isa>
HF_INLINE void range(const PackedArgs& args, int64_t begin, int64_t end) {
  switch (args.form) {
    case PackedForm::kInt8:
      return range_of<Isa, PackedForm::kInt8>(args, begin, end);
    case PackedForm::kFp8:
      return range_of<Isa, PackedForm::kFp8>(args, begin, end);
    case PackedForm::kInt4:
      return range_of<Isa, PackedForm::kInt4>(args, begin, end);
    case PackedForm::kInt4G32:
      return range_of<Isa, PackedForm::kInt4G32>(args, begin, end);
  }
}

}  // namespace
}  // namespace hf_fastpath
