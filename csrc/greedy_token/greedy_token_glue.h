// Checked arguments of greedy_token, for any device. This header is torch-facing.
#pragma once

#include "common/torch_glue.h"
#include "greedy_token/greedy_token.h"

namespace hf_fastpath {

// Holds what the arguments point to.
struct GreedyTokenCall {
  GreedyTokenParams params{};
  Tensor logits;
  std::optional<Tensor> eos, pad;

  GreedyTokenCall(const Tensor& given, Tensor unfinished, Tensor tokens, Tensor positions, Tensor seq_lens,
                  Tensor record, const std::optional<Tensor>& eos_tokens,
                  const std::optional<Tensor>& pad_token, bool programmatic_launch)
      : logits(given) {
    constexpr const char* kOp = "greedy_token";
    STD_TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0 && logits.size(1) < int64_t(1) << 32,
                    "hf_fastpath::greedy_token: logits has to be [batch, vocab_size]");
    const int64_t batch = logits.size(0);
    if (logits.stride(1) != 1) logits = torch::stable::contiguous(logits);
    const auto check = [&](const Tensor& tensor, ScalarType type, int64_t numel, const char* name) {
      STD_TORCH_CHECK(tensor.scalar_type() == type && tensor.numel() == numel && tensor.is_contiguous(),
                      "hf_fastpath::greedy_token: ", name, " has the wrong dtype, size or strides");
    };
    check(unfinished, ScalarType::Long, batch, "unfinished");
    check(tokens, ScalarType::Long, batch, "tokens");
    check(positions, ScalarType::Long, batch, "positions");
    check(seq_lens, ScalarType::Int, batch, "seq_lens");
    STD_TORCH_CHECK(record.dim() == 3 && record.size(0) > 0 && record.size(1) == 2 && record.size(2) == batch,
                    "hf_fastpath::greedy_token: record has to be [slots, 2, batch]");
    check(record, ScalarType::Long, record.numel(), "record");
    STD_TORCH_CHECK(eos_tokens.has_value() == pad_token.has_value(),
                    "hf_fastpath::greedy_token: eos_tokens and pad_token go together");
    params.dtype = dtype_of(logits, kOp);
    params.logits = logits.data_ptr();
    params.vocab_size = logits.size(1);
    params.stride = logits.stride(0);
    params.unfinished = static_cast<int64_t*>(unfinished.data_ptr());
    params.tokens = static_cast<int64_t*>(tokens.data_ptr());
    params.positions = static_cast<int64_t*>(positions.data_ptr());
    params.seq_lens = static_cast<int32_t*>(seq_lens.data_ptr());
    params.record = static_cast<int64_t*>(record.data_ptr());
    params.slots = record.size(0);
    params.batch = static_cast<int>(batch);
    params.programmatic_launch = programmatic_launch;
    if (!eos_tokens) return;
    STD_TORCH_CHECK(eos_tokens->dim() == 1,
                    "hf_fastpath::greedy_token: eos_tokens has to have one dimension");
    eos = hf_fastpath::contiguous(*eos_tokens);
    pad = *pad_token;
    check(*eos, ScalarType::Long, eos->numel(), "eos_tokens");
    check(*pad, ScalarType::Long, 1, "pad_token");
    params.eos_tokens = static_cast<const int64_t*>(eos->data_ptr());
    params.num_eos_tokens = eos->numel();
    params.pad_token = static_cast<const int64_t*>(pad->data_ptr());
  }
};

}  // namespace hf_fastpath
