// What: the outputs of append_attention out of the partial results that clusters of blocks have left in the
//   workspace.
// Work split: a warp a row; lanes own fours of dims and ask for many clusters' at once.
// Traffic: rows * clusters * (head_dim + 2) * 4 bytes, from L2 where the kernel in front has just put them,
// and the
//   output.
// Roofline: how far L2 is, twice: a launch that overlaps with that kernel's end, and one round of reads.
#include "append_attention/finish.cuh"

namespace hf_fastpath {
namespace append {
namespace {

constexpr int kMergeWarps = 4;
constexpr int kMergeBatch = 16;  // results of a row on their way

// Results of clusters; `first`: index of the tile's first row.
struct PartialSource {
  const Partials& partials;
  uint64_t first;
  int head_dim;

  __device__ __forceinline__ float2 max_sum(int row, int i) const {
    return __ldcg(partials.max_sums + (first + row) * partials.groups + i);
  }
  __device__ __forceinline__ float4 output(int row, int i, int d) const {
    const float* from = partials.outputs + ((first + row) * partials.groups + i) * head_dim + d;
    return __ldcg(reinterpret_cast<const float4*>(from));
  }
};

template <class T, int kDims>
__global__ void __launch_bounds__(kMergeWarps* kWarpSize, 1)
    append_attention_merge_kernel(AppendAttentionParams p, AppendAttentionPlan plan) {
  const int unit = blockIdx.y, row = blockIdx.x * kMergeWarps + threadIdx.x / kWarpSize;
  allow_next_kernel();
  const RowTile t = find_row_tile(p, plan, unit, 0);  // lengths were final before the kernel in front started
  wait_for_previous_kernel();
  if (row >= t.rows) return;
  const Partials partials(p, plan);
  const int present = (t.active + plan.cluster - 1) / plan.cluster;
  const PartialSource source{partials, uint64_t(unit) * plan.rows, p.head_dim};
  const auto store = [&](int, float max, float sum, const float4(&out)[(kDims + 127) / 128]) {
    store_row<T>(p, t, row, max, sum, out);
  };
  const int warp = threadIdx.x / kWarpSize;
  merge_rows<kDims, kMergeWarps, 1, kMergeBatch>(row - warp, row + 1, present, p.head_dim, source, store);
}

template <class T, int kDims>
void launch(const AppendAttentionParams& p, const AppendAttentionPlan& plan, cudaStream_t stream) {
  const int most_rows = rows_per_kv_head(p) < plan.rows ? rows_per_kv_head(p) : plan.rows;
  const dim3 grid((most_rows + kMergeWarps - 1) / kMergeWarps, plan.units), block(kMergeWarps * kWarpSize);
  HF_FASTPATH_CUDA_CHECK(
      launch_clusters(append_attention_merge_kernel<T, kDims>, grid, block, 0, stream, true, 1, p, plan));
}

template <class T>
void launch_typed(const AppendAttentionParams& p, const AppendAttentionPlan& plan, cudaStream_t stream) {
  return p.head_dim <= 128 ? launch<T, 128>(p, plan, stream) : launch<T, 256>(p, plan, stream);
}

}  // namespace
}  // namespace append

void launch_append_attention_merge(const AppendAttentionParams& params, const AppendAttentionPlan& plan,
                                   cudaStream_t stream) {
  if (params.dtype == DType::kFloat16) return append::launch_typed<__half>(params, plan, stream);
  append::launch_typed<__nv_bfloat16>(params, plan, stream);
}

}  // namespace hf_fastpath
