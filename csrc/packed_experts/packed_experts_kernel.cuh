// What: the products of chosen experts with quantized matrices for few x rows: activation(gate) * up of every
//   choice, or its product with down in float32. Choices are read on the device.
// Work split: blockIdx.y is a choice (row, k) of a group of rows, blockIdx.z the group: eight rows of 16 bits
//   or two in float32, or one row alone. A block takes features of that expert for every row of the group
//   that chose it, and blocks of later choices of the same expert end at once. A warp multiplies 16 rows of
//   the matrix (8 of gate and 8 of up) by a part of k on tensor cores: quants are A, in float16, x is B,
//   float16 times a power of two for every row, or three such terms of a float32. A lane's 16 bytes of quants
//   go from device memory to its registers, kDepth blocks of both of its rows ahead. Warps of a tile that
//   have other parts of k are summed in a fixed order. x that is too long for its part of shared memory comes
//   in phases.
// Traffic: quants, scales and zeros once for each expert that any row of a group chose; x, once a block out
//   of L2, and out are small.
// Roofline: read bandwidth.
#pragma once

#include <algorithm>

#include "common/activation.cuh"
#include "common/async.cuh"
#include "common/cuda_check.cuh"
#include "packed_experts/packed_experts_stack.cuh"
#include "packed_experts/packed_experts_x.cuh"

namespace hf_fastpath {

// `splits`: warps that share a tile, 1 to kExpertsWarps; a power of two.
template <class T, PackedFormat kFormat, int kColumns, bool kGated>
__global__ void __launch_bounds__(kExpertsThreads, kExpertsBlocks)
    packed_experts_kernel(const __grid_constant__ PackedExpertsProduct p, int phase_blocks, int splits) {
  using X = ExpertsX<T, kFormat, kColumns>;
  constexpr int kX = X::kX, kDepth = kExpertsDepth<T, kFormat>;
  constexpr int kTile = kGated ? kMmaRows / 2 : kMmaRows;  // features of a tile
  // Quants are asked for before x is there; with zeros registers are too few for both.
  constexpr bool kStartsEarly = !Traits<kFormat>::kHasZeros;
  extern __shared__ __align__(16) char experts_x[];
  __shared__ float sums[kExpertsWarps][kX][kMmaRows], undo[kX];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, g = lane / 4, q = lane % 4;

  // The next kernel reads choices before it waits: it may only start once the one that made them is complete.
  // The kernel behind `down` waits first.
  if constexpr (kGated) {
    wait_and_allow_next_kernel();
  } else {
    allow_next_kernel();
  }
  const PackedExpertsWork<kX> work = find_packed_work<kX>(p.choices, lane);
  if (!work.is_some) {
    if constexpr (!kGated) wait_for_previous_kernel();  // so that this one is complete behind it
    return;
  }

  const X x{reinterpret_cast<uint4*>(experts_x), column_units<kColumns>(phase_blocks), undo};
  const int column = x.column(work);
  const uint32_t of_lane = shared_address(x.units + max(column, 0) * x.stride + q);
  const int blocks = p.matrix.blocks, tiles = (p.features + kTile - 1) / kTile;
  const int at_once = kExpertsWarps / splits, split = warp % splits;
  const int64_t first_row = work.expert * p.features * (kGated ? 2 : 1);
  const bool has_phases = phase_blocks < blocks;
  StackRows<kFormat> rows;
  StackBlock<kFormat> some[kDepth];
  const auto find_rows = [&](int tile) {
    const int feature = min(tile * kTile + g, p.features - 1);
    if constexpr (kGated) {
      rows.find(p, 0, first_row + (p.alternating ? 2 * feature : feature));
      rows.find(p, 1, first_row + (p.alternating ? 2 * feature + 1 : p.features + feature));
    } else {
      rows.find(p, 0, first_row + feature);
      rows.find(p, 1, first_row + min(feature + 8, p.features - 1));
    }
  };
  // This warp's blocks of a phase that begins with block `phase`.
  const auto part = [&](int phase, int of_split) {
    return phase + min(phase_blocks, blocks - phase) * of_split / splits;
  };
  const auto start = [&](int phase) {
    const int end = part(phase, split + 1);
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const int block = part(phase, split) + d;
      if (block < end) rows.load(some[d], block);
    }
  };

  bool is_first = true;
#pragma unroll 1
  for (int base = blockIdx.x * at_once; base < tiles; base += gridDim.x * at_once) {
    const int tile = base + warp / splits;  // one behind the last is multiplied, and not written
    find_rows(tile);
    float total[4] = {};
#pragma unroll 1
    for (int phase = 0; phase < blocks; phase += phase_blocks) {
      if constexpr (kStartsEarly) start(phase);
      if (is_first || has_phases) {
        if (is_first && !kGated) wait_for_previous_kernel();  // for x
        if (!is_first) __syncthreads();                       // all warps are done with the x before
        x.load(p, work, phase, min(blocks, phase + phase_blocks));
        __syncthreads();  // x and what undoes its factors
        is_first = false;
      }
      if constexpr (!kStartsEarly) start(phase);
      const int end = part(phase, split + 1);
      float accumulators[4] = {};
#pragma unroll 1
      for (int block = part(phase, split); block < end; block += kDepth) {
#pragma unroll
        for (int d = 0; d < kDepth; ++d) {
          if (block + d >= end) break;
          rows.load_zeros(some[d], block + d);
          add_stack_block<T, kFormat>(some[d], of_lane + (block + d - phase) * (kBlockUnits * 16),
                                      column >= 0, accumulators);
          if (block + d + kDepth < end) rows.load(some[d], block + d + kDepth);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int m = kColumns == 1 ? 0 : (2 * q + i % 2) / kXColumns<T>;
        total[i] = fmaf(undo[m], accumulators[i], total[i]);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float of_columns[2] = {total[2 * h], total[2 * h + 1]};
      if constexpr (kColumns == 1) {  // all columns are the same
        if (q == 0) sums[warp][0][g + 8 * h] = of_columns[0];
      } else if constexpr (sizeof(T) == 4) {  // terms in a lane's two columns and the neighbor's first
        const float low =
            of_columns[q % 2 ? 0 : 1] * (q % 2 ? 1.f / (kNextTerm * kNextTerm) : 1.f / kNextTerm);
        const float sum =
            (q % 2 ? 0.f : of_columns[0]) + (low + __shfl_xor_sync(kAllLanes, q % 2 ? low : 0.f, 1));
        if (q % 2 == 0) sums[warp][q / 2][g + 8 * h] = sum;
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) sums[warp][2 * q + i][g + 8 * h] = of_columns[i];
      }
    }
    __syncthreads();  // every warp's sums
#pragma unroll 1
    for (int i = threadIdx.x; i < at_once * kTile * kX; i += kExpertsThreads) {
      const int feature_of_tile = i % kTile, m = i / kTile % kX, of_block = i / (kTile * kX);
      const int feature = (base + of_block) * kTile + feature_of_tile;
      int source = -1;  // work.source[m], without an array indexed at run time
#pragma unroll
      for (int j = 0; j < kX; ++j) {
        if (j == m) source = work.source[j];
      }
      if (source < 0 || feature >= p.features) continue;
      const float unit = kUndoQuants<kFormat, true> * p.matrix.multiplier;
      const auto sum_of = [&](int row, int64_t of_expert) {
        float sum = 0.f;
        for (int w = 0; w < splits; ++w) sum += sums[of_block * splits + w][m][row];
        sum *= unit;
        if (p.bias) sum += to_float(static_cast<const T*>(p.bias)[first_row + of_expert]);
        return sum;
      };
      const int64_t at = ((work.first_row + m) * int64_t(p.choices.top_k) + source) * p.features + feature;
      if constexpr (kGated) {
        float gate = sum_of(feature_of_tile, p.alternating ? 2 * feature : feature);
        float up = sum_of(feature_of_tile + 8, p.alternating ? 2 * feature + 1 : p.features + feature);
        if (p.clamped) {  // NaN stays NaN
          gate = gate > p.limit ? p.limit : gate;
          up = up > p.limit ? p.limit : up < -p.limit ? -p.limit : up;
          gate = times_sigmoid<true>(gate, p.alpha * gate), up += 1.f;
        } else {
          gate = activate(gate, p.activation);
        }
        static_cast<T*>(p.out)[at] = from_float<T>(gate * up);
      } else {
        static_cast<float*>(p.out)[at] = sum_of(feature_of_tile, feature);
      }
    }
    __syncthreads();  // sums are read
  }
}

template <class T, PackedFormat kFormat, int kColumns, bool kGated>
void launch_experts_variant(const PackedExpertsProduct& p, cudaStream_t stream) {
  constexpr int kX = kExpertsRows<T, kColumns>, kTile = kGated ? kMmaRows / 2 : kMmaRows;
  const int blocks = p.matrix.blocks, tiles = (p.features + kTile - 1) / kTile;
  const int choices = std::min(p.choices.rows, kX) * p.choices.top_k, groups = (p.choices.rows + kX - 1) / kX;
  const int room = multiprocessor_count() * kExpertsBlocks;
  // A tile gets as many warps as it takes to fill the GPU, each with two blocks or more.
  int splits = 1;
  while (splits < kExpertsWarps && blocks >= 4 * splits &&
         (tiles * splits + kExpertsWarps - 1) / kExpertsWarps * choices * groups < room)
    splits *= 2;
  const int needed = (tiles * splits + kExpertsWarps - 1) / kExpertsWarps;
  const dim3 grid(std::min(needed, std::max(1, (room + choices * groups - 1) / (choices * groups))), choices,
                  groups);
  const int phases = (blocks + kPhaseBlocks<kColumns> - 1) / kPhaseBlocks<kColumns>;
  const int phase_blocks = (blocks + phases - 1) / phases;
  const int bytes = kColumns * column_units<kColumns>(phase_blocks) * 16;
  const auto kernel = packed_experts_kernel<T, kFormat, kColumns, kGated>;
  allow_shared_memory(kernel, bytes);
  // The kernel in front of down is our own: it writes nothing that is read early.
  HF_FASTPATH_CUDA_CHECK(launch_programmatic(kernel, grid, dim3(kExpertsThreads), size_t(bytes), stream,
                                             !kGated || p.programmatic_launch, p, phase_blocks, splits));
}

template <PackedFormat kFormat>
void launch_packed_experts_format(const PackedExpertsProduct& p, cudaStream_t stream) {
  with_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto launch = [&](auto columns) {
      constexpr int kColumns = decltype(columns)::value;
      return p.gated ? launch_experts_variant<T, kFormat, kColumns, true>(p, stream)
                     : launch_experts_variant<T, kFormat, kColumns, false>(p, stream);
    };
    if constexpr (sizeof(T) == 2) {
      if (p.choices.rows == 1) return launch(std::integral_constant<int, 1>{});
    }
    launch(std::integral_constant<int, 8>{});
  });
}

}  // namespace hf_fastpath
