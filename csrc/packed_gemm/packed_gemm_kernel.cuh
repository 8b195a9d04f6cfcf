// What: 17 and more x rows times a quantized matrix, plus a bias, in float16 or bfloat16.
// Work split: clusters of two blocks, as many as the GPU has room for. A tile is 64 features of each
//   warpgroup that computes, of which a block has two or four, times 32 to 256 tokens. Clusters share whole
//   tiles, or their pieces (128 bytes of quants a row): all of all tiles, or some of them each tile. Then all
//   but the cluster with a tile's last pieces leave float32 accumulators in device memory, and that one adds
//   them in order. Two warps fetch: x in slots of 64 inputs, each block half of the tokens for both, and
//   quants in slots of a piece. So that x can stay as it is, lanes of a quad swap quants of 4 bits, and take
//   theirs of four words of 8 bits. They dequantize them into A of wgmma in registers, 64 inputs while the
//   tensor cores have the 64 before; B is x in shared memory.
// Traffic: quants once for every `together` tiles whose x fits L2, x once a cluster and features; out.
// Roofline: tensor cores with tiles of 256 tokens (fp8 at 1,024 rows: cuBLAS's speed), integer instructions
//   with smaller ones (int4_g32, 32 rows, 4096 to 28672: 36 % of read bandwidth, H200, 2026-11).
#pragma once

#include "packed_gemm/packed_gemm_ring.cuh"

namespace hf_fastpath {

#if HF_FASTPATH_WGMMA

__device__ __forceinline__ void load_shared(uint32_t (&words)[4], uint32_t from) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(from));
}
__device__ __forceinline__ void load_shared(uint32_t (&words)[2], uint32_t from) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(from));
}

// A lane's words of a block, of its two rows: as many sub-blocks together as there are registers for.
template <class T, PackedFormat kFormat, class Tile>
struct GemmWords {
  static constexpr int kLoads = PackedPiece<kFormat>::kLoads;
  static constexpr int kTogether = kLoads == 1 || Tile::kWarpgroups == 2 ? 4 : 2;
  static constexpr int kRowBytes = PackedPiece<kFormat>::kRowBytes;
  uint32_t raw[2][kLoads][kTogether];

  // `row`: the lane's first; `sub-block`: the first of those together.
  __device__ __forceinline__ void load(uint32_t piece, int row, int block, int sub_block) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int word = LaneQuants<T, kFormat>::word(i);  // 16 bytes, of each sub-block one
        const int chunk = kRowBytes == 128 ? word ^ (row & 7) : word;
        load_shared(raw[h][i],
                    piece + (block * Tile::kFeatures + row + h * 8) * kRowBytes + chunk * 16 + sub_block * 4);
      }
  }
  __device__ __forceinline__ uint32_t all() const {
    uint32_t bits = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < kLoads; ++i) bits ^= raw[h][i][0];
    return bits;
  }
  __device__ __forceinline__ void of_sub_block(int h, int sub_block, uint32_t (&words)[kLoads]) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) words[i] = raw[h][i][sub_block % kTogether];
  }
};

// One warpgroup's state.
template <class T, PackedFormat kFormat, class Tile>
struct GemmConsumer {
  static constexpr int kTokens = Tile::kTokens;
  using Piece = PackedPiece<kFormat>;
  const GemmShare& share;
  const PackedMatrix& matrix;
  uint32_t smem;
  GemmBarriers barriers;
  int cluster, rank, group, lane, warp;  // group: of warps
  RingCursor x_at, at;
  LaneQuants<T, kFormat> quants;
  int groups[2];                 // of the lane's rows, where the part's tile has them
  PieceScales<kFormat> next[2];  // of the piece that follows
  float accumulators[kTokens / 2];

  __device__ __forceinline__ GemmConsumer(const GemmShare& share, const PackedMatrix& matrix, uint32_t smem,
                                          int cluster, int rank)
      : share(share),
        matrix(matrix),
        smem(smem),
        barriers(gemm_barriers<Tile>(smem)),
        cluster(cluster),
        rank(rank),
        group(threadIdx.x / 128),
        lane(threadIdx.x % kWarpSize),
        warp(threadIdx.x / kWarpSize % 4) {}

  // Features of the tile that the lane's rows are: this one and eight more.
  __device__ __forceinline__ int row() const { return group * 64 + warp * 16 + lane / 4; }

  __device__ __forceinline__ void release_x(int slot) {
    if (threadIdx.x % 128 < kGemmCluster) arrive_at(barriers.x_empty + 8 * slot, threadIdx.x % 128);
  }

  // The lane's rows in the matrix; those behind the last are the last.
  __device__ __forceinline__ int64_t matrix_row(const GemmPart& part, int h) const {
    const int64_t first = (int64_t(part.features) * kGemmCluster + rank) * Tile::kFeatures;
    return min(first + row() + 8 * h, matrix.rows - 1);
  }
  __device__ __forceinline__ void load_scales(int piece) {
#pragma unroll
    for (int h = 0; h < 2; ++h) next[h].load(matrix, groups[h], piece);
  }
  __device__ __forceinline__ void begin_scales(const GemmPart& part) {
#pragma unroll
    for (int h = 0; h < 2; ++h) groups[h] = static_cast<int>(matrix_row(part, h)) * matrix.groups;
    load_scales(part.first);
  }

  __device__ __forceinline__ void multiply(const GemmPart& part) {
    int accumulate = 0, before = -1;
#pragma unroll 1
    for (int piece = part.first; piece < part.last; ++piece) {
      PieceScales<kFormat> scales[2];
      scales[0] = next[0], scales[1] = next[1];
      load_scales(min(piece + 1, part.last - 1));
      const int blocks = matrix.blocks - piece * Piece::kBlocks;
      barrier_wait(barriers.full + 8 * at.slot, at.parity);
      const uint32_t from = smem + Tile::kPiecesAt + at.slot * Tile::kPieceBytes;
#pragma unroll
      for (int b = 0; b < Piece::kBlocks; ++b) {
        if (b >= blocks) break;
        GemmWords<T, kFormat, Tile> words;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          constexpr int kTogether = GemmWords<T, kFormat, Tile>::kTogether;
          if (half * 2 % kTogether == 0) words.load(from, row(), b, half * 2);
          uint32_t a[4][4];  // of 16 inputs: as A of mma.cuh
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int sub_block = half * 2 + i;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              uint32_t of_sub_block[Piece::kLoads], pair[4];
              words.of_sub_block(h, sub_block, of_sub_block);
              dequantize_sub_block(quants, of_sub_block, Piece::kScales ? scales[h].scale(b, sub_block) : 0,
                                   scales[h].zero(b, sub_block), pair);
              a[i * 2][h] = pair[0], a[i * 2][2 + h] = pair[1];
              a[i * 2 + 1][h] = pair[2], a[i * 2 + 1][2 + h] = pair[3];
            }
          }
          // The piece is in registers.
          if (half * 2 + kTogether == 4 && (b == Piece::kBlocks - 1 || b + 1 == blocks)) {
            __syncwarp();
            if (lane == 0)
              barrier_arrive(behind_reads(barriers.empty + 8 * at.slot, words.all(), share.zero));
          }
          barrier_wait(barriers.x_full + 8 * x_at.slot, x_at.parity);
          const uint64_t operand = wgmma_operand(smem + x_at.slot * Tile::kXBytes);
          wgmma_begin();
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            wgmma<T, kTokens>(accumulators, a[i], operand + i * kWgmmaStep, accumulate);
            accumulate = 1;
          }
          wgmma_commit();
          wgmma_wait<1>();  // the 64 inputs before: their slot and their operands' registers are free
          if (before >= 0) release_x(before);
          before = x_at.slot;
          x_at.advance(Tile::kX);
        }
      }
      at.advance(Tile::kPieces);
    }
    wgmma_wait<0>();
    release_x(before);
  }

  __device__ __forceinline__ float4* partial_of(int of_cluster) const {
    return reinterpret_cast<float4*>(share.partials) +
           (int64_t(of_cluster * kGemmCluster + rank) * Tile::kWarpgroups + group) * (kTokens / 8) * 128 +
           threadIdx.x % 128;
  }
  __device__ __forceinline__ unsigned long long* flag_of(int of_cluster) const {
    return share.flags + (of_cluster * kGemmCluster + rank) * Tile::kWarpgroups + group;
  }
  __device__ __forceinline__ void sync() const { sync_some(1 + group, 128); }

  // Leaves the accumulators for the cluster that has the tile's last pieces.
  __device__ __forceinline__ void leave() {
    float4* const to = partial_of(cluster);
#pragma unroll
    for (int t = 0; t < kTokens / 8; ++t)
      __stcg(to + t * 128, make_float4(accumulators[4 * t], accumulators[4 * t + 1], accumulators[4 * t + 2],
                                       accumulators[4 * t + 3]));
    sync();  // all of the warpgroup's
    if (threadIdx.x % 128 == 0) {
      __threadfence();  // for all that came before the barrier
      atomicExch(flag_of(cluster), share.ticket);
    }
  }

  // Adds what lower clusters have of the tile, in order.
  __device__ __forceinline__ void collect(const GemmPart& part) {
    int first = cluster;
    while (GemmParts::boundary(share.plan, first) > part.start) --first;
    for (int other = first + threadIdx.x % 128; other < cluster; other += 128) {
      unsigned long long found;
      do {
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(flag_of(other)) : "memory");
      } while (found != share.ticket);
      *flag_of(other) = 0;  // for the next launch with this ticket, of a captured graph
    }
    sync();
#pragma unroll(kTokens* Tile::kWarpgroups <= 128 ? 4 : 1)
    for (int other = first; other < cluster; ++other) {
      const float4* const from = partial_of(other);
#pragma unroll
      for (int t = 0; t < kTokens / 8; ++t) {
        const float4 v = __ldcg(from + t * 128);
        accumulators[4 * t] += v.x, accumulators[4 * t + 1] += v.y, accumulators[4 * t + 2] += v.z,
            accumulators[4 * t + 3] += v.w;
      }
    }
  }

  // Writes the tile, turned to [tokens, features] in shared memory, 32 tokens at a time.
  __device__ __forceinline__ void store(const GemmPart& part, const CUtensorMap* map, const T* bias, T* out) {
    const int64_t first = (int64_t(part.features) * kGemmCluster + rank) * Tile::kFeatures;
    float scale[2], shift[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t feature = matrix_row(part, h);
      scale[h] = matrix.multiplier;
      if constexpr (Traits<kFormat>::kScalesSums) scale[h] *= scale_of_row<kFormat>(matrix, feature);
      shift[h] = bias ? to_float(bias[feature]) : 0.f;
    }
    const int64_t column = first + group * 64;
    const uint32_t buffers = smem + Tile::kStagingAt + group * 2 * kGemmStagingBytes;
#pragma unroll
    for (int step = 0; step < kTokens; step += kGemmStepTokens) {
      const int64_t token = int64_t(part.tokens) * kTokens + step;
      if (token >= share.rows) break;
      // Two in turns. One is free again behind the barrier of the step between, which waits for its reads.
      const uint32_t staging = buffers + step / kGemmStepTokens % 2 * kGemmStagingBytes;
#pragma unroll
      for (int t = 0; t < kGemmStepTokens / 8; t += 2) {
        uint32_t word[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float* const c = accumulators + (step / 8 + t + i) * 4 + 2 * h;
            word[i][h] = pack2(fmaf(c[0], scale[h], shift[h]), fmaf(c[1], scale[h], shift[h]), T());
          }
        const int line = lane % 8, chunk = warp * 2 + lane / 8 % 2;
        const uint32_t to = staging + ((t + lane / 16) * 8 + line) * 128 + ((chunk ^ line) << 4);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                     "r"(word[0][0]), "r"(word[0][1]), "r"(word[1][0]), "r"(word[1][1])
                     : "memory");
      }
      if (share.whole) {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // what was written, for the copy
        if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        sync();
        if (threadIdx.x % 128 == 0 && column < matrix.rows) {
          asm volatile(
              "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(
                  map),
              "r"(static_cast<int>(column)), "r"(static_cast<int>(token)), "r"(0), "r"(staging)
              : "memory");
          asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
      } else {
        sync();
        store_elements(staging, token, column, out);
      }
    }
    if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    sync();  // both buffers are read
  }

  // Writes what is inside of out, for rows that copies do not take.
  __device__ __forceinline__ void store_elements(uint32_t staging, int64_t token, int64_t column, T* out) {
    const int tid = threadIdx.x % 128;
    for (int i = tid; i < kGemmStepTokens * 8; i += 128) {
      const int line = i / 8, chunk = i % 8;
      uint32_t words[4];
      load_shared(words, staging + line * 128 + ((chunk ^ line % 8) << 4));
      if (token + line >= share.rows) continue;
      uint16_t* const to = reinterpret_cast<uint16_t*>(out) + (token + line) * matrix.rows;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int64_t at = column + chunk * 8 + e;
        if (at < matrix.rows) to[at] = static_cast<uint16_t>(words[e / 2] >> e % 2 * 16);
      }
    }
  }

  __device__ __forceinline__ void run(const CUtensorMap* map, const T* bias, T* out) {
    GemmParts parts(share.plan, cluster);
    GemmPart part, now;
    bool more = parts.next(share.plan, part);
    if (more) begin_scales(part);
    while (more) {
      now = part;
      multiply(now);
      more = parts.next(share.plan, part);
      if (more) begin_scales(part);
      if (now.last < share.plan.pieces) {
        leave();
        continue;
      }
      if (now.first > 0) collect(now);
      store(now, map, bias, out);
    }
  }
};

#endif  // HF_FASTPATH_WGMMA

template <class T, PackedFormat kFormat, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    packed_gemm_kernel(const __grid_constant__ GemmShare share, const __grid_constant__ PackedMatrix matrix,
                       const __grid_constant__ CUtensorMap x_map,
                       const __grid_constant__ CUtensorMap quants_map,
                       const __grid_constant__ CUtensorMap out_map, const T* bias, T* out) {
#if HF_FASTPATH_WGMMA
  extern __shared__ __align__(1024) char shared[];
  const uint32_t smem = shared_address(shared);
  const GemmBarriers barriers = gemm_barriers<Tile>(smem);
  const int cluster = blockIdx.x / kGemmCluster, rank = blockIdx.x % kGemmCluster;
  const int warp = threadIdx.x / kWarpSize;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Tile::kX; ++i) {
      barrier_init(barriers.x_full + 8 * i, 1);
      barrier_init(barriers.x_empty + 8 * i, kGemmCluster * Tile::kWarpgroups);
    }
    for (int i = 0; i < Tile::kPieces; ++i) {
      barrier_init(barriers.full + 8 * i, 1);
      barrier_init(barriers.empty + 8 * i, 4 * Tile::kWarpgroups);
    }
    barrier_init_done();
  }
  if (threadIdx.x == 128) {
    prefetch_map(&quants_map), prefetch_map(&x_map);
    if (share.whole) prefetch_map(&out_map);
  }
  meet_cluster();  // both blocks' barriers are ready for both
  if (warp >= 4 * Tile::kWarpgroups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Tile::kFetchRegisters));
    const int which = warp - 4 * Tile::kWarpgroups;
    if (which == 0) {
      if (is_elected()) fetch_pieces<kFormat, Tile>(share, &quants_map, smem, cluster, rank);
    } else if (which == 1) {
      wait_for_previous_kernel();  // which may write x
      if (is_elected()) fetch_x<kFormat, Tile>(share, matrix, &x_map, smem, cluster, rank);
    } else if (which == 2) {
      prefetch_scales<kFormat, Tile>(share, matrix, cluster, rank, threadIdx.x % kWarpSize);
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Tile::kRegisters));
    wait_for_previous_kernel();  // which may still read what this one writes
    GemmConsumer<T, kFormat, Tile> consumer(share, matrix, smem, cluster, rank);
    consumer.run(&out_map, bias, out);
  }
#endif
}

}  // namespace hf_fastpath
