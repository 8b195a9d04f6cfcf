// What: append_attention on the tensor cores of any device from sm_80 on. Scores, softmax and sums are
// float32;
//   the weights of V are rounded to 16 bits, as in every flash attention.
// Work split: grid (splits, KV heads * tiles of rows, batch rows); see row_tile.cuh for rows and positions,
//   finish.cuh for the merge. A block's four warps share tiles of K and V in shared memory, two at a time,
//   which all of them ask for by asynchronous copies. kRowWarps of them have 16 rows each; the others take
//   further positions of the same rows.
// Traffic: 2 * positions * head_dim * 2 bytes a tile of rows (tiles of a KV head run side by side and share
//   them in L2), q and the output, plus partial results of the splits through L2.
// Roofline: read bandwidth for few rows, tensor cores and shared memory for many. Over 16384 positions, 32/8
//   heads of 128: 53 % of read bandwidth for 2 tokens, 254 TFLOP/s for 512 (H200, 2026-11).
#pragma once

#include "append_attention/finish.cuh"
#include "append_attention/row_tile.cuh"
#include "common/async.cuh"
#include "common/mma.cuh"

namespace hf_fastpath {
namespace append {

constexpr int kMmaWarps = 4, kMmaThreads = kMmaWarps * kWarpSize;

// Shared memory of a block: q, then two stages of K and V; rows padded so that eight of them meet in no bank.
template <int kDims, int kRowWarps>
struct MmaTiles {
  static constexpr int kRows = 16 * kRowWarps, kPositionWarps = kMmaWarps / kRowWarps;
  static constexpr int kPositions = mma_positions(kDims), kOfWarp = kPositions / kPositionWarps;
  static constexpr int kStride = kDims * 2 + 16, kTileBytes = kPositions * kStride;
  static constexpr int kBytes = kRows * kStride + 4 * kTileBytes;
  using BlockResults = Results<kRows, kDims, kPositionWarps>;
  static_assert(kOfWarp % 16 == 0, "a warp's positions are steps of the second product");
  static_assert(BlockResults::kBytes <= kBytes, "results replace q and tiles");

  char* shared;

  __device__ __forceinline__ char* k(int stage) const {
    return shared + kRows * kStride + stage * 2 * kTileBytes;
  }
  __device__ __forceinline__ char* v(int stage) const { return k(stage) + kTileBytes; }
};

// Four matrices of 8 rows of 16 bytes, of which every lane gives a row's address; as they lie, or transposed.
__device__ __forceinline__ void load_matrices(uint32_t (&m)[4], const char* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void load_transposed(uint32_t (&m)[4], const char* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared_address(row))
               : "memory");
}

// Asks for a tile of K and V, zeros where there is nothing.
template <int kDims, class Tiles>
__device__ __forceinline__ void fetch_tile(const AppendAttentionParams& p, const RowTile& t,
                                           const Tiles& tiles, int tile, int count) {
  if (tile < count) {
    constexpr int kPieces = kDims / 8;  // of 16 bytes, a row
    const int base = t.begin + tile * Tiles::kPositions, stage = tile % 2;
    const uint64_t head = uint64_t(t.batch_row * p.num_kv_heads + t.kv_head) * p.capacity;
    for (int i = threadIdx.x; i < Tiles::kPositions * kPieces; i += kMmaThreads) {
      const int row = i / kPieces, piece = i % kPieces;
      const bool present = base + row < t.seq_len && piece * 8 < p.head_dim;
      const uint64_t from = present ? ((head + base + row) * p.head_dim + piece * 8) * 2 : 0;
      const int to = row * Tiles::kStride + piece * 16;
      copy_async(tiles.k(stage) + to, static_cast<const char*>(p.k_cache) + from, present);
      copy_async(tiles.v(stage) + to, static_cast<const char*>(p.v_cache) + from, present);
    }
  }
  commit_copies();
}

template <class T, int kDims, int kRowWarps>
__global__ void __launch_bounds__(kMmaThreads, kDims > 128 ? 1 : 2)
    append_attention_mma_kernel(AppendAttentionParams p, AppendAttentionPlan plan) {
  using Tiles = MmaTiles<kDims, kRowWarps>;
  constexpr int kGroups = Tiles::kOfWarp / 8, kSteps = Tiles::kOfWarp / 16;
  extern __shared__ __align__(128) char shared[];
  allow_next_kernel();
  wait_for_previous_kernel();
  const Tiles tiles{shared};
  const RowTile t = block_row_tile(p, plan);
  if (t.split >= t.active) return;
  const int count = max(t.stop - t.begin + Tiles::kPositions - 1, 0) / Tiles::kPositions;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int first_row = warp % kRowWarps * 16, first_position = warp / kRowWarps * Tiles::kOfWarp;
  const ScoreScale scale(p);

  fetch_tile<kDims>(p, t, tiles, 0, count);
  fetch_tile<kDims>(p, t, tiles, 1, count);
  constexpr int kPieces = kDims / 8;
  const uint32_t signs = scale.negates ? 0x80008000u : 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < Tiles::kRows * kPieces; i += kMmaThreads) {
    const int row = i / kPieces, piece = i % kPieces;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (row < t.rows && piece * 8 < p.head_dim) {
      const T* from = static_cast<const T*>(p.q) + row_offset(p, t, row_place(p, t, row));
      x = __ldcg(reinterpret_cast<const uint4*>(from + piece * 8));  // L1 may be older
      x.x ^= signs, x.y ^= signs, x.z ^= signs, x.w ^= signs;
    }
    *reinterpret_cast<uint4*>(tiles.shared + row * Tiles::kStride + piece * 16) = x;
  }

  OnlineSoftmax<kGroups> softmax(p, t, first_row + lane / 4);
  float acc[kDims / 8][4] = {};
  // Rows of matrices that a lane gives the addresses of: of q, rows then pieces; of K, pieces of 8 positions;
  // of V, positions then pieces.
  const char* q_at = tiles.shared + (first_row + lane % 16) * Tiles::kStride + lane / 16 * 16;
  const int k_at = (first_position + lane / 16 * 8 + lane % 8) * Tiles::kStride + lane / 8 % 2 * 16;
  const int v_at = (first_position + lane % 16) * Tiles::kStride + lane / 16 * 16;
#pragma unroll 1
  for (int tile = 0; tile < count; ++tile) {
    const int stage = tile % 2, base = t.begin + tile * Tiles::kPositions + first_position;
    wait_for_copies<1>();
    __syncthreads();  // everybody's copies; the first time, q
    float scores[kGroups][4] = {};
#pragma unroll
    for (int step = 0; step < kDims / 16; ++step) {
      uint32_t a[4];
      load_matrices(a, q_at + step * 32);
#pragma unroll
      for (int n = 0; n < kGroups; n += 2) {
        uint32_t b[4];
        load_matrices(b, tiles.k(stage) + k_at + n * 8 * Tiles::kStride + step * 32);
        mma<T>(scores[n], a[0], a[1], a[2], a[3], b[0], b[1]);
        mma<T>(scores[n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
    }
    float shrink[2];
    if (softmax.step(scores, shrink, scale, t, base)) {  // rarely after the first tiles
#pragma unroll
      for (int n = 0; n < kDims / 8; ++n) {
        acc[n][0] *= shrink[0], acc[n][1] *= shrink[0];
        acc[n][2] *= shrink[1], acc[n][3] *= shrink[1];
      }
    }
    uint32_t weights[kSteps][4];
    pack_weights<T>(scores, weights);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int n = 0; n < kDims / 8; n += 2) {
        uint32_t b[4];
        load_transposed(b, tiles.v(stage) + v_at + step * 16 * Tiles::kStride + n * 16);
        mma<T>(acc[n], weights[step][0], weights[step][1], weights[step][2], weights[step][3], b[0], b[1]);
        mma<T>(acc[n + 1], weights[step][0], weights[step][1], weights[step][2], weights[step][3], b[2],
               b[3]);
      }
    }
    __syncthreads();  // the stage has been read
    fetch_tile<kDims>(p, t, tiles, tile + 2, count);
  }
  wait_for_copies<0>();
  __syncthreads();  // no copy is under way, q and tiles have been read
  const typename Tiles::BlockResults results{reinterpret_cast<float*>(tiles.shared)};
  results.put(warp / kRowWarps, first_row + lane / 4, acc, softmax, scale);
  finish<T, Tiles::kRows, kDims, Tiles::kPositionWarps, kMmaThreads>(p, plan, t, results, 1);
}

template <class T, int kDims, int kRowWarps>
void launch_mma(const AppendAttentionParams& p, const AppendAttentionPlan& plan, cudaStream_t stream) {
  using Tiles = MmaTiles<kDims, kRowWarps>;
  const auto kernel = append_attention_mma_kernel<T, kDims, kRowWarps>;
  const int row_tiles = (rows_per_kv_head(p) + Tiles::kRows - 1) / Tiles::kRows;
  const dim3 grid(plan.splits, p.num_kv_heads * row_tiles, p.batch), block(kMmaThreads);
  const size_t smem_bytes = Tiles::kBytes;
  allow_shared_memory(kernel, smem_bytes);
  HF_FASTPATH_CUDA_CHECK(
      launch_clusters(kernel, grid, block, smem_bytes, stream, p.programmatic_launch, 1, p, plan));
}

template <class T, int kDims>
void launch_mma_rows(const AppendAttentionParams& p, const AppendAttentionPlan& plan, cudaStream_t stream) {
  if (plan.rows == 64) return launch_mma<T, kDims, 4>(p, plan, stream);
  launch_mma<T, kDims, mma_few_rows(kDims) / 16>(p, plan, stream);
}

template <class T>
void launch_mma_typed(const AppendAttentionParams& p, const AppendAttentionPlan& plan, cudaStream_t stream) {
  if (p.head_dim <= 64) return launch_mma_rows<T, 64>(p, plan, stream);
  if (p.head_dim <= 80) return launch_mma_rows<T, 80>(p, plan, stream);
  if (p.head_dim <= 96) return launch_mma_rows<T, 96>(p, plan, stream);
  if (p.head_dim <= 128) return launch_mma_rows<T, 128>(p, plan, stream);
  launch_mma_rows<T, 256>(p, plan, stream);
}

}  // namespace append
}  // namespace hf_fastpath
