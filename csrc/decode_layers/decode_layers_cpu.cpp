// torch.ops.hf_fastpath.decode_layers on the CPU: see hf_fastpath/ops/decode_layers.py for the contract.
#include "common/callable_ops.h"
#include "decode_layers/decode_layers_glue.h"

namespace hf_fastpath {
namespace {

struct Ops {
  static constexpr auto qkv_rope_append = qkv_rope_append_cpu;
  static constexpr auto decode_attention = decode_attention_cpu;
  static constexpr auto gemv = gemv_cpu;
  static constexpr auto gemv_swiglu = gemv_swiglu_cpu;
  static std::optional<Tensor> at_once(const DecodeLayersCall&) { return std::nullopt; }
};

}  // namespace

HF_FASTPATH_KERNEL(CPU, "decode_layers", decode_layers<Ops>)

}  // namespace hf_fastpath
