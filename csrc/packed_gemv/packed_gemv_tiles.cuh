// What: packed_gemv_ring.cuh's product for several rows of a 16-bit x, where all of x fits in shared memory:
//   without a ring, and without sums over warps in between.
// Work split: a block an SM, of 16 warps. A warp takes tiles of 16 weight rows over all of k, or, where there
//   are too few, a range of it; it holds the next blocks of its rows in registers. x comes as
//   packed_prepare_kernel leaves it.
// Traffic: quants, scales and zeros once, plus the operands of x an SM out of L2.
// Roofline: read bandwidth.
#pragma once

#include "packed_gemv/packed_gemv_prepared.cuh"
#include "packed_gemv/packed_gemv_products.cuh"

namespace hf_fastpath {

constexpr int kTileWarps = 16;
constexpr int kTileThreads = kTileWarps * kWarpSize;
constexpr int kTileSharedBytes = 224 * 1024;

// How a launch runs over a shape.
struct TilesPlan {
  RingPlan ring;  // units, halves and append
  PackedMatrix matrix;
  const char* prepared;
  int layout_blocks;  // of a row of x, as prepared
  int tiles;          // of weight rows
  int splits;         // warps of a tile
  int parts_at;       // in shared memory, behind x
};

// 16 bytes that no other load wants, in the order of the program.
__device__ __forceinline__ uint4 load_once(const void* from) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from));
  return value;
}

// A block of a lane's two weight rows in registers, as PackedReader gives it.
template <PackedForm kForm>
struct HeldBlock {
  using Slot = PackedSlot<kForm>;
  static constexpr int kLoads = kBits<kForm> / 4;
  uint4 words[2][kLoads];
  uint2 scale[2];
  uint32_t zeros[2];

  __device__ __forceinline__ void load(const char* const (&quants)[2], const PackedMatrix& matrix,
                                       const TileRows& rows, int block) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) words[h][i] = load_once(quants[h] + block * Slot::kBlockBytes + i * 16);
      const int64_t group = int64_t(rows.row[h]) * matrix.groups;
      if constexpr (Slot::kScalesPerBlock == 4) {
        asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];"
                     : "=r"(scale[h].x), "=r"(scale[h].y)
                     : "l"(matrix.scales + group + block * 4));
      } else if constexpr (Slot::kScalesPerBlock == 1) {
        uint16_t bits;
        asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(bits) : "l"(matrix.scales + group + block));
        scale[h] = make_uint2(bits, 0);
      }
      if constexpr (kForm == PackedForm::kInt4) {
        asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(zeros[h]) : "l"(matrix.zeros + group + block));
      }
    }
  }
  __device__ __forceinline__ uint4 quants(const TileRows&, int h, int, int i) const { return words[h][i]; }
  __device__ __forceinline__ uint2 scales(const TileRows&, int h, int) const { return scale[h]; }
  __device__ __forceinline__ int zero(const TileRows&, int h, int) const { return int(zeros[h]); }
};

// x in shared memory, as add_block() wants it.
struct HeldX {
  const uint4* operands;
  const float* sums;
};

template <class T, PackedForm kForm, int kColumns, RingEnd kEnd>
__global__ void __launch_bounds__(kTileThreads, 1)
    packed_gemv_tiles_kernel(const __grid_constant__ GemvParams p,
                             const __grid_constant__ RopeAppendParams rope,
                             const __grid_constant__ TilesPlan plan) {
  using Layout = PreparedOf<T, kForm, kColumns>;
  constexpr int kHalves = kEnd == RingEnd::kPlain ? 1 : 2, kTileUnits = kTileRows / kHalves;
  constexpr int kAhead = kBits<kForm> == 4 ? 4 : 2;  // blocks
  constexpr int kTiles = kColumnTiles<kColumns>;
  extern __shared__ __align__(16) char shared[];
  const int tid = threadIdx.x, warp = tid / kWarpSize, lane = tid % kWarpSize, g = lane / 4, q = lane % 4;
  const int splits = plan.splits, together = kTileWarps / splits, of_block = warp / splits,
            split = warp - of_block * splits;
  const int first = int(int64_t(blockIdx.x) * plan.tiles / gridDim.x),
            last = int(int64_t(blockIdx.x + 1) * plan.tiles / gridDim.x);
  const bool has_tiles = of_block < together;  // warps that splits leave over have none
  const int begin = split * plan.matrix.blocks / splits, end = (split + 1) * plan.matrix.blocks / splits;
  const Layout layout{plan.layout_blocks};
  float* const parts = reinterpret_cast<float*>(shared + plan.parts_at);  // [warps][kTiles * 4][lanes]
  const auto* undo = reinterpret_cast<const float*>(plan.prepared + layout.undo_at());
  allow_next_kernel();

  TileRows rows;
  const char* quants[2];
  HeldBlock<kForm> held[kAhead];
  const auto find = [&](int tile) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int unit = min(tile * kTileUnits + g + (kHalves == 1 ? 8 * h : 0), plan.ring.units - 1);
      rows.row[h] = packed_row(p, rope, plan.ring, unit, kHalves == 1 ? 0 : h);
      quants[h] = static_cast<const char*>(p.segments[0].weight) +
                  int64_t(rows.row[h]) * plan.matrix.blocks * PackedSlot<kForm>::kBlockBytes +
                  q * (kBits<kForm> / 4) * 16;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (begin + i < end) held[i].load(quants, plan.matrix, rows, begin + i);
  };
  RingUnit<T, kEnd> mine;
  const auto unit_of = [&](int tile, int i) { return tile * kTileUnits + i % kTileUnits; };
  const int outputs = kTileUnits * p.m, of_tile = split * kWarpSize + lane;
  const auto has = [&](int tile, int i) { return i < outputs && unit_of(tile, i) < plan.ring.units; };

  bool is_first = true;
#pragma unroll 1
  for (int at = first; at < last; at += together) {
    const int tile = at + of_block;
    const bool present = has_tiles && tile < last;
    if (present) {
      find(tile);
      if (has(tile, of_tile)) mine.prepare(p, rope, unit_of(tile, of_tile), of_tile / kTileUnits);
    }
    if (is_first) {
      wait_for_previous_kernel();
#pragma unroll 4
      for (int byte = tid * 16; byte < layout.undo_at(); byte += kTileThreads * 16)
        copy_async(shared + byte, plan.prepared + byte, true);
      commit_copies();
    }
    if (present && has(tile, of_tile)) mine.load(p, rope);
    if (is_first) {
      wait_for_copies<0>();
      __syncthreads();
      is_first = false;
    }
    if (present) {
      const HeldX x{reinterpret_cast<const uint4*>(shared),
                    reinterpret_cast<const float*>(shared + layout.sums_at())};
      PackedSums<kColumns> sums = {};
#pragma unroll 1
      for (int block = begin; block < end; block += kAhead) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (block + i < end) {
            add_block<T, kForm, kColumns>(held[i], rows, x, 0, block + i, sums);
            if (block + i + kAhead < end) held[i].load(quants, plan.matrix, rows, block + i + kAhead);
          }
        }
      }
      float* const here = parts + warp * kTiles * 4 * kWarpSize;
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) here[(t * 4 + i) * kWarpSize + lane] = sums[t][i];
    }
    if (splits > 1) {
      __syncthreads();
    } else {
      __syncwarp();
    }
    if (!present) continue;
#pragma unroll 1
    for (int i = of_tile; has(tile, i); i += splits * kWarpSize) {
      const int unit = unit_of(tile, i), m = i / kTileUnits;
      if (i != of_tile) {
        mine.prepare(p, rope, unit, m);
        mine.load(p, rope);
      }
      const float scale =
          kUndoQuants<kForm, kCenters<T, kForm>> * plan.matrix.multiplier * __ldcg(undo + m);
      float values[kHalves];
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const int row = i % kTileUnits + half * kTileUnits;  // of the tile
        const int reg = m / 8 * 4 + row / 8 * 2 + m % 2, from = row % 8 * 4 + m % 8 / 2;
        float sum = 0.f;
#pragma unroll 1
        for (int s = 0; s < splits; ++s)
          sum += parts[((warp - split + s) * kTiles * 4 + reg) * kWarpSize + from];
        values[half] = sum * scale;
        if constexpr (kForm == PackedForm::kFp8) {
          const int of_matrix = packed_row(p, rope, plan.ring, unit, half);
          values[half] *= __half2float(__ushort_as_half(__ldg(plan.matrix.scales + of_matrix)));
        }
      }
      mine.store(p, rope, values);
    }
    if (splits > 1) __syncthreads();  // no warp writes parts that others read
    else __syncwarp();
  }
}

// Whether x and the sums fit in shared memory.
template <class T, PackedForm kForm, int kColumns>
bool fits_tiles(const PackedMatrix& matrix, int layout_blocks) {
  const PreparedOf<T, kForm, kColumns> layout{layout_blocks};
  return layout.undo_at() + kTileWarps * kColumnTiles<kColumns> * 4 * kWarpSize * 4 <= kTileSharedBytes;
}

template <class T, PackedForm kForm, int kColumns>
void launch_tiles(const GemvParams& p, const PackedMatrix& matrix, const RopeAppendParams* rope,
                  const char* prepared, int layout_blocks, cudaStream_t stream) {
  const PreparedOf<T, kForm, kColumns> layout{layout_blocks};
  TilesPlan plan{};
  plan.ring.append = rope != nullptr;
  plan.ring.halves = p.gated || rope ? 2 : 1;
  plan.ring.units = rope ? p.n / 2 : p.n;
  plan.matrix = matrix;
  plan.prepared = prepared;
  plan.layout_blocks = layout_blocks;
  const int units = kTileRows / plan.ring.halves, sms = multiprocessor_count();
  plan.tiles = (plan.ring.units + units - 1) / units;
  const int grid = std::min(plan.tiles, sms), of_block = (plan.tiles + grid - 1) / grid;
  plan.splits = std::clamp(std::min(kTileWarps / of_block, matrix.blocks), 1, kTileWarps);
  plan.parts_at = static_cast<int>(layout.undo_at());
  const int bytes = plan.parts_at + kTileWarps * kColumnTiles<kColumns> * 4 * kWarpSize * 4;
  with_ring_end(p, rope, [&](auto end) {
    const auto kernel = packed_gemv_tiles_kernel<T, kForm, kColumns, decltype(end)::value>;
    HF_FASTPATH_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    HF_FASTPATH_CUDA_CHECK(launch_overlapping(kernel, dim3(grid), dim3(kTileThreads), bytes, stream, p.overlap,
                                              p, rope ? *rope : RopeAppendParams{}, plan));
  });
}

}  // namespace hf_fastpath
