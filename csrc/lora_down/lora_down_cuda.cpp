// torch.ops.hf_fastpath.lora_down on a GPU: see hf_fastpath/ops/lora_down.py for the contract.
#include "common/composed_ops.h"
#include "common/cuda_glue.h"
#include "lora_down/lora_down.h"
#include "lora_down/lora_down_glue.h"

namespace hf_fastpath {

Tensor lora_down_cuda(const Tensor& x, const std::vector<Tensor>& weights, int64_t norm,
                      const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias,
                      double norm_eps, bool programmatic_launch, const std::optional<Tensor>& chosen,
                      const std::vector<int64_t>& owners) {
  const DeviceGuard guard(x);
  LoraDownCall call(x, weights, programmatic_launch, chosen, owners);
  LoraDownParams& p = call.params;
  p.norm = norm_of(norm, LoraDownCall::kOp);
  p.norm_eps = static_cast<float>(norm_eps);
  STD_TORCH_CHECK(!is_rms(p.norm) || (norm_weight && !norm_bias),
                  "hf_fastpath::lora_down: norm 'rms' takes norm_weight and no norm_bias");
  STD_TORCH_CHECK(p.norm != NormKind::kNone || !(norm_weight || norm_bias),
                  "hf_fastpath::lora_down: norm_weight and norm_bias go with a norm");
  std::optional<Tensor> kept[2];
  for (auto [given, to, pointer] :
       {std::tuple(&norm_weight, &kept[0], &p.norm_weight), std::tuple(&norm_bias, &kept[1], &p.norm_bias)}) {
    if (!*given) continue;
    STD_TORCH_CHECK((*given)->dim() == 1 && (*given)->size(0) == p.inputs &&
                        dtype_of(**given, LoraDownCall::kOp) == p.dtype,
                    "hf_fastpath::lora_down: norm_weight or norm_bias does not match x");
    *to = hf_fastpath::contiguous(**given);
    *pointer = (*to)->const_data_ptr();
  }
  launch_lora_down(p, current_stream(guard.device()));
  return call.out;
}

HF_FASTPATH_KERNEL(CUDA, "lora_down", lora_down_cuda)

}  // namespace hf_fastpath
