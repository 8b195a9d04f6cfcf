// What: softmax(scale * q @ K.T) @ V of new tokens over the positions of a KV cache that they see, on
// Hopper's
//   tensor cores. Scores, softmax and sums are float32; the weights of V are rounded to 16 bits, as in every
//   flash attention.
// Work split: grid (splits, KV heads * tiles of rows, batch rows), in clusters of splits; see row_tile.cuh
// for
//   rows and positions, finish.cuh for the merge. A block has two consumer warpgroups and a warp that copies
//   tiles of K and V through a ring of shared memory. With kRowGroups 2 the warpgroups have 64 rows each and
//   both read every tile; with 1 they have the same 64 rows and take tiles in turn. The scores of a tile are
//   computed while the weighted sums of the tile before run: softmax hides behind products.
// Traffic: 2 * positions * head_dim * 2 bytes a tile of rows (tiles of a KV head run side by side and share
//   them in L2), q and the output, plus partial results of clusters through L2.
// Roofline: read bandwidth up to about 64 rows a KV head, tensor cores above. Over 16384 positions,
//   32/8 heads of 128: 61 % of read bandwidth for 2 tokens, 55 % for 8, 615 TFLOP/s for 512 (H200, 2026-11).
#pragma once

#include "append_attention/append_attention_products.cuh"
#include "append_attention/finish.cuh"
#include "append_attention/row_tile.cuh"
#include "common/async.cuh"
#include "common/tensor_map.h"

namespace hf_fastpath {
namespace append {

constexpr int kGroupThreads = 128, kConsumerGroups = 2, kConsumers = kConsumerGroups * kGroupThreads;
constexpr int kWgmmaThreads = kConsumers + kGroupThreads;  // the last warpgroup gives its registers away
constexpr int kConsumerRegisters = 240, kCopierRegisters = 24;
constexpr int kHopperSharedBytes = 227 * 1024;
constexpr int kMostStages = 8;

// Shared memory of a block: q, then stages of K and V. kDims: head_dim rounded up to what the products take.
template <int kDims, int kRowGroups>
struct WgmmaTiles {
  static constexpr int kRows = 64 * kRowGroups;
  static constexpr int kPositions = wgmma_positions(kRows, kDims);
  static constexpr int kBoxes = (kDims + 63) / 64;  // of 64 dims
  static constexpr int kQBox = kRows * 128, kBox = kPositions * 128;
  static constexpr int kQBytes = kBoxes * kQBox, kTileBytes = kBoxes * kBox;
  static constexpr int kRing = (kHopperSharedBytes - 1024 - 256 - kQBytes) / (2 * kTileBytes);
  static constexpr int kStages = kRing > kMostStages ? kMostStages : kRing;
  static constexpr int kBarriers = kQBytes + kStages * 2 * kTileBytes;
  static constexpr int kBytes = kBarriers + 4 * kStages * 8 + 1024;  // and room to align
  using BlockResults = Results<kRows, kDims, kConsumerGroups / kRowGroups>;
  static_assert(kStages >= 2 && BlockResults::kBytes <= kBarriers, "results replace q and tiles");

  char* shared;

  __device__ __forceinline__ char* k(int stage) const { return shared + kQBytes + stage * 2 * kTileBytes; }
  __device__ __forceinline__ char* v(int stage) const { return k(stage) + kTileBytes; }
  __device__ __forceinline__ uint32_t barrier(int kind, int stage) const {
    return shared_address(shared + kBarriers) + (kind * kStages + stage) * 8;
  }
  // A tile of K or V is there; all its readers are done.
  __device__ __forceinline__ uint32_t k_full(int stage) const { return barrier(0, stage); }
  __device__ __forceinline__ uint32_t v_full(int stage) const { return barrier(1, stage); }
  __device__ __forceinline__ uint32_t k_free(int stage) const { return barrier(2, stage); }
  __device__ __forceinline__ uint32_t v_free(int stage) const { return barrier(3, stage); }
};

// Place of a piece of 16 bytes in a row of a box.
__device__ __forceinline__ int swizzled(int row, int piece) { return row * 128 + (piece ^ (row & 7)) * 16; }

#if HF_FASTPATH_WGMMA

// Fills the ring; one warp, of which one lane asks.
template <class Tiles>
__device__ __forceinline__ void copy_tiles(const AppendAttentionParams& p, const RowTile& t,
                                           const Tiles& tiles, int count, const CUtensorMap& k_map,
                                           const CUtensorMap& v_map) {
  const int head = t.batch_row * p.num_kv_heads + t.kv_head;
  bool waited = false;
  for (int i = 0; i < count; ++i) {
    const int stage = i % Tiles::kStages, base = t.begin + i * Tiles::kPositions;
    if (!waited && base + Tiles::kPositions > t.past) {  // the kernel in front appends the new positions
      wait_for_previous_kernel();
      waited = true;
    }
    const uint32_t parity = i / Tiles::kStages % 2 ^ 1;
    const auto copy = [&](uint32_t free, uint32_t full, char* to, const CUtensorMap& map) {
      barrier_wait(free, parity);
      if (!is_elected()) return;
      barrier_arrive_expect(full, Tiles::kTileBytes);
#pragma unroll
      for (int box = 0; box < Tiles::kBoxes; ++box)
        copy_tile_to_shared(shared_address(to) + box * Tiles::kBox, &map, box * 64, base, head, full);
    };
    copy(tiles.k_free(stage), tiles.k_full(stage), tiles.k(stage), k_map);
    copy(tiles.v_free(stage), tiles.v_full(stage), tiles.v(stage), v_map);
  }
}

// Brings the rows of q into shared memory, zeros where there are none.
template <class T, int kDims, class Tiles>
__device__ __forceinline__ void load_q(const AppendAttentionParams& p, const RowTile& t, const Tiles& tiles,
                                       bool negates) {
  constexpr int kPieces = Tiles::kBoxes * 8;  // of 16 bytes, a row
  constexpr int kCopies = Tiles::kRows * kPieces / kConsumers, kAhead = kCopies < 8 ? kCopies : 8;
  static_assert(kCopies % kAhead == 0, "copies come kAhead at a time");
  const uint32_t signs = negates ? 0x80008000u : 0;
#pragma unroll 1
  for (int first = threadIdx.x; first < Tiles::kRows * kPieces; first += kAhead * kConsumers) {
    uint4 x[kAhead];  // on their way together: every one comes from far
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int i = first + j * kConsumers, row = i / kPieces, piece = i % kPieces;
      x[j] = make_uint4(0, 0, 0, 0);
      if (row < t.rows && piece * 8 < p.head_dim) {
        const T* from = static_cast<const T*>(p.q) + row_offset(p, t, row_place(p, t, row));
        x[j] = __ldcg(reinterpret_cast<const uint4*>(from + piece * 8));  // L1 may be older
      }
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int i = first + j * kConsumers, row = i / kPieces, piece = i % kPieces;
      x[j].x ^= signs, x[j].y ^= signs, x[j].z ^= signs, x[j].w ^= signs;
      *reinterpret_cast<uint4*>(tiles.shared + piece / 8 * Tiles::kQBox + swizzled(row, piece % 8)) = x[j];
    }
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // products read it
}

// What a consumer warpgroup does with its tiles.
template <class T, int kDims, int kRowGroups>
struct Consumer {
  using Tiles = WgmmaTiles<kDims, kRowGroups>;
  static constexpr int kGroups = Tiles::kPositions / 8, kSteps = Tiles::kPositions / 16;
  static constexpr int kTurns = kConsumerGroups / kRowGroups;  // warpgroups that take tiles in turn

  const AppendAttentionParams& p;
  const RowTile& t;
  const Tiles& tiles;
  const ScoreScale& scale;
  int group;                // of the warpgroups
  float acc[kDims / 8][4];  // weighted sums

  __device__ __forceinline__ static uint32_t parity(int tile) { return tile / Tiles::kStages % 2; }
  __device__ __forceinline__ void release(uint32_t barrier) const {
    if (threadIdx.x % kWarpSize == 0) barrier_arrive(barrier);
  }

  // Starts the scores of a tile.
  __device__ __forceinline__ void start_scores(float (&s)[kGroups][4], int tile) {
    const int stage = tile % Tiles::kStages, row = kRowGroups == 2 ? group * 64 : 0;
    barrier_wait(tiles.k_full(stage), parity(tile));
    const uint64_t q = wgmma_operand(shared_address(tiles.shared) + row * 128),
                   k = wgmma_operand(shared_address(tiles.k(stage)));
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < kDims / 16; ++step) {
      const int box = step / 4, within = step % 4 * 32;
      wgmma_shared<T>(s, q + ((box * Tiles::kQBox + within) >> 4), k + ((box * Tiles::kBox + within) >> 4),
                      step > 0);
    }
    wgmma_commit();
  }

  // Starts the sums of a tile.
  __device__ __forceinline__ void start_sums(const uint32_t (&weights)[kSteps][4], int tile) {
    const int stage = tile % Tiles::kStages;
    barrier_wait(tiles.v_full(stage), parity(tile));
    clear_behind(tile, stage);
    const uint64_t v = wgmma_operand(shared_address(tiles.v(stage)), Tiles::kBox);
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint64_t rows = v + (step * 16 * 128 >> 4);
      if constexpr (kDims <= 128) {
        wgmma_registers<T, kDims / 8>(acc, weights[step], rows);
      } else {
#pragma unroll
        for (int half = 0; half < kDims / 128; ++half)
          wgmma_registers<T, 16>(acc + half * 16, weights[step], rows + (half * 2 * Tiles::kBox >> 4));
      }
    }
    wgmma_commit();
  }

  // Slots behind the last position may hold anything, and zero times that has to be zero.
  __device__ __forceinline__ void clear_behind(int tile, int stage) const {
    const int present = t.seq_len - (t.begin + tile * Tiles::kPositions);
    if (present >= Tiles::kPositions) return;
    constexpr int kPieces = Tiles::kPositions * 8;
    for (int i = threadIdx.x % kGroupThreads; i < Tiles::kBoxes * kPieces; i += kGroupThreads) {
      if (i % kPieces / 8 >= present)
        *reinterpret_cast<uint4*>(tiles.v(stage) + i * 16) = make_uint4(0, 0, 0, 0);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // products read the zeros
    sync_some(2 + group, kGroupThreads);                          // everybody's zeros
  }

  __device__ __forceinline__ void run(OnlineSoftmax<kGroups>& softmax, int count) {
    float scores[kGroups][4], shrink[2];
    uint32_t weights[kSteps][4];
#pragma unroll
    for (int n = 0; n < kDims / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[n][i] = 0.f;
    int tile = kTurns == 1 ? 0 : group;
    if (tile >= count) return;
    wgmma_touch(scores);
    start_scores(scores, tile);
    wgmma_wait<0>();
    wgmma_touch(scores);
    release(tiles.k_free(tile % Tiles::kStages));
    softmax.step(scores, shrink, scale, t, t.begin + tile * Tiles::kPositions);
    pack_weights<T>(scores, weights);
#pragma unroll 1
    for (int next = tile + kTurns; next < count; tile = next, next += kTurns) {
      wgmma_touch(scores);
      wgmma_touch(acc);
      start_scores(scores, next);
      start_sums(weights, tile);
      wgmma_wait<1>();
      wgmma_touch(scores);
      release(tiles.k_free(next % Tiles::kStages));
      const bool grew = softmax.step(scores, shrink, scale, t, t.begin + next * Tiles::kPositions);
      wgmma_wait<0>();
      wgmma_touch(acc);
      release(tiles.v_free(tile % Tiles::kStages));
      pack_weights<T>(scores, weights);
      if (grew) {  // rarely after the first tiles
#pragma unroll
        for (int n = 0; n < kDims / 8; ++n) {
          acc[n][0] *= shrink[0], acc[n][1] *= shrink[0];
          acc[n][2] *= shrink[1], acc[n][3] *= shrink[1];
        }
      }
    }
    wgmma_touch(acc);
    start_sums(weights, tile);
    wgmma_wait<0>();
    wgmma_touch(acc);
  }
};

#endif  // HF_FASTPATH_WGMMA

template <class T, int kDims, int kRowGroups>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    append_attention_wgmma_kernel(const __grid_constant__ AppendAttentionParams p, AppendAttentionPlan plan,
                                  const __grid_constant__ CUtensorMap k_map,
                                  const __grid_constant__ CUtensorMap v_map) {
#if HF_FASTPATH_WGMMA
  using Tiles = WgmmaTiles<kDims, kRowGroups>;
  extern __shared__ char unaligned[];
  allow_next_kernel();
  const Tiles tiles{unaligned + (1024 - shared_address(unaligned) % 1024) % 1024};
  const RowTile t = block_row_tile(p, plan);
  const ClusterPlace place;
  if (t.split - place.rank >= t.active) return;  // nobody in the cluster has work
  const int warp = threadIdx.x / kWarpSize;
  const int count = max(t.stop - t.begin + Tiles::kPositions - 1, 0) / Tiles::kPositions;

  if (threadIdx.x < Tiles::kStages) {
    const int stage = threadIdx.x;
    constexpr int kReaders = kGroupThreads / kWarpSize * kRowGroups;  // warps
    barrier_init(tiles.k_full(stage), 1), barrier_init(tiles.v_full(stage), 1);
    barrier_init(tiles.k_free(stage), kReaders), barrier_init(tiles.v_free(stage), kReaders);
    barrier_init_done();
  }
  __syncthreads();  // barriers
  if (warp >= kConsumers / kWarpSize) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCopierRegisters));
    if (warp == kConsumers / kWarpSize) copy_tiles(p, t, tiles, count, k_map, v_map);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));

  const ScoreScale scale(p);
  const int group = threadIdx.x / kGroupThreads;
  const int row = (kRowGroups == 2 ? warp : warp % 4) * 16 + threadIdx.x % kWarpSize / 4;
  const typename Tiles::BlockResults results{reinterpret_cast<float*>(tiles.shared)};
  wait_for_previous_kernel();  // q, and whoever else uses output and workspace
  if (t.split < t.active) {
    load_q<T, kDims>(p, t, tiles, scale.negates);
    sync_some(1, kConsumers);  // q
    OnlineSoftmax<Tiles::kPositions / 8> softmax(p, t, row);
    Consumer<T, kDims, kRowGroups> consumer{p, t, tiles, scale, group};
    consumer.run(softmax, count);
    sync_some(1, kConsumers);  // q and tiles have been read
    results.put(kRowGroups == 2 ? 0 : group, row, consumer.acc, softmax, scale);
  }
  finish<T, Tiles::kRows, kDims, kConsumerGroups / kRowGroups, kConsumers>(p, plan, t, results, 1);
#endif
}

template <class T, int kDims, int kRowGroups>
void launch_wgmma(const AppendAttentionParams& p, const AppendAttentionPlan& plan, cudaStream_t stream) {
  using Tiles = WgmmaTiles<kDims, kRowGroups>;
  const auto kernel = append_attention_wgmma_kernel<T, kDims, kRowGroups>;
  const int row_tiles = (rows_per_kv_head(p) + Tiles::kRows - 1) / Tiles::kRows;
  const dim3 grid(plan.splits, p.num_kv_heads * row_tiles, p.batch), block(kWgmmaThreads);
  const size_t smem_bytes = Tiles::kBytes;
  const uint64_t row_bytes = uint64_t(p.head_dim) * 2, heads = uint64_t(p.batch) * p.num_kv_heads,
                 capacity = p.capacity;
  const TensorTiles shape{
      std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      CU_TENSOR_MAP_SWIZZLE_128B,
      {uint64_t(p.head_dim), capacity, heads},
      {row_bytes, capacity * row_bytes},
      {64, Tiles::kPositions, 1}};
  allow_shared_memory(kernel, smem_bytes);
  HF_FASTPATH_CUDA_CHECK(launch_clusters(kernel, grid, block, smem_bytes, stream, p.programmatic_launch,
                                         plan.cluster, p, plan, tensor_map(p.k_cache, shape),
                                         tensor_map(p.v_cache, shape)));
}

template <class T, int kDims>
void launch_wgmma_rows(const AppendAttentionParams& p, const AppendAttentionPlan& plan, cudaStream_t stream) {
  if (plan.rows == 64) return launch_wgmma<T, kDims, 1>(p, plan, stream);
  launch_wgmma<T, kDims, 2>(p, plan, stream);
}

template <class T>
void launch_wgmma_typed(const AppendAttentionParams& p, const AppendAttentionPlan& plan,
                        cudaStream_t stream) {
  if (p.head_dim <= 64) return launch_wgmma_rows<T, 64>(p, plan, stream);
  if (p.head_dim <= 80) return launch_wgmma_rows<T, 80>(p, plan, stream);
  if (p.head_dim <= 96) return launch_wgmma_rows<T, 96>(p, plan, stream);
  if (p.head_dim <= 128) return launch_wgmma_rows<T, 128>(p, plan, stream);
  launch_wgmma_rows<T, 256>(p, plan, stream);
}

}  // namespace append
}  // namespace hf_fastpath
