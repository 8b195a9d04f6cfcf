// How a call of append_attention is cut, and which kernel takes it.
#include "append_attention/append_attention.h"
#include "append_attention/row_tile.cuh"
#include "common/async.cuh"
#include "common/cuda_check.cuh"

namespace hf_fastpath {
namespace {

int64_t units_of(const AppendAttentionParams& p, int rows) {
  return int64_t(p.batch) * p.num_kv_heads * ((append::rows_per_kv_head(p) + rows - 1) / rows);
}

int groups_of(const AppendAttentionPlan& plan) { return plan.splits / plan.cluster; }

}  // namespace

AppendAttentionPlan plan_append_attention(const AppendAttentionParams& p) {
  AppendAttentionPlan plan{};
  plan.uses_wgmma = true;
  plan.rows = append::rows_per_kv_head(p) <= 64 ? 64 : 128;
  plan.splits = plan.cluster = 1;
  return plan;
}

int64_t append_attention_counter_bytes(const AppendAttentionParams& p, const AppendAttentionPlan& plan) {
  return groups_of(plan) == 1 ? 0 : units_of(p, plan.rows) * plan.cluster * int64_t(sizeof(unsigned));
}

int64_t append_attention_workspace_bytes(const AppendAttentionParams& p, const AppendAttentionPlan& plan) {
  if (groups_of(plan) == 1) return 0;
  return units_of(p, plan.rows) * plan.rows * groups_of(plan) * (p.head_dim + 2) * int64_t(sizeof(float)) +
         append_attention_counter_bytes(p, plan);
}

void launch_append_attention(const AppendAttentionParams& params, const AppendAttentionPlan& plan,
                             cudaStream_t stream) {
  if (params.batch == 0 || params.query_len == 0) return;
  const auto launch =
      params.dtype == DType::kFloat16
          ? (plan.uses_wgmma ? launch_append_attention_wgmma_half : launch_append_attention_mma_half)
          : (plan.uses_wgmma ? launch_append_attention_wgmma_bfloat16 : launch_append_attention_mma_bfloat16);
  launch(params, plan, stream);
}

}  // namespace hf_fastpath
