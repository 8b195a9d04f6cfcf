// What: the products of gemv_rows.cuh for 2 to 16 x rows in float16 or bfloat16, on tensor cores.
// Work split: a warp takes kTiles tiles of 16 output features (gate and up tile of the same features when
//   gated) as the M side of mma.m16n8k16 and kXTiles * 8 x rows as its N side; `warps_per_tile` warps of a
//   block split k, interleaved, and merge through shared memory in warp order. A product does not care in
//   which order k runs, as long as both operands agree, so a lane loads 16 contiguous bytes of a row and
//   feeds two mma with them: weights go from device memory to the tensor cores without shared memory or
//   shuffles. x comes through L1.
// Traffic: n * k * sizeof(T) (twice that when gated) once, plus m * k * sizeof(T) of x a tile out of L1 and
//   L2.
// Roofline: read bandwidth. float16, 4096 to 28672: 86 % of it for 2 x rows, 83 % for 8, 80 % for 16; 4096 to
//   4096: 63, 61 and 58 % (H200, 2026-11).

#include "common/cuda_check.cuh"
#include "common/mma.cuh"
#include "gemv/gemv_device.cuh"

namespace hf_fastpath {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kMmaRows = 16;    // output features of a tile: M of the mma
constexpr int kXRows = 8;       // x rows of a tile: N of the mma
constexpr int kStepElems = 32;  // elements of k a warp's load covers: 4 lanes of 16 bytes a row, two mma
constexpr int kUnroll = 2;      // steps in flight a warp: 4 * kUnroll weight loads a lane for two tiles
constexpr int kWantedWarpsPerSm = 16;
// Blocks an SM should hold: 128 registers a thread suffice, except for two weights and two x tiles.
template <int kXTiles, bool kGated>
constexpr int kMinBlocks = kXTiles == 2 && kGated ? 1 : 2;

// Where an output of a block comes from: its tile, the feature in the tile and the x row; and its feature in
// all.
struct Place {
  int tile, feature, m, n;
};

template <class T, int kTiles, int kXTiles, bool kGated>
__global__ void __launch_bounds__(kThreads, kMinBlocks<kXTiles, kGated>)
    gemv_mma_kernel(GemvParams p, int warps_per_tile) {
  using C = Chunk<T, kVecElems<T>>;
  static_assert(!kGated || kTiles == 2, "gated: one tile of gate, one of up");
  constexpr int kFeatureTiles = kGated ? 1 : kTiles;  // tiles of different features
  constexpr int kColumns = kXTiles * kXRows;
  __shared__ float sums[kWarps][kTiles * kMmaRows][kColumns + 1];  // + 1: rows start in different banks

  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int quad = lane / 4, quarter = lane % 4;  // row within half a tile; 16-byte piece of the 64-byte step
  const int part_of_k = warp % warps_per_tile;
  const int tiles_per_block = kWarps / warps_per_tile;
  const int first_row = (blockIdx.x * tiles_per_block + warp / warps_per_tile) * (kFeatureTiles * kMmaRows);

  const T* weight[kTiles][2];  // rows `quad` and `quad + 8` of each tile
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int n = first_row + (kGated ? 0 : t * kMmaRows) + h * 8 + quad;
      weight[t][h] = weight_row<T, kGated>(p, min(n, p.n - 1), t);
    }
  const T* x[kXTiles];
  bool has_x[kXTiles];
#pragma unroll
  for (int t = 0; t < kXTiles; ++t) {
    has_x[t] = t * kXRows + quad < p.m;
    x[t] = static_cast<const T*>(p.x) + (has_x[t] ? t * kXRows + quad : 0) * p.k;
  }

  const int k = static_cast<int>(p.k);
  int base = part_of_k * kUnroll * kStepElems;
  const int step = warps_per_tile * kUnroll * kStepElems;
  uint4 raw[kUnroll][kTiles][2], xs[kUnroll][kXTiles];
  const auto load = [&](int u, int from) {
    const int at = from + u * kStepElems + quarter * kVecElems<T>;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int h = 0; h < 2; ++h) raw[u][t][h] = at < k ? C::load_streaming(weight[t][h] + at) : C::zero();
    // x as far ahead as the weights: L1 answers in order, so a load issued late waits for all weights before
    // it.
#pragma unroll
    for (int t = 0; t < kXTiles; ++t)
      xs[u][t] = has_x[t] && at < k ? C::load_shared_line(x[t] + at) : C::zero();
  };
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) load(u, base);

  // The block's outputs, neighbors in n to neighboring threads; most threads have one, whose addends are
  // loaded now.
  constexpr int kFeatures = kFeatureTiles * kMmaRows;
  const int outputs = tiles_per_block * kFeatures * p.m;
  const auto place = [&](int i) {
    const int feature = i % kFeatures, tile = i / kFeatures % tiles_per_block,
              m = i / kFeatures / tiles_per_block;
    return Place{tile, feature, m, int(blockIdx.x * tiles_per_block + tile) * kFeatures + feature};
  };
  constexpr bool kEarlyAddends = !kGated && kXTiles == 1;  // more x rows leave no registers for it
  Addends<T> addends;
  if (kEarlyAddends && int(threadIdx.x) < outputs) {
    const auto [tile, feature, m, n] = place(threadIdx.x);
    if (n < p.n) addends = load_addends<T>(p, m, n);
  }

  float c[kTiles][kXTiles][4] = {};
#pragma unroll 1
  for (; base < k; base += step) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const uint4 low = raw[u][t][0], high = raw[u][t][1];
#pragma unroll
        for (int xt = 0; xt < kXTiles; ++xt) {
          mma<T>(c[t][xt], low.x, high.x, low.y, high.y, xs[u][xt].x, xs[u][xt].y);
          mma<T>(c[t][xt], low.z, high.z, low.w, high.w, xs[u][xt].z, xs[u][xt].w);
        }
      }
      load(u, base + step);
    }
  }

#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int xt = 0; xt < kXTiles; ++xt)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[warp][t * kMmaRows + (i / 2) * 8 + quad][xt * kXRows + quarter * 2 + i % 2] = c[t][xt][i];
      }
  __syncthreads();  // every warp's sums

  for (int i = threadIdx.x; i < outputs; i += kThreads) {
    const auto [tile, feature, m, n] = place(i);
    if (n >= p.n) continue;
    float dot = 0.f, up = 0.f;
#pragma unroll  // all loads at once; a missing warp adds nothing
    for (int w = 0; w < kWarps; ++w) {
      if (w < warps_per_tile) {
        dot += sums[tile * warps_per_tile + w][feature][m];
        if (kGated) up += sums[tile * warps_per_tile + w][(kTiles - 1) * kMmaRows + feature][m];
      }
    }
    if (kGated) {
      finish_gated<T>(p, m, n, dot, up);
    } else {
      finish<T>(p, m, n, dot, kEarlyAddends && i < kThreads ? addends : load_addends<T>(p, m, n));
    }
  }
}

template <class T, int kTiles, int kXTiles, bool kGated>
void launch(const GemvParams& p, cudaStream_t stream) {
  constexpr int kFeatures = kGated ? kMmaRows : kTiles * kMmaRows;
  const int tiles = (p.n + kFeatures - 1) / kFeatures;
  const int64_t wanted = int64_t(multiprocessor_count()) * kWantedWarpsPerSm;
  int warps_per_tile = 1;
  while (warps_per_tile < kWarps && int64_t(tiles) * warps_per_tile < wanted) warps_per_tile *= 2;
  const int tiles_per_block = kWarps / warps_per_tile;
  const dim3 grid((tiles + tiles_per_block - 1) / tiles_per_block), block(kThreads);
  const size_t smem_bytes = 0;
  gemv_mma_kernel<T, kTiles, kXTiles, kGated><<<grid, block, smem_bytes, stream>>>(p, warps_per_tile);
  HF_FASTPATH_CUDA_CHECK(cudaGetLastError());
}

template <class T>
void launch_typed(const GemvParams& p, cudaStream_t stream) {
  if (p.gated) {
    if (p.m <= kXRows) return launch<T, 2, 1, true>(p, stream);
    return launch<T, 2, 2, true>(p, stream);
  }
  // Two tiles a warp halve the reads of x; one tile gives small matrices twice the warps.
  const bool large = p.n >= int64_t(multiprocessor_count()) * 2 * kMmaRows;
  if (large) {
    if (p.m <= kXRows) return launch<T, 2, 1, false>(p, stream);
    return launch<T, 2, 2, false>(p, stream);
  }
  if (p.m <= kXRows) return launch<T, 1, 1, false>(p, stream);
  return launch<T, 1, 2, false>(p, stream);
}

}  // namespace

void launch_gemv_mma(const GemvParams& params, cudaStream_t stream) {
  if (params.dtype == DType::kFloat16) return launch_typed<__half>(params, stream);
  launch_typed<__nv_bfloat16>(params, stream);
}

}  // namespace hf_fastpath
