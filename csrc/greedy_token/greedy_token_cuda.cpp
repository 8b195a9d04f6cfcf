// torch.ops.hf_fastpath.greedy_token on a GPU: see hf_fastpath/ops/greedy_token.py for the contract.
#include "greedy_token/greedy_token_cuda.h"

#include "common/cuda_glue.h"
#include "greedy_token/greedy_token_glue.h"

namespace hf_fastpath {
namespace {

void greedy_token(const Tensor& logits, Tensor unfinished, Tensor tokens, Tensor positions, Tensor seq_lens,
                  Tensor record, const std::optional<Tensor>& eos_tokens,
                  const std::optional<Tensor>& pad_token, bool programmatic_launch) {
  const DeviceGuard guard(logits);
  const GreedyTokenCall call(logits, unfinished, tokens, positions, seq_lens, record, eos_tokens, pad_token,
                             programmatic_launch);
  launch_greedy_token(call.params, current_stream(guard.device()));
}

}  // namespace

HF_FASTPATH_KERNEL(CUDA, "greedy_token", greedy_token)

}  // namespace hf_fastpath
