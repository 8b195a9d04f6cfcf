// Checked arguments of step_inputs, for any device. This header is torch-facing.
#pragma once

#include "common/torch_glue.h"
#include "step_inputs/step_inputs.h"

namespace hf_fastpath {

// Holds what the arguments point to.
struct StepInputsCall {
  StepInputsParams params{};
  Tensor ids, at;
  std::vector<Tensor> outputs;

  StepInputsCall(const Tensor& embedding, const Tensor& tokens, const Tensor& positions,
                 const std::optional<Tensor>& position_embedding, int64_t position_offset,
                 const std::vector<Tensor>& tables)
      : ids(hf_fastpath::contiguous(tokens)), at(hf_fastpath::contiguous(positions)) {
    constexpr const char* kOp = "step_inputs";
    STD_TORCH_CHECK(tokens.dim() == 2 && sizes_of(tokens) == sizes_of(positions) &&
                        tokens.scalar_type() == ScalarType::Long &&
                        positions.scalar_type() == ScalarType::Long && tokens.numel() < int64_t(1) << 31,
                    "hf_fastpath::step_inputs: tokens and positions have to be int64 [batch, query_len]");
    STD_TORCH_CHECK(tables.size() < kMaxGathered, "hf_fastpath::step_inputs: ", tables.size(),
                    " tables, expected at most ", kMaxGathered - 1);
    params.dtype = dtype_of(embedding, kOp);
    params.token_ids = static_cast<const int64_t*>(ids.data_ptr());
    params.positions = static_cast<const int64_t*>(at.data_ptr());
    params.tokens = static_cast<int>(tokens.numel());
    params.position_offset = position_offset;
    const auto add = [&](const Tensor& table) {
      outputs.push_back(empty_like_with_sizes(table, {tokens.size(0), tokens.size(1), table.size(1)}));
      params.tables[params.num_tables] = described(table);
      params.tables[params.num_tables++].out = outputs.back().data_ptr();
    };
    add(embedding);
    for (const Tensor& table : tables) add(table);
    if (!position_embedding) return;
    params.position_embedding = described(*position_embedding);
    STD_TORCH_CHECK(position_embedding->size(1) == embedding.size(1),
                    "hf_fastpath::step_inputs: position_embedding has another width than embedding");
  }

 private:
  GatheredTable described(const Tensor& table) const {
    STD_TORCH_CHECK(
        table.dim() == 2 && dtype_of(table, "step_inputs") == params.dtype &&
            (table.size(1) <= 1 || table.stride(1) == 1) && table.size(1) < int64_t(1) << 31,
        "hf_fastpath::step_inputs: a table is not [rows, width] of embedding's dtype with contiguous rows");
    return {table.data_ptr(), table.size(0), table.stride(0), static_cast<int>(table.size(1)), nullptr};
  }
};

}  // namespace hf_fastpath
