// What a block of packed_experts_kernel.cuh works on, and its x as operands of tensor cores.
#pragma once

#include "common/inverse_root.cuh"
#include "common/numeric.cuh"
#include "common/warp.cuh"
#include "packed_experts/packed_experts.h"
#include "packed_gemv/packed_gemv_x.cuh"

namespace hf_fastpath {

constexpr int kExpertsWarps = 8;
constexpr int kExpertsThreads = kExpertsWarps * kWarpSize;
constexpr int kExpertsBlocks = 2;                   // an SM: leaves 128 registers a thread
constexpr int kBlockUnits = int(kPackedBlock) / 8;  // 16 bytes of B each, of eight values

// Blocks of quants of both rows that a lane has in flight, as many as registers hold: 16 warps an SM have 48
// or 64 KB then, but for formats with zeros.
template <class T, PackedFormat kFormat>
constexpr int kExpertsDepth = (kBits<kFormat> == 4 && sizeof(T) == 2 ? 3 : 2) - Traits<kFormat>::kHasZeros;

// Rows of x that columns of B are, of which there are one or eight; and blocks of k that shared memory holds.
template <class T, int kColumns>
constexpr int kExpertsRows = kColumns == 1 ? 1 : kColumns / kXColumns<T>;
template <int kColumns>
constexpr int kPhaseBlocks = kColumns == 1 ? kRowBlocks : kRowsBlocks;
// Bytes from column to column; 64 more, so that neighbors lie in other banks.
template <int kColumns>
__host__ __device__ constexpr int column_units(int phase_blocks) {
  return phase_blocks * kBlockUnits + (kColumns > 1 ? 4 : 0);
}

// What a block works on: an expert, and which choice of each row of its group that is.
template <int kX>
struct PackedExpertsWork {
  int64_t expert;
  int first_row;
  int source[kX];  // -1: not chosen
  bool is_some;    // else there is no such expert, or another block has it
};

// Every warp calls it, with all its lanes.
template <int kX>
__device__ __forceinline__ PackedExpertsWork<kX> find_packed_work(const PackedChoices& choices, int lane) {
  PackedExpertsWork<kX> work;
  work.first_row = blockIdx.z * kX;
  const int mine = blockIdx.y / choices.top_k, k = blockIdx.y % choices.top_k;
  const auto choice = [&](int m, int of) -> int64_t {
    if (work.first_row + m >= choices.rows || of >= choices.top_k) return -1;
    const int64_t id = __ldcg(choices.ids + int64_t(work.first_row + m) * choices.top_k + of);
    return id >= 0 && id < choices.num_experts ? id : -1;
  };
  work.expert = choice(mine, k);
  work.is_some = work.expert >= 0;
#pragma unroll
  for (int m = 0; m < kX; ++m) {
    const unsigned same = __ballot_sync(kAllLanes, work.expert >= 0 && choice(m, lane) == work.expert);
    work.source[m] = __ffs(same) - 1;
    if ((m < mine && same != 0) || (m == mine && work.source[m] != k)) work.is_some = false;
  }
  return work;
}

// x as B in shared memory: of each column the blocks of a phase, a unit of 16 bytes for eight values.
template <class T, PackedFormat kFormat, int kColumns>
struct ExpertsX {
  static constexpr int kX = kExpertsRows<T, kColumns>;
  static constexpr int kRowWarps = kExpertsWarps / kX, kRowThreads = kRowWarps * kWarpSize;
  static constexpr int kTerms = kXTerms<T>;
  static constexpr int kHeld = 1;  // units of a thread that it reads once
  static_assert(kExpertsWarps % kX == 0 && (kTerms == 1 || kColumns > 1), "warps share rows evenly");

  uint4* units;
  int stride;   // of a column, in units
  float* undo;  // [kX]: what sums are multiplied by

  // Loads blocks [begin, end) of k. All threads call it; a barrier has to follow, and has to be in front
  // where something reads what was there.
  __device__ __forceinline__ void load(const PackedExpertsProduct& p, const PackedExpertsWork<kX>& work,
                                       int begin, int end) const {
    __shared__ float most_of[kExpertsWarps], squares_of[kExpertsWarps];
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int m = warp / kRowWarps, thread = threadIdx.x - m * kRowThreads;
    const int count = (end - begin) * kBlockUnits, first = begin * int(kPackedBlock);
    int source = -1;  // work.source[m], without an array indexed at run time
#pragma unroll
    for (int i = 0; i < kX; ++i) {
      if (i == m) source = work.source[i];
    }
    const int64_t row = work.first_row + m;
    const T* const x = static_cast<const T*>(p.x) + (p.gated ? row : row * p.choices.top_k + source) * p.k;
    const bool rms = p.norm_weight != nullptr;
    const auto eight = [&](const T* from, int at, float (&to)[8]) {  // what is behind k is zero
      if (p.aligned) {
#pragma unroll
        for (int part = 0; part < 8; part += kVecElems<T>) {
          float some[kVecElems<T>] = {};
          if (at + part < p.k)
            Chunk<T, kVecElems<T>>::unpack(Chunk<T, kVecElems<T>>::load_l2(from + at + part), some);
#pragma unroll
          for (int e = 0; e < kVecElems<T>; ++e) to[part + e] = some[e];
        }
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e)
          to[e] = at + e < p.k ? to_float(Chunk<T, 1>::load_l2(from + at + e)) : 0.f;
      }
    };
    float most = 0.f, squares = 0.f;
    const auto values_of = [&](int unit, float (&values)[8], bool sums_squares) {
      eight(x, first + unit * 8, values);
      if (!rms) return;
      float factors[8];
      eight(static_cast<const T*>(p.norm_weight), first + unit * 8, factors);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (sums_squares) squares = fmaf(values[e], values[e], squares);
        values[e] *= factors[e] + p.norm_offset;
      }
    };
    float held[kHeld][8];
    const auto keep_largest = [&](const float (&values)[8]) {
#pragma unroll
      for (int e = 0; e < 8; ++e) most = fmaxf(most, fabsf(values[e]));
    };
    if (source >= 0) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (thread + i * kRowThreads >= count) continue;
        values_of(thread + i * kRowThreads, held[i], true);
        keep_largest(held[i]);
      }
#pragma unroll 1
      for (int unit = thread + kHeld * kRowThreads; unit < count; unit += kRowThreads) {
        float values[8];
        values_of(unit, values, true);
        keep_largest(values);
      }
    }
    most = warp_max(most), squares = warp_sum(squares);
    if (lane == 0) most_of[warp] = most, squares_of[warp] = squares;
    __syncthreads();  // every warp's largest and squares
    squares = 0.f;
#pragma unroll
    for (int w = 0; w < kRowWarps; ++w) {
      most = fmaxf(most, most_of[m * kRowWarps + w]);
      squares += squares_of[m * kRowWarps + w];
    }
    // The largest comes to lie below 2^15.
    const int exponent = max(14 - 126, int(__float_as_uint(most) >> 23) - 127);
    const float factor = __uint_as_float(unsigned(127 + 14 - exponent) << 23);
    if (thread == 0) {
      const float back = __uint_as_float(unsigned(127 - 14 + exponent) << 23);
      undo[m] = rms ? back * inverse_root<T>(squares / p.k + p.norm_eps) : back;
    }
    const auto store = [&](int unit, float (&values)[8]) {
#pragma unroll
      for (int e = 0; e < 8; ++e) values[e] *= factor;
#pragma unroll
      for (int term = 0; term < kTerms; ++term) {
        uint32_t rounded[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          rounded[i] = pack2(values[2 * i], values[2 * i + 1], __half());
          if (kTerms == 1) continue;
          const float2 taken = unpack2(rounded[i], __half());
          values[2 * i] = (values[2 * i] - taken.x) * kNextTerm;
          values[2 * i + 1] = (values[2 * i + 1] - taken.y) * kNextTerm;
        }
        const int column = kColumns == 1 ? 0 : m * kXColumns<T> + term;
        units[column * stride + unit] = as_operand<kFormat, true>(rounded);
      }
    };
    if (source >= 0) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (thread + i * kRowThreads < count) store(thread + i * kRowThreads, held[i]);
      }
#pragma unroll 1
      for (int unit = thread + kHeld * kRowThreads; unit < count; unit += kRowThreads) {
        float values[8];
        values_of(unit, values, false);
        store(unit, values);
      }
    }
  }

  // The lane's column, or one that has values where nobody reads the lane's sums; -1 for zeros.
  __device__ __forceinline__ int column(const PackedExpertsWork<kX>& work) const {
    const int g = threadIdx.x % kWarpSize / 4;
    if constexpr (kColumns == 1) return 0;
    const int m = g / kXColumns<T>;
    bool is_there = false;
#pragma unroll
    for (int i = 0; i < kX; ++i) is_there = is_there || (i == m && work.source[i] >= 0);
    return is_there && g % kXColumns<T> < kTerms ? g : -1;
  }
};

}  // namespace hf_fastpath
