// What: 9 to 64 x rows in float16 or bfloat16 times [n, k] weights, on Hopper's products of warpgroups.
// Work split: a tile is one or two times up to 64 output features (gate and up of the same ones when gated),
//   A of wgmma, and all x rows, B; as many features a tile as give every SM one, or an equal number of them.
//   Matrices of few features: k is split over a cluster of two blocks, which send each other the sums of half
//   of the x rows. A warp fetches weights by tensor copies, 64 inputs of k at a time, into slots of shared
//   memory, before the kernel in front is complete; another one x. Sums go through shared memory, so that
//   the end of a product is a short loop: its code comes from L2 in every launch.
// Traffic: weights once; x once a block, out of L2.
// Roofline: read bandwidth. float16, 4096 to 2 x 14336 gated: 92 % of it for 16 x rows, 90 for 32; 14336 to
//   4096: 88, 86; 4096 to 4096: 71, 68; cuBLAS 81 to 76, 76, 53 (H200, 2026-11).

#pragma once

#include "common/async.cuh"
#include "common/ring_cursor.cuh"
#include "common/wgmma_shared.cuh"
#include "gemv/gemv_device.cuh"

namespace hf_fastpath {

constexpr int kComputing = 128;                       // threads: a warpgroup
constexpr int kThreads = kComputing + 2 * kWarpSize;  // and the warps that fetch weights and x
constexpr int kWgmmaRows = 64;                        // weight rows of A
constexpr int kChunk = 64;                            // inputs of a copy: 128 bytes of each row
constexpr int kChunkBytes = 128;                      // of a row
constexpr int kRoundRows = 32;                        // x rows that are finished at a time
constexpr int kSumsStride = kWgmmaRows + 4;           // floats from one to the next: no bank twice

// Returns the place behind the last feature of a segment.
__host__ __device__ __forceinline__ int segment_end(const GemvParams& p, int segment) {
  return segment + 1 < p.num_segments && !p.gated ? p.segments[segment + 1].first : p.n;
}

// How a launch's work is divided.
struct WgmmaPlan {
  int rows;    // weight rows of a copy
  int tiles;   // of `parts` copies, or of a copy of each of two gated weights
  int split;   // blocks that share k
  int chunks;  // of k in a slot
  int steps;   // slots' worth of k
  int slots;
  int first[kMaxGemvSegments];  // tile of a segment
  // Bytes.
  int x_chunk, weight_chunk, slot;
  int sums_at, received_at, barriers_at, all;
};

#if HF_FASTPATH_WGMMA

// Sends four sums to the shared memory of another block of the cluster: 16 bytes that arrive at its barrier.
__device__ __forceinline__ void send_sums(uint32_t to, const float (&v)[4], uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
      "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier)
      : "memory");
}

// What all warps of a block know.
struct WgmmaBlock {
  const GemvParams& p;
  const WgmmaPlan& plan;
  uint32_t smem;
  int rank, first_tile, stride;  // of the tiles
  int begin, end;                // slots' worth of k

  __device__ __forceinline__ WgmmaBlock(const GemvParams& p, const WgmmaPlan& plan, uint32_t smem)
      : p(p), plan(plan), smem(smem) {
    rank = plan.split > 1 ? blockIdx.x % plan.split : 0;
    first_tile = blockIdx.x / plan.split, stride = gridDim.x / plan.split;
    begin = plan.steps * rank / plan.split, end = plan.steps * (rank + 1) / plan.split;
  }
  __device__ __forceinline__ uint32_t full(int slot) const { return smem + plan.barriers_at + 8 * slot; }
  __device__ __forceinline__ uint32_t empty(int slot) const { return full(plan.slots + slot); }
  __device__ __forceinline__ uint32_t received() const { return full(2 * plan.slots); }
  __device__ __forceinline__ uint32_t x_at(int slot) const { return smem + slot * plan.slot; }
  __device__ __forceinline__ uint32_t weights_at(int slot) const {
    return x_at(slot) + plan.chunks * plan.x_chunk;
  }
  // The segment of a tile.
  __device__ __forceinline__ int segment(int tile) const {
    if (p.gated) return 0;
    int found = 0;
#pragma unroll
    for (int i = 1; i < kMaxGemvSegments; ++i) found += i < p.num_segments && tile >= plan.first[i];
    return found;
  }
};

// Waits for an empty slot for every part of k of every tile and lets `fetch(tile, step, slot)` fill it. One
// lane's work.
template <class Fetch>
__device__ __forceinline__ void fill_slots(const WgmmaBlock& block, const Fetch& fetch) {
  RingCursor at;
  for (int tile = block.first_tile; tile < block.plan.tiles; tile += block.stride) {
    for (int step = block.begin; step < block.end; ++step) {
      barrier_wait(block.empty(at.slot), at.parity ^ 1);
      fetch(tile, step, at.slot);
      at.advance(block.plan.slots);
    }
  }
}

// The warpgroup that computes. kX: x rows of a product, kParts: tiles of 64 weight rows.
template <class T, int kX, int kParts>
struct WgmmaConsumer {
  static constexpr int kGroups = kX / 8, kHalf = kGroups / 2;
  const WgmmaBlock& block;
  float* sums;      // in shared memory: of kParts times kX x rows
  float4* arrived;  // what the other block of a cluster has sent
  int warp, lane;
  RingCursor at;
  float c[kParts][kGroups][4];

  __device__ __forceinline__ void release(int slot) {
    if (lane == 0) barrier_arrive(block.empty(slot));
  }

  __device__ __forceinline__ void multiply() {
    const WgmmaPlan& plan = block.plan;
    int before = -1;
    for (int step = block.begin; step < block.end; ++step) {
      barrier_wait(block.full(at.slot), at.parity);
      wgmma_begin();
#pragma unroll 1
      for (int chunk = 0; chunk < plan.chunks; ++chunk) {
        const uint64_t x = wgmma_operand(block.x_at(at.slot) + chunk * plan.x_chunk);
        const uint64_t weights = wgmma_operand(block.weights_at(at.slot) + chunk * plan.weight_chunk);
        const int part = plan.weight_chunk / kParts >> 4;  // from one to the next
#pragma unroll
        for (int i = 0; i < kChunk / 16; ++i)
#pragma unroll
          for (int of = 0; of < kParts; ++of)
            wgmma_shared<T>(c[of], weights + 2 * i + of * part, x + 2 * i,
                            step > block.begin || chunk > 0 || i > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();  // the slot before is read
      if (before >= 0) release(before);
      before = at.slot;
      at.advance(plan.slots);
    }
    wgmma_wait<0>();
    release(before);
#pragma unroll
    for (int of = 0; of < kParts; ++of) wgmma_touch(c[of]);
  }

  // Two blocks share k: the first gets the sums of the first half of the x rows, the second the
  // others. They become the first groups.
  __device__ __forceinline__ void exchange() {
    const int other = block.rank ^ 1;
    const uint32_t barrier = cluster_address(block.received(), other);
    const uint32_t to = cluster_address(arrived + threadIdx.x, other);
    wait_cluster();  // the other block's barrier is set up
#pragma unroll
    for (int of = 0; of < kParts; ++of)
#pragma unroll
      for (int g = 0; g < kHalf; ++g) {
        float mine[4], others[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          mine[i] = block.rank ? c[of][g + kHalf][i] : c[of][g][i];
          others[i] = block.rank ? c[of][g][i] : c[of][g + kHalf][i];
        }
        send_sums(to + (of * kHalf + g) * kComputing * 16, others, barrier);
#pragma unroll
        for (int i = 0; i < 4; ++i) c[of][g][i] = mine[i];
      }
    barrier_wait(block.received(), 0);
#pragma unroll
    for (int of = 0; of < kParts; ++of)
#pragma unroll
      for (int g = 0; g < kHalf; ++g) {
        const float4 more = arrived[(of * kHalf + g) * kComputing + threadIdx.x];
        c[of][g][0] += more.x, c[of][g][1] += more.y, c[of][g][2] += more.z, c[of][g][3] += more.w;
      }
  }

  // Outputs of x rows from `first` + `done` on, `rows` of them or as many as a round has: a feature of every
  // second row a thread, all at once, for there are no other warps to wait for memory beside. The hardware's
  // approximations are far within what rounding to 16 bits takes.
  template <Activation kActivation>
  __device__ __forceinline__ void finish_round(int tile, int first, int done, int rows) {
    constexpr int kEach = (kX < kRoundRows ? kX : kRoundRows) / 2;
    const GemvParams& p = block.p;
    const WgmmaPlan& plan = block.plan;
    const int feature = threadIdx.x % kWgmmaRows, start = threadIdx.x / kWgmmaRows;
    const int segment = block.segment(tile), end = segment_end(p, segment);
    const int from = p.segments[segment].first +
                     (tile - plan.first[segment]) * plan.rows * (p.gated ? 1 : kParts) + feature;
#pragma unroll 1
    for (int of = 0; of < (p.gated ? 1 : kParts); ++of) {
      const int n = from + of * plan.rows;
      if (feature >= plan.rows || n >= end) break;
      const float* const dots = sums + (of * kX + done + start) * kSumsStride + feature;
      const int64_t at = int64_t(first + done + start) * p.n + n;
      T residual[kEach];
      if (p.residual) {
#pragma unroll
        for (int i = 0; i < kEach; ++i)
          if (start + 2 * i < rows)
            residual[i] = Chunk<T, 1>::load_l2(static_cast<const T*>(p.residual) + at + int64_t(2 * i) * p.n);
      }
      const void* const bias = p.segments[segment].bias;
      const float shift = bias ? to_float(static_cast<const T*>(bias)[n - p.segments[segment].first]) : 0.f;
      float y[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) y[i] = activate<kActivation>(dots[2 * i * kSumsStride] + shift);
      if (p.gated) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) y[i] *= dots[((kParts - 1) * kX + 2 * i) * kSumsStride];
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (start + 2 * i >= rows) break;
        if (p.residual) y[i] += to_float(residual[i]);
        static_cast<T*>(p.out)[at + int64_t(2 * i) * p.n] = from_float<T>(y[i]);
      }
    }
  }

  __device__ __forceinline__ void finish_round(int tile, int first, int done, int rows) {
    switch (block.p.activation) {
      case Activation::kRelu:
        return finish_round<Activation::kRelu>(tile, first, done, rows);
      case Activation::kSilu:
        return finish_round<Activation::kSilu>(tile, first, done, rows);
      case Activation::kGeluTanh:
        return finish_round<Activation::kGeluTanh>(tile, first, done, rows);
      case Activation::kGelu:
        return finish_round<Activation::kGelu>(tile, first, done, rows);
      default:
        return finish_round<Activation::kNone>(tile, first, done, rows);
    }
  }

  __device__ __forceinline__ void finish_tile(int tile) {
    const bool shared = block.plan.split > 1;
    const int groups = shared ? kHalf : kGroups, first = shared ? block.rank * kHalf * 8 : 0;
    const int rows = min(groups * 8, block.p.m - first);
    sync_some(1, kComputing);  // what was there is read
#pragma unroll
    for (int of = 0; of < kParts; ++of)
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (g >= groups) break;
#pragma unroll
        for (int i = 0; i < 4; ++i)
          sums[(of * kX + g * 8 + lane % 4 * 2 + i % 2) * kSumsStride + warp * 16 + lane / 4 + i / 2 * 8] =
              c[of][g][i];
      }
    sync_some(1, kComputing);
#pragma unroll 1
    for (int done = 0; done < rows; done += kRoundRows) finish_round(tile, first, done, rows - done);
  }

  __device__ __forceinline__ void run() {
    for (int tile = block.first_tile; tile < block.plan.tiles; tile += block.stride) {
      multiply();
      trace(TracePoint::kSums);
      if (block.plan.split > 1) exchange();  // one tile a block then
      wait_for_previous_kernel();            // which may read what is written now, or write the residual
      finish_tile(tile);
    }
    trace(TracePoint::kEnd);
  }
};

#endif  // HF_FASTPATH_WGMMA

template <class T, int kX, int kParts>
__global__ void __launch_bounds__(kThreads, 1)
    gemv_wgmma_kernel(const __grid_constant__ GemvParams p, const __grid_constant__ WgmmaPlan plan,
                      const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap map0,
                      const __grid_constant__ CUtensorMap map1, const __grid_constant__ CUtensorMap map2,
                      const __grid_constant__ CUtensorMap map3) {
#if HF_FASTPATH_WGMMA
  extern __shared__ __align__(1024) char shared[];
  const WgmmaBlock block(p, plan, shared_address(shared));
  const int warp = threadIdx.x / kWarpSize;
  if (threadIdx.x == 0) {
    for (int i = 0; i < plan.slots; ++i) {
      barrier_init(block.full(i), 2);
      barrier_init(block.empty(i), kComputing / kWarpSize);
    }
    barrier_init(block.received(), 1);
    barrier_init_done();
    if (plan.split > 1) barrier_arrive_expect(block.received(), kParts * (kX / 16) * kComputing * 16);
  }
  __syncthreads();
  if (plan.split > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  allow_next_kernel();
  if (warp == kComputing / kWarpSize) {
    if (is_elected()) {
      const uint64_t policy = read_once_policy();
      fill_slots(block, [&](int tile, int step, int slot) {
        const int segment = block.segment(tile);
        const int row = (tile - plan.first[segment]) * plan.rows * (p.gated ? 1 : kParts);
        const CUtensorMap* const map = segment == 0   ? &map0
                                       : segment == 1 ? &map1
                                       : segment == 2 ? &map2
                                                      : &map3;
        const uint32_t full = block.full(slot);
        uint32_t to = block.weights_at(slot);
        barrier_arrive_expect(full, plan.chunks * kParts * plan.rows * kChunkBytes);
        for (int i = 0; i < plan.chunks; ++i, to += plan.weight_chunk) {
          const int k = (step * plan.chunks + i) * kChunk;
          copy_tile_to_shared(to, map, k, row, 0, full, policy);
          if constexpr (kParts == 2)
            copy_tile_to_shared(to + plan.weight_chunk / 2, p.gated ? &map1 : map, k,
                                p.gated ? row : row + plan.rows, 0, full, policy);
        }
      });
    }
  } else if (warp == kComputing / kWarpSize + 1) {
    if (is_elected()) {
      wait_for_previous_kernel();  // which may write x
      fill_slots(block, [&](int, int step, int slot) {
        const uint32_t full = block.full(slot);
        barrier_arrive_expect(full, plan.chunks * plan.x_chunk);
        for (int i = 0; i < plan.chunks; ++i)
          copy_tile_to_shared(block.x_at(slot) + i * plan.x_chunk, &x_map, (step * plan.chunks + i) * kChunk,
                              0, 0, full);
      });
    }
  } else {
    WgmmaConsumer<T, kX, kParts> consumer{block, reinterpret_cast<float*>(shared + plan.sums_at),
                                          reinterpret_cast<float4*>(shared + plan.received_at), warp,
                                          static_cast<int>(threadIdx.x % kWarpSize)};
    consumer.run();
    return;
  }
  __syncwarp();
  if (plan.split > 1) wait_cluster();
#endif
}

}  // namespace hf_fastpath
