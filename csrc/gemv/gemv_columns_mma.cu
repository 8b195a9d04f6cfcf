// What: x rows times float16 or bfloat16 weights stored [k, n] (Conv1D) on tensor cores, with bias,
//   activation and residual.
// Work split: a block takes kColumns neighboring outputs, a warp 32 rows of k at a time; see gemv_columns.cuh
//   for the split of k over a cluster. x is the B operand. A lane loads 16 bytes of each of 8 weight rows and
//   pairs the rows by byte permutes into A operands, so that a warp's load covers whole 128-byte lines of 4
//   rows and nothing passes through shared memory. Eight loads in flight a lane, replaced as they are used.
// Traffic: n * k * sizeof(T) once, plus x per SM out of L2.
// Roofline: read bandwidth for large weights, launch and memory latency at GPT-2's sizes. float16, one x row:
//   83 % of read bandwidth for 4096 to 16384, 15 % for 768 to 2304, 19 % for 3072 to 768 (H200, 2026-11).

#include "common/mma.cuh"
#include "gemv/gemv_columns.cuh"

namespace hf_fastpath {
namespace {

constexpr int kElems = 8;      // of a 16-byte load
constexpr int kColumns = 64;   // 8 lanes of 16 bytes: one line of a weight row
constexpr int kStepRows = 32;  // rows of a warp's step: 4 lanes of 8
constexpr int kXRows = 8;      // x rows of a B operand

// kHalves: 1 for at most 8 rows of x, 2 for at most 16.
template <class T, int kHalves>
__global__ void __launch_bounds__(kColumnThreads, kHalves == 1 ? 2 : 1)
    gemv_columns_mma_kernel(const __grid_constant__ GemvParams p,
                            const __grid_constant__ RopeAppendParams rope,
                            const __grid_constant__ ColumnsPlan plan) {
  using C = Chunk<T, kElems>;
  __shared__ float sums[kColumnWarps][kHalves * kXRows][kColumns];
  __shared__ AppendSlots slots;
  extern __shared__ __align__(16) char shared[];

  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int g = lane / 4, q = lane % 4;        // as in common/mma.cuh
  const int rank = blockIdx.x % plan.cluster;  // blocks of a cluster are neighbors in the grid
  const int first_column = blockIdx.x / plan.cluster * kColumns;
  const int column = first_column + g * kElems;
  const bool has_column = column < p.n;  // n is a multiple of kElems here
  const int64_t stride = p.segments[0].stride;
  const T* weight = static_cast<const T*>(p.segments[0].weight) + (has_column ? column : 0);

  allow_next_kernel();
  if (plan.cluster > 1) arrive_cluster();
  const RowRange range = row_range(p.k, rank, plan.cluster);  // multiples of kElems
  int row = range.begin + warp * kStepRows + q * kElems;

  const NormedX<T> normed(p, shared);
  uint4 raw[kElems], x_raw[kHalves];
  const auto load = [&](int i, int from) {
    raw[i] = has_column && from < range.end ? C::load_streaming(weight + (from + i) * stride) : C::zero();
  };
  const auto load_x = [&](int from) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const int m = h * kXRows + g;
      if (m >= p.m || from >= range.end) {
        x_raw[h] = C::zero();
      } else if (normed.rows) {
        x_raw[h] = *reinterpret_cast<const uint4*>(normed.at(m, from));
      } else {
        x_raw[h] = C::load_l2(static_cast<const T*>(p.x) + m * p.k + from);
      }
    }
  };
#pragma unroll
  for (int i = 0; i < kElems; ++i) load(i, row);
  normed.load_parameters(p.norm);
  if (plan.append) find_slots(rope, p.m, slots);

  wait_for_previous_kernel();
  const auto addends = load_column_addends<T, kHalves * kXRows, kColumns>(p, rank, first_column);
  normed.load(p);
  load_x(row);

  float c[kElems / 2][kHalves][4] = {};  // [pair of the lane's eight columns][x rows 0 to 7, 8 to 15]
#pragma unroll 1
  for (; row - q * kElems < range.end; row += kColumnWarps * kStepRows) {
    const int next = row + kColumnWarps * kStepRows;
    uint4 x_now[kHalves];
#pragma unroll
    for (int h = 0; h < kHalves; ++h) x_now[h] = x_raw[h];
    load_x(next);
#pragma unroll
    for (int s = 0; s < 2; ++s) {  // four rows a lane each
      uint32_t words[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 v = raw[4 * s + i];
        words[i][0] = v.x, words[i][1] = v.y, words[i][2] = v.z, words[i][3] = v.w;
      }
#pragma unroll
      for (int w = 0; w < kElems / 2; ++w)
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          const uint32_t b0 = s == 0 ? x_now[h].x : x_now[h].z, b1 = s == 0 ? x_now[h].y : x_now[h].w;
          mma_columns<T>(c[w][h], words[0][w], words[1][w], words[2][w], words[3][w], b0, b1);
        }
#pragma unroll
      for (int i = 0; i < 4; ++i) load(4 * s + i, next);
    }
  }

#pragma unroll
  for (int w = 0; w < kElems / 2; ++w)
#pragma unroll
    for (int h = 0; h < kHalves; ++h)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[warp][h * kXRows + 2 * q + i % 2][g * kElems + 2 * w + i / 2] = c[w][h][i];
      }
  merge_columns<T>(p, sums, addends, rope, slots, plan, rank, first_column);
  trace(TracePoint::kEnd);
}

template <class T, int kHalves>
void launch(const GemvParams& p, const RopeAppendParams* rope, cudaStream_t stream) {
  const int column_blocks = (p.n + kColumns - 1) / kColumns;
  const int cluster = choose_cluster(p, column_blocks, kClusterLimit<kHalves * kXRows, kColumns>);
  launch_columns_kernel<T>(gemv_columns_mma_kernel<T, kHalves>, p, rope, column_blocks, cluster, stream);
}

template <class T>
void launch_typed(const GemvParams& p, const RopeAppendParams* rope, cudaStream_t stream) {
  if (p.m <= kXRows) return launch<T, 1>(p, rope, stream);
  launch<T, 2>(p, rope, stream);
}

}  // namespace

void launch_gemv_columns_mma(const GemvParams& params, const RopeAppendParams* rope, cudaStream_t stream) {
  if (params.dtype == DType::kFloat16) return launch_typed<__half>(params, rope, stream);
  launch_typed<__nv_bfloat16>(params, rope, stream);
}

}  // namespace hf_fastpath
