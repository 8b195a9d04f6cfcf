// What: softmax(scale * q @ K.T) @ V of 1 to 16 new tokens over the visible positions of a KV cache, in one
//   pass, on tensor cores, for q, K and V in one 16-bit type. Scores, softmax and sums are float32; the
//   weights of V are rounded to 16 bits, as in every flash attention.
// Work split: grid (splits, KV heads * row blocks, batch rows), see split.cuh. A block takes one chunk of
//   positions and 8 or 16 rows, that is queries of the KV head's group of heads; its warps take tiles of 16
//   positions in turn, each through a ring of tiles of its own in shared memory: asynchronous copies keep
//   kStages - 1 to kStages tiles a warp under way without a register, and no warp waits for another. Heads of
//   more than 64 on Hopper come by bulk copies, a tile of K or V each (BulkTiles); others by 16-byte copies,
//   whose pieces of a row are permuted so that reads meet no bank conflicts (CopiedTiles). What is not new is
//   asked for before the kernel in front is complete. For the scores, queries are the A operand and a lane's
//   16 bytes of a K row serve two k-steps; for the outputs, V is the A operand, 16 bytes of each of four rows
//   paired by byte permutes, and the weights of V are the B operand in the very registers where the scores
//   came out.
// Traffic: 2 * positions * head_dim * 2 bytes a KV head and batch row (again from L2 for more than 16 rows),
//   plus splits * rows * (head_dim + 2) * 4 bytes of partial results through L2.
// Roofline: read bandwidth for long caches, memory latency for short ones.

#include "common/async.cuh"
#include "common/mma.cuh"
#include "decode_attention/decode_attention.h"
#include "decode_attention/split.cuh"

namespace hf_fastpath {
namespace {

constexpr int kSharedBytesEverywhere = 99 * 1024;  // that a block may have, from sm_80 on

constexpr int kElems = 8;       // of a 16-byte load
constexpr int kHalfRows = 8;    // rows in each half of the scores, and of a B operand
constexpr int kTile = 16;       // positions: the k side of the second product
constexpr int kTileGroups = 2;  // of 8 positions, the n side of the first product

// Warps of a block with head dims rounded up to kDims, where shared memory holds their tiles; half as many
// else.
template <int kDims>
constexpr int kMostWarps = kDims > 128 ? 4 : 8;
template <int kDims>
constexpr int kStages = kDims > 64 ? 2 : 3;  // tiles of K and V a warp keeps
template <int kDims>
constexpr int kBlocksPerSm = kDims > 64 && kDims <= 128 ? 1 : 2;

// A warp's ring of tiles of K and V; rows are positions.
template <class T, int kDims>
struct WarpTiles {
  static constexpr int kTileBytes = kTile * kDims * 2, kBytes = kStages<kDims> * 2 * kTileBytes;
  char* shared;

  __device__ __forceinline__ char* k(int stage) const { return shared + stage * 2 * kTileBytes; }
  __device__ __forceinline__ char* v(int stage) const { return k(stage) + kTileBytes; }
};

// Tiles that come by asynchronous copies of 16 bytes by all lanes, with zeros where there are no positions or
// dims. Pieces of a row are permuted so that eight lanes that read together meet in no bank: rows r and r + 1
// of K (r even), four pieces each, and two pieces of rows r, r + 2, r + 4, r + 6 of V.
template <class T, int kDims>
struct CopiedTiles : WarpTiles<T, kDims> {
  static constexpr int kRowBytes = kDims * 2;
  int lane;

  __device__ __forceinline__ CopiedTiles(const DecodeAttentionParams&, char* warp_shared, uint64_t*, int lane)
      : WarpTiles<T, kDims>{warp_shared}, lane(lane) {}
  __device__ __forceinline__ int k_at(int row, int piece) const {
    return row * kRowBytes + (piece ^ row % 2 * 4) * 16;
  }
  __device__ __forceinline__ int v_at(int row, int piece) const {
    return row * kRowBytes + (piece ^ (row & 6)) * 16;
  }

  __device__ __forceinline__ void fetch(const DecodeAttentionParams& p, const Split& s, int base, int stage) {
    constexpr int kPieces = kDims / kElems, kRowsAtOnce = kWarpSize / kPieces;
    if (base < s.end) {
      const int piece = lane % kPieces, first = lane / kPieces;
      const uint32_t row_bytes = p.head_dim * int(sizeof(T));
      const int rows = piece * kElems < p.head_dim ? s.end - base : 0;
      const char *from_k = s.k + piece * 16, *from_v = s.v + piece * 16;
#pragma unroll
      for (int j = 0; j < kTile / kRowsAtOnce; ++j) {
        // This row's offset is the sum, without a carry, of those of row `first` and of row `before`.
        const int before = j * kRowsAtOnce, row = before + first;
        const uint64_t at = uint64_t(s.slot(base - s.begin + row)) * row_bytes;
        copy_async(this->k(stage) + (k_at(first, piece) ^ k_at(before, 0)), from_k + at, row < rows);
        copy_async(this->v(stage) + (v_at(first, piece) ^ v_at(before, 0)), from_v + at, row < rows);
      }
    }
    commit_copies();
  }
  __device__ __forceinline__ void wait(const Split&, int, int) const {
    wait_for_copies<kStages<kDims> - 1>();
    __syncwarp();  // every lane's copies
  }
  __device__ __forceinline__ uint4 read(const char* from, bool) const {
    return *reinterpret_cast<const uint4*>(from);
  }
  // This lane has read what it reads of a tile; `sums` comes of all of it.
  __device__ __forceinline__ void done(const DecodeAttentionParams&, uint32_t) const {}
};

#if HF_FASTPATH_HOPPER
// Tiles that come by bulk copies of one lane: rows lie as in the cache. Reads of K meet twice in a bank and
// reads of V four times, which costs less than copies of 16 bytes: with those, memory gives four fifths of
// its bandwidth.
template <class T, int kDims>
struct BulkTiles : WarpTiles<T, kDims> {
  uint32_t full;  // the warp's barriers, one a stage
  int row_bytes, lane;
  uint64_t policy;
  uint32_t parity = 0;

  __device__ __forceinline__ BulkTiles(const DecodeAttentionParams& p, char* warp_shared, uint64_t* barriers,
                                       int lane)
      : WarpTiles<T, kDims>{warp_shared},
        full(shared_address(barriers)),
        row_bytes(p.head_dim * int(sizeof(T))),
        lane(lane),
        policy(read_once_policy()) {
    if (lane < kStages<kDims>) {
      barrier_init(full + 8 * lane, 1);
      barrier_init_done();
    }
    __syncwarp();
  }
  // Offset of a row's 16-byte piece i.
  __device__ __forceinline__ int k_at(int row, int piece) const { return row * row_bytes + piece * 16; }
  __device__ __forceinline__ int v_at(int row, int piece) const { return k_at(row, piece); }

  // Asks for the tile of positions base and following; every lane comes here for every tile.
  __device__ __forceinline__ void fetch(const DecodeAttentionParams&, const Split& s, int base, int stage) {
    const int count = min(kTile, s.end - base);
    if (count <= 0 || !is_elected()) return;
    const uint32_t slot = s.slot(base - s.begin);
    const int before_wrap = min(count, int(s.capacity - slot)) * row_bytes;
    const int wrapped = count * row_bytes - before_wrap;  // from slot 0 on
    const uint32_t barrier = full + 8 * stage;
    barrier_arrive_expect(barrier, 2 * count * row_bytes);
    const auto copy = [&](char* to, const char* from) {
      copy_to_shared(shared_address(to), from + uint64_t(slot) * row_bytes, before_wrap, barrier, policy);
      if (wrapped > 0) copy_to_shared(shared_address(to) + before_wrap, from, wrapped, barrier, policy);
    };
    copy(this->k(stage), s.k);
    copy(this->v(stage), s.v);
  }
  // Waits for it. What follows the last position is zeros in V, which weights of zero are multiplied by.
  __device__ __forceinline__ void wait(const Split& s, int base, int stage) {
    barrier_wait(full + 8 * stage, parity);
    if (stage + 1 == kStages<kDims>) parity ^= 1;
    if (base + kTile <= s.end) return;
    for (int i = (s.end - base) * row_bytes + lane * 16; i < kTile * row_bytes; i += kWarpSize * 16)
      *reinterpret_cast<uint4*>(this->v(stage) + i) = make_uint4(0, 0, 0, 0);
    __syncwarp();  // zeros
  }
  __device__ __forceinline__ void done(const DecodeAttentionParams& p, uint32_t sums) {
    full = behind_reads(full, sums, p.zero);
  }
  __device__ __forceinline__ uint4 read(const char* from, bool present) const {
    return present ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
  }
};

// Short heads are for short caches first, where the copies of lanes start earlier.
template <class T, int kDims>
using Tiles = std::conditional_t<(kDims > 64), BulkTiles<T, kDims>, CopiedTiles<T, kDims>>;
#else
template <class T, int kDims>
using Tiles = CopiedTiles<T, kDims>;
#endif

// kDims: head_dim rounded up to 64, 128 or 256. kHalves: 1 for 8 rows a block, 2 for 16.
template <class T, int kDims, int kHalves, int kWarps>
__global__ void __launch_bounds__(kWarps* kWarpSize, 1) decode_attention_mma_kernel(DecodeAttentionParams p) {
  using C = Chunk<T, kElems>;
  constexpr int kRows = kHalves * kHalfRows, kTilesBytes = WarpTiles<T, kDims>::kBytes;
  constexpr int kPieces = kDims / 32;  // 16-byte pieces of a K row a lane takes: 4 lanes share a row
  constexpr int kBlocks = kDims / 64;  // of 64 dims: 8 lanes share a V row's piece of a block
  constexpr int kStep = kWarps * kTile;
  using Results = WarpResults<kWarps, kDims>;
  static_assert(Results::bytes(kRows) <= kTilesBytes, "a warp's result replaces its tiles");
  extern __shared__ __align__(128) char shared[];  // bulk copies to other addresses are slower

  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int g = lane / 4, q = lane % 4;  // as in common/mma.cuh
  const int batch_row = blockIdx.z, row_block = divide(blockIdx.y, p.num_kv_heads_inverse);
  const int kv_head = blockIdx.y - row_block * p.num_kv_heads;
  const Rows rows{row_block * kRows, kRows};

  allow_next_kernel();
  const Split s = find_split(p, batch_row, kv_head, blockIdx.x, gridDim.x, kStages<kDims> * kStep, sizeof(T));
  if (int(blockIdx.x) >= s.active) return;

  // The first tiles, those with new positions once the kernel in front has appended them.
  __shared__ __align__(8) uint64_t barriers[kWarps][kStages<kDims>];
  Tiles<T, kDims> tiles(p, shared + warp * kTilesBytes, barriers[warp], lane);
  int base = s.begin + warp * kTile;
  bool waited = false;
#pragma unroll 1
  for (int stage = 0; stage < kStages<kDims>; ++stage) {
    const int from = base + stage * kStep;
    if (!waited && min(from + kTile, s.end) > s.seq_len - p.query_len) {
      wait_for_previous_kernel();
      waited = true;
    }
    tiles.fetch(p, s, from, stage);
  }
  if (!waited) wait_for_previous_kernel();

  uint4 queries[kHalves][kPieces];            // in K's order of dims
  int row_first[kHalves], row_last[kHalves];  // positions rows g and g + 8 see
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    const int row = h * kHalfRows + g;
    const RowPlace place = row_place(p, s, kv_head, row < rows.count(p) ? rows.first + row : 0);
    row_last[h] = row < rows.count(p) ? min(s.seq_len - p.query_len + place.token, s.end - 1) : -1;
    row_first[h] = s.first_visible(s.seq_len - p.query_len + place.token, p.window);
    const T* at = static_cast<const T*>(p.q) + out_offset(p, batch_row, place);  // q lies like the output
#pragma unroll
    for (int c = 0; c < kPieces; ++c) {
      const int dim = c * 32 + q * kElems;
      queries[h][c] = row < rows.count(p) && dim < p.head_dim ? C::load_l2(at + dim) : C::zero();
    }
  }

  float max_score[kHalves], sum[kHalves];  // max: of the row; sum: of this lane's positions
  float acc[kBlocks][kElems / 2][kHalves][4] =
      {};  // of dims 64 b + 8 g + 2 w and the next, rows 2 q and the next
#pragma unroll
  for (int h = 0; h < kHalves; ++h) max_score[h] = -INFINITY, sum[h] = 0.f;

  trace(TracePoint::kReady);
  int stage = 0;
#pragma unroll 1
  for (; base < s.end; base += kStep) {
    tiles.wait(s, base, stage);
    const char *k_tile = tiles.k(stage), *v_tile = tiles.v(stage);
    float scores[kTileGroups][4] = {};  // rows g and g + 8 of positions base + 8 t + 2 q and its neighbor
#pragma unroll
    for (int t = 0; t < kTileGroups; ++t)
#pragma unroll
      for (int c = 0; c < kPieces; ++c) {
        const uint4 k =
            tiles.read(k_tile + tiles.k_at(t * 8 + g, c * 4 + q), (c * 4 + q) * kElems < p.head_dim);
        const uint4 upper = queries[0][c];
        const uint4 lower = kHalves > 1 ? queries[kHalves - 1][c] : C::zero();
        mma<T>(scores[t], upper.x, lower.x, upper.y, lower.y, k.x, k.y);
        mma<T>(scores[t], upper.z, lower.z, upper.w, lower.w, k.z, k.w);
      }

    uint32_t weights[kHalves][2];  // the B operand of the second product: the layout scores come in
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      float w[kTileGroups][2];
      float max = max_score[h];
#pragma unroll
      for (int t = 0; t < kTileGroups; ++t)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int position = base + t * 8 + 2 * q + i;
          const bool visible = position <= row_last[h] && position >= row_first[h];
          w[t][i] = visible ? scores[t][2 * h + i] * (p.scale * kLog2e) : -INFINITY;
          max = fmaxf(max, w[t][i]);
        }
      max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, 1));  // the row's four lanes
      max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, 2));
      const float shrink = exp2_below(max_score[h], max);
      if (__any_sync(kAllLanes, max > max_score[h])) {  // rarely after the first steps
        sum[h] *= shrink;
        const float even = __shfl_sync(kAllLanes, shrink, 8 * q),
                    odd = __shfl_sync(kAllLanes, shrink, 8 * q + 4);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
#pragma unroll
          for (int w = 0; w < kElems / 2; ++w) {
            acc[b][w][h][0] *= even, acc[b][w][h][1] *= odd;
            acc[b][w][h][2] *= even, acc[b][w][h][3] *= odd;
          }
      }
      max_score[h] = max;
#pragma unroll
      for (int t = 0; t < kTileGroups; ++t) {
        w[t][0] = exp2_below(w[t][0], max);
        w[t][1] = exp2_below(w[t][1], max);
        sum[h] += w[t][0] + w[t][1];
        weights[h][t] = pack2(w[t][0], w[t][1], T());
      }
    }

#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      uint32_t words[4][4];
#pragma unroll
      for (int t = 0; t < kTileGroups; ++t)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4 v = tiles.read(v_tile + tiles.v_at(t * 8 + 2 * q + i, b * 8 + g),
                                     (b * 8 + g) * kElems < p.head_dim);
          uint32_t (&row)[4] = words[2 * t + i];
          row[0] = v.x, row[1] = v.y, row[2] = v.z, row[3] = v.w;
        }
#pragma unroll
      for (int w = 0; w < kElems / 2; ++w)
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          mma_columns<T>(acc[b][w][h], words[0][w], words[1][w], words[2][w], words[3][w], weights[h][0],
                         weights[h][1]);
        }
    }
    uint32_t sums = 0;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) sums ^= __float_as_uint(acc[b][0][0][0]);
    tiles.done(p, sums);
    __syncwarp();  // every lane has read the tile
    tiles.fetch(p, s, base + kStages<kDims> * kStep, stage);
    stage = stage + 1 == kStages<kDims> ? 0 : stage + 1;
  }

  trace(TracePoint::kSums);
  const Results results{shared, kTilesBytes};
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    const int row = h * kHalfRows + g;
    sum[h] += __shfl_xor_sync(kAllLanes, sum[h], 1);
    sum[h] += __shfl_xor_sync(kAllLanes, sum[h], 2);
    if (q == 0) results.max_sums(warp)[row] = make_float2(max_score[h], sum[h]);
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      float* out = results.outputs(warp) + (h * kHalfRows + 2 * q + odd) * kDims + g * kElems;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int w = 0; w < kElems / 2; ++w) {
          *reinterpret_cast<float2*>(out + b * 64 + 2 * w) =
              make_float2(acc[b][w][h][odd], acc[b][w][h][odd + 2]);
        }
    }
  }
  finish_block<T>(p, s, results, batch_row, kv_head, rows);
  trace(TracePoint::kEnd);
}

template <class T, int kDims, int kHalves, int kWarps>
void launch_warps(const DecodeAttentionParams& p, cudaStream_t stream) {
  const dim3 grid = split_grid(p, kHalves * kHalfRows, kBlocksPerSm<kDims>), block(kWarps * kWarpSize);
  const size_t smem_bytes = kWarps * WarpTiles<T, kDims>::kBytes;
  launch_attention(decode_attention_mma_kernel<T, kDims, kHalves, kWarps>, grid, block, smem_bytes, stream,
                   p);
}

template <class T, int kDims, int kHalves>
void launch(const DecodeAttentionParams& p, cudaStream_t stream) {
  constexpr int kMost = kMostWarps<kDims>, kBytes = kMost * WarpTiles<T, kDims>::kBytes;
  if constexpr (kBytes > kSharedBytesEverywhere) {
    if (kBytes > shared_bytes_of_block()) return launch_warps<T, kDims, kHalves, kMost / 2>(p, stream);
  }
  launch_warps<T, kDims, kHalves, kMost>(p, stream);
}

template <class T>
void launch_typed(const DecodeAttentionParams& p, cudaStream_t stream) {
  const bool few = rows_per_kv_head(p) <= kHalfRows;
  if (p.head_dim <= 64) return few ? launch<T, 64, 1>(p, stream) : launch<T, 64, 2>(p, stream);
  if (p.head_dim <= 128) return few ? launch<T, 128, 1>(p, stream) : launch<T, 128, 2>(p, stream);
  launch<T, 256, 1>(p, stream);  // 16 rows would not fit in registers
}

}  // namespace

void launch_decode_attention_mma(const DecodeAttentionParams& params, cudaStream_t stream) {
  if (params.dtype == DType::kFloat16) return launch_typed<__half>(params, stream);
  launch_typed<__nv_bfloat16>(params, stream);
}

}  // namespace hf_fastpath
