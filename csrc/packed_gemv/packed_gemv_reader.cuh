// How quants, scales and zeros get from device memory to the lanes of packed_gemv_ring.cuh.
#pragma once

#include "packed_gemv/packed_gemv_slot.cuh"

namespace hf_fastpath {

__device__ __forceinline__ uint4 load_shared(uint32_t from) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(from));
  return value;
}

__device__ __forceinline__ uint2 load_shared_two(uint32_t from) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(from));
  return value;
}

// A lane's rows of a tile, g and g + 8, in the matrix: for what is not fetched into the ring.
struct TileRows {
  int row[2];

  // It has tile rows [first, first + Slot::kWeightRows) of `rows`: those behind the last are the last.
  template <class Slot>
  __device__ __forceinline__ void find(const GemvParams& p, const RopeAppendParams& rope,
                                       const RingPlan& plan, int begin, int units, int first, int rows) {
    const int g = Slot::row_of(threadIdx.x % kWarpSize / 4) + Slot::row_warp() * kMmaRows;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = min(first + g + 8 * h, rows - 1), half = at >= units;
      row[h] = packed_row(p, rope, plan, begin + at - half * units, half);
    }
  }
};

// Scales of a block, the first in the lowest bits, and its zero, in device memory.
template <PackedFormat kFormat>
__device__ __forceinline__ uint2 scales_of(const PackedMatrix& matrix, int row, int block) {
  constexpr int kHalves = PackedSlot<kFormat, kRingWarps>::kScalesPerBlock;
  const uint16_t* from = matrix.scales + int64_t(row) * matrix.groups + block * kHalves;
  static_assert(kHalves == 4 || kHalves <= 2, "a block's scales are eight bytes, or one of 32 or of 16 bits");
  if constexpr (kHalves == 4) return __ldg(reinterpret_cast<const uint2*>(from));
  if constexpr (kHalves == 2) return make_uint2(__ldg(reinterpret_cast<const uint32_t*>(from)), 0);
  return make_uint2(__ldg(from), 0);
}
// Where each sub-block has one, two neighbors: of a lane's sub-blocks of two blocks.
template <PackedFormat kFormat>
__device__ __forceinline__ uint32_t two_scales_of(const PackedMatrix& matrix, int row, int block) {
  const uint16_t* from = matrix.scales + int64_t(row) * matrix.groups + block * 4 + threadIdx.x % 4 * 2;
  return __ldg(reinterpret_cast<const uint32_t*>(from));
}
// A block's zero, or four of them, the first in the lowest bits.
template <PackedFormat kFormat>
__device__ __forceinline__ int zero_of(const PackedMatrix& matrix, int row, int block) {
  constexpr int kZeros = Traits<kFormat>::kZerosPerBlock;
  const uint8_t* from = matrix.zeros + int64_t(row) * matrix.groups + block * kZeros;
  if constexpr (kZeros == 4) return __ldg(reinterpret_cast<const int*>(from));
  return __ldg(from);
}
// Where each sub-block has one: of a lane's sub-blocks, two neighbors as of two_scales_of().
__device__ __forceinline__ int two_zeros_of(const PackedMatrix& matrix, int row, int block) {
  const uint8_t* from = matrix.zeros + int64_t(row) * matrix.groups + block * 4 + threadIdx.x % 4 * 2;
  return __ldg(reinterpret_cast<const uint16_t*>(from));
}

#if HF_FASTPATH_HOPPER

// Where tensor copies with a swizzle of kBytes put the 16 bytes at `offset` of shared memory.
template <int kBytes = kLineBytes>
__device__ __forceinline__ uint32_t swizzled(uint32_t offset) {
  return offset ^ (offset >> 7 & (kBytes / 16u - 1)) << 4;
}

template <PackedFormat kFormat, int kLines>
__device__ __forceinline__ void packed_fetch(const GemvParams& p, const RopeAppendParams& rope,
                                             const PackedPlan& plan, const PackedMaps& maps, uint32_t ring,
                                             uint32_t full, uint32_t empty, int lane) {
  using Slot = PackedSlot<kFormat, kLines>;
  const PackedShare<kIsCluster<kLines>> share(plan);
  const int begin = share.begin, units = share.end - begin, rows = units * plan.ring.halves;
  const int together = plan.together;
  const int group_bytes =
      together * (Slot::kPieceBytes + (plan.fetches_scales ? Slot::kScaleBytes + Slot::kZeroBytes : 0));
  const uint64_t policy = read_once_policy();
  RingCursor at, oldest;
  int under_way = 0, fetched = 0;
#pragma unroll 1
  for (int phase = share.first_piece; phase < share.end_piece; phase += plan.phase_pieces)
#pragma unroll 1
    for (int first = 0; first < rows; first += Slot::kWeightRows) {
      const int groups = min(Slot::kWeightRows, rows - first) / together;
      const int first_of_lane = min(first + lane * together, rows - 1), half = first_of_lane >= units;
      const int row = packed_row(p, rope, plan.ring, begin + first_of_lane - half * units, half);
      const int last = min(phase + plan.phase_pieces, share.end_piece);
#pragma unroll 1
      for (int piece = phase; piece < last; ++piece) {
        const uint32_t barrier = full + 8 * at.slot;
        if (fetched >= plan.ring.slots) barrier_wait(empty + 8 * at.slot, at.parity ^ 1);
        if (under_way >= (fetched < plan.ring.slots ? plan.ring.in_flight : plan.ring.streaming)) {
          barrier_wait(full + 8 * oldest.slot, oldest.parity);
          oldest.advance(plan.ring.slots);
        } else {
          ++under_way;
        }
        ++fetched;
        const uint32_t slot = ring + at.slot * plan.slot_bytes;
        if (is_elected()) barrier_arrive_expect(barrier, groups * group_bytes);
#pragma unroll 1
        for (int group = 0; group < groups; ++group) {
          const int from = __shfl_sync(kAllLanes, row, group);
          if (is_elected()) {
#pragma unroll 1
            for (int line = 0; line < kLines; line += plan.copy_lines) {
              const int of_row = piece * kLines + line;
              copy_tile_to_shared(slot + (group * kLines + line) * together * kLineBytes, &maps.quants,
                                  plan.copy_lines == 1 ? of_row * (kLineBytes / 4) : 0, from,
                                  plan.copy_lines == 1 ? 0 : of_row, barrier, policy);
            }
            if (Slot::kScaleBytes > 0 && plan.fetches_scales) {
              copy_tile_to_shared(
                  slot + plan.scales_at + group * plan.scale_stride, &maps.scales,
                  piece * (Slot::kBlocks * Slot::kScalesPerBlock) - Slot::scale_offset(piece) / 2, from, 0,
                  barrier, policy);
              if (Slot::kZeroBytes > 0) {
                copy_tile_to_shared(slot + plan.zeros_at + group * plan.zero_stride, &maps.zeros,
                                    piece * (Slot::kBlocks * Slot::kZerosPerBlock) - Slot::zero_offset(piece),
                                    from, 0, barrier, policy);
              }
            }
          }
        }
        at.advance(plan.ring.slots);
      }
    }
  if (plan.ring.next_pieces > 0) {
    wait_for_previous_kernel();  // which reads little, and waits for it
    bring_next(plan.ring, lane);
  }
}

// A slot's bytes, for a lane: of its warp's blocks of its rows.
template <PackedFormat kFormat, int kLines>
struct PackedReader {
  using Slot = PackedSlot<kFormat, kLines>;
  const PackedPlan& plan;
  uint32_t ring;
  RingBarriers barriers;
  RingCursor at = {};
  int piece = 0;
  uint32_t slot = 0, quants_at[2], scales_at[2], zeros_at[2];

  __device__ __forceinline__ PackedReader(const GemvParams&, const PackedPlan& plan, const char* ring,
                                          RingBarriers barriers)
      : plan(plan), ring(shared_address(ring)), barriers(barriers) {
    const int line = Slot::line(), g = threadIdx.x % kWarpSize / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = Slot::row_warp() * kMmaRows + Slot::row_of(g) + 8 * h;
      const int group = row / plan.together, of_group = row % plan.together;
      quants_at[h] = swizzled(group * plan.together * Slot::kPieceBytes + line * plan.together * kLineBytes +
                              of_group * kLineBytes + q * (kBits<kFormat> == 4 ? 16 : 32));
      const int scale = line * Slot::kWarpBlocks * Slot::kScalesPerBlock * 2;
      const int of_scales = plan.scales_at + group * plan.scale_stride + of_group * Slot::kScaleBytes + scale;
      scales_at[h] = Slot::kSwizzlesScales ? swizzled<Slot::kScaleBytes>(of_scales) : of_scales;
      zeros_at[h] = plan.zeros_at + group * plan.zero_stride + of_group * Slot::kZeroBytes +
                    line * Slot::kWarpBlocks * Slot::kZerosPerBlock;
    }
  }
  __device__ __forceinline__ void wait(int of_piece) {
    barrier_wait(barriers.full + 8 * at.slot, at.parity);
    slot = ring + at.slot * plan.slot_bytes;
    piece = of_piece;
  }
  // 16 bytes of this warp's 128: the lane's i-th of its `block`.
  __device__ __forceinline__ uint4 quants(const TileRows&, int h, int block, int i) const {
    return load_shared(slot + (quants_at[h] ^ (kBits<kFormat> == 4 ? block * 64 : i * 16)));
  }
  __device__ __forceinline__ uint2 scales(const TileRows& rows, int h, int block) const {
    if (!fetches_scales()) return scales_of<kFormat>(plan.matrix, rows.row[h], first_block() + block);
    uint2 found = {};
    if constexpr (Slot::kScalesPerBlock == 4) {
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                   : "=r"(found.x), "=r"(found.y)
                   : "r"(slot + scales_at[h] + 8 * block));
    } else if constexpr (Slot::kScalesPerBlock == 2) {
      asm volatile("ld.shared.u32 %0, [%1];"
                   : "=r"(found.x)
                   : "r"(slot + scales_at[h] + Slot::scale_offset(piece) + 4 * block));
    } else {
      uint16_t bits;
      asm volatile("ld.shared.u16 %0, [%1];"
                   : "=h"(bits)
                   : "r"(slot + scales_at[h] + Slot::scale_offset(piece) + 2 * block));
      found.x = bits;
    }
    return found;
  }
  __device__ __forceinline__ bool fetches_scales() const { return kIsCluster<kLines> || plan.fetches_scales; }
  // Returns the scales of the lane's sub-blocks, 2 q and 2 q + 1 of its warp's two blocks, of which there are
  // `blocks`.
  __device__ __forceinline__ uint32_t two_scales(const TileRows& rows, int h, int blocks = 2) const {
    const int q = threadIdx.x % 4;
    if constexpr (Slot::kScalesPerBlock == 4) {
      if (!fetches_scales()) {
        return q / 2 < blocks ? two_scales_of<kFormat>(plan.matrix, rows.row[h], first_block()) : 0;
      }
      uint32_t found;
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(found) : "r"(slot + scales_at[h] + 4 * q));
      return found;
    }
    return scales(rows, h, q / 2).x * 0x10001u;
  }
  __device__ __forceinline__ int zero(const TileRows& rows, int h, int block) const {
    if (!fetches_scales()) return zero_of<kFormat>(plan.matrix, rows.row[h], first_block() + block);
    uint32_t found;
    const uint32_t from = slot + zeros_at[h] + Slot::zero_offset(piece) + block * Slot::kZerosPerBlock;
    if constexpr (Slot::kZerosPerBlock == 4) {
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(found) : "r"(from));
    } else {
      asm volatile("ld.shared.u8 %0, [%1];" : "=r"(found) : "r"(from));
    }
    return static_cast<int>(found);
  }
  // Returns zeros as two_scales() returns scales.
  __device__ __forceinline__ int two_zeros(const TileRows& rows, int h) const {
    if (!fetches_scales()) return two_zeros_of(plan.matrix, rows.row[h], first_block());
    uint16_t found;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(found) : "r"(slot + zeros_at[h] + threadIdx.x % 4 * 2));
    return found;
  }
  __device__ __forceinline__ void release(uint32_t bits) {
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) {
      barrier_arrive(behind_reads(barriers.empty + 8 * at.slot, bits, plan.ring.zero));
    }
    at.advance(plan.ring.slots);
  }
  // Returns the place in the row of this warp's first block of the piece.
  __device__ __forceinline__ int first_block() const {
    return piece * Slot::kBlocks + Slot::line() * Slot::kWarpBlocks;
  }
};

template <PackedFormat kFormat, int kLines, class Compute>
__device__ __forceinline__ void run_packed(const GemvParams& p, const RopeAppendParams& rope,
                                           const PackedPlan& plan, const PackedMaps& maps, const char* ring,
                                           Compute compute) {
  __shared__ __align__(8) uint64_t barriers[2][kMaxRingSlots];
  uint32_t full = shared_address(barriers[0]), empty = shared_address(barriers[1]);
  asm volatile("" : "+r"(full), "+r"(empty));  // kept, not found anew for every slot
  allow_next_kernel();
  if (kIsCluster<kLines> && plan.ranks > 1)
    arrive_cluster();  // its other blocks may write to this block's shared memory
  if (threadIdx.x >= kRingConsumers) {
    const int lane = threadIdx.x % kWarpSize;
    if (lane < plan.ring.slots) {
      barrier_init(full + 8 * lane, 1);
      barrier_init(empty + 8 * lane, kRingWarps);
      barrier_init_done();
    }
    __syncwarp();
    arrive_some(2, kRingThreads);  // initialized barriers: this warp waits for nobody
    packed_fetch<kFormat, kLines>(p, rope, plan, maps, shared_address(ring), full, empty, lane);
    __syncwarp();
    if (kIsCluster<kLines> && plan.ranks > 1)
      wait_cluster();  // no warp ends between its arrival and the others'
    return;
  }
  compute(RingBarriers{full, empty});
  trace(TracePoint::kEnd);
}

#else

// This one reads straight from device memory.
template <PackedFormat kFormat, int kLines>
struct PackedReader {
  using Slot = PackedSlot<kFormat, kLines>;
  const GemvParams& p;
  const PackedPlan& plan;
  int piece = 0;

  __device__ __forceinline__ PackedReader(const GemvParams& p, const PackedPlan& plan, const char*,
                                          RingBarriers)
      : p(p), plan(plan) {}
  __device__ __forceinline__ void wait(int of_piece) { piece = of_piece; }
  __device__ __forceinline__ uint4 quants(const TileRows& rows, int h, int block, int i) const {
    const char* of_row = static_cast<const char*>(p.segments[0].weight) +
                         int64_t(rows.row[h]) * plan.matrix.blocks * Slot::kBlockBytes;
    const int byte =
        (first_block() + block) * Slot::kBlockBytes + (threadIdx.x % 4 * (kBits<kFormat> / 4) + i) * 16;
    return __ldcs(reinterpret_cast<const uint4*>(of_row + byte));
  }
  __device__ __forceinline__ uint2 scales(const TileRows& rows, int h, int block) const {
    return scales_of<kFormat>(plan.matrix, rows.row[h], first_block() + block);
  }
  __device__ __forceinline__ bool fetches_scales() const { return false; }
  __device__ __forceinline__ uint32_t two_scales(const TileRows& rows, int h, int blocks = 2) const {
    const int q = threadIdx.x % 4;
    if constexpr (Slot::kScalesPerBlock == 4) {
      return q / 2 < blocks ? two_scales_of<kFormat>(plan.matrix, rows.row[h], first_block()) : 0;
    }
    return scales(rows, h, q / 2).x * 0x10001u;
  }
  __device__ __forceinline__ int zero(const TileRows& rows, int h, int block) const {
    return zero_of<kFormat>(plan.matrix, rows.row[h], first_block() + block);
  }
  __device__ __forceinline__ int two_zeros(const TileRows& rows, int h) const {
    return two_zeros_of(plan.matrix, rows.row[h], first_block());
  }
  __device__ __forceinline__ void release(uint32_t) {}
  __device__ __forceinline__ int first_block() const {
    return piece * Slot::kBlocks + Slot::line() * Slot::kWarpBlocks;
  }
};

template <PackedFormat kFormat, int kLines, class Compute>
__device__ __forceinline__ void run_packed(const GemvParams&, const RopeAppendParams&, const PackedPlan&,
                                           const PackedMaps&, const char*, Compute compute) {
  compute(RingBarriers{});
}

#endif  // HF_FASTPATH_HOPPER

}  // namespace hf_fastpath
