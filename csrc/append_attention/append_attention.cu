// How a call of append_attention is cut, and which kernel takes it.
#include "append_attention/append_attention.h"
#include "append_attention/row_tile.cuh"
#include "common/async.cuh"
#include "common/cuda_check.cuh"
#include "common/wgmma.cuh"

namespace hf_fastpath {
namespace {

// Whether tensor cores do not take it.
bool is_portable(const AppendAttentionParams& p) {
  return p.dtype == DType::kFloat32 || !is_tuned_head_dim(p.head_dim);
}

// Blocks that run at once in clusters of this size: where blocks take a whole SM, clusters of 4 and 8 do not
// fill every part of an H200.
int slots_of(int multiprocessors, int cluster) {
  return cluster < 4 ? multiprocessors : multiprocessors * 15 / 16 / cluster * cluster;
}

// Splits for tiles that are more than half a wave: those whose waves are within 5 % of the best.
int splits_of_waves(int64_t units, int64_t slots, int64_t most) {
  const auto time = [&](int64_t splits) {
    return double((units * splits + slots - 1) / slots) / double(splits);
  };
  double best = time(1);
  for (int64_t splits = 2; splits <= most; ++splits) best = time(splits) < best ? time(splits) : best;
  int64_t splits = 1;
  while (splits < most && time(splits) > 1.05 * best) ++splits;
  return static_cast<int>(splits);
}

}  // namespace

AppendAttentionPlan plan_append_attention(const AppendAttentionParams& p) {
  AppendAttentionPlan plan{};
  plan.cluster = plan.splits = 1;
  if (is_portable(p)) return plan;
  const int rows = append::rows_per_kv_head(p), multiprocessors = multiprocessor_count();
  plan.uses_wgmma = has_wgmma_code();
  if (plan.uses_wgmma) {
    plan.rows = rows <= 64 ? 64 : 128;
    plan.positions = append::wgmma_positions(plan.rows, p.head_dim);
  } else {
    const int few = append::mma_few_rows(p.head_dim);
    plan.rows = rows <= few ? few : 64;
    plan.positions = append::mma_positions(p.head_dim);
  }
  const int64_t units = int64_t(p.batch) * p.num_kv_heads * ((rows + plan.rows - 1) / plan.rows);
  plan.units = static_cast<int>(units);
  int64_t length = p.capacity;
  if (p.window > 0 && p.window + p.query_len < length) length = p.window + p.query_len;
  const int chunk = append::kMinChunk * (p.head_dim > 128 ? 2 : 1);
  const int64_t most = (length + chunk - 1) / chunk;
  if (!plan.uses_wgmma) {
    const int64_t slots = int64_t(multiprocessors) * (p.head_dim > 128 ? 1 : 2);
    if (units < slots)
      plan.splits = splits_of_waves(units, slots, most < slots / units ? most : slots / units);
    return plan;
  }
  if (2 * units > multiprocessors) return plan;
  // Short caches: one cluster for a tile, which needs no second kernel.
  const int few_positions = p.head_dim > 128 ? 256 : 512;
  for (int cluster = kMaxCluster; cluster >= 2; cluster /= 2) {
    if (units * cluster > slots_of(multiprocessors, cluster) || length > cluster * few_positions) continue;
    plan.splits = plan.cluster = cluster;
    return plan;
  }
  // Clusters merge in shared memory: large ones where many blocks share a tile, small ones else, since they
  // fill the device better.
  plan.cluster = units == 1 ? 4 : 2;
  int64_t splits = slots_of(multiprocessors, plan.cluster) / units;
  if (splits > most) splits = most;
  while (plan.cluster > splits) plan.cluster /= 2;
  plan.splits = static_cast<int>(splits / plan.cluster * plan.cluster);
  return plan;
}

int64_t append_attention_workspace_bytes(const AppendAttentionParams& p, const AppendAttentionPlan& plan) {
  if (plan.splits == plan.cluster) return 0;
  const int64_t rows = int64_t(plan.units) * plan.rows, clusters = plan.splits / plan.cluster;
  return rows * clusters * (p.head_dim + 2) * int64_t(sizeof(float));
}

void launch_append_attention(const AppendAttentionParams& params, const AppendAttentionPlan& plan,
                             cudaStream_t stream) {
  if (params.batch == 0 || params.query_len == 0) return;
  if (is_portable(params)) return launch_append_attention_portable(params, stream);
  const auto launch =
      params.dtype == DType::kFloat16
          ? (plan.uses_wgmma ? launch_append_attention_wgmma_half : launch_append_attention_mma_half)
          : (plan.uses_wgmma ? launch_append_attention_wgmma_bfloat16 : launch_append_attention_mma_bfloat16);
  launch(params, plan, stream);
  if (plan.splits > plan.cluster) launch_append_attention_merge(params, plan, stream);
}

}  // namespace hf_fastpath
