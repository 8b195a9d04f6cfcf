// torch.ops.hf_fastpath.decode_layers on a GPU: see hf_fastpath/ops/decode_layers.py for the contract.
#include "decode_layers/decode_layers_glue.h"

namespace hf_fastpath {
namespace {

struct Ops {
  static constexpr auto qkv_rope_append = qkv_rope_append_cuda;
  static constexpr auto decode_attention = decode_attention_cuda;
  static constexpr auto gemv = gemv_cuda;
  static constexpr auto gemv_swiglu = gemv_swiglu_cuda;
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hf_fastpath, CUDA, m) { m.impl("decode_layers", TORCH_BOX(&decode_layers<Ops>)); }

}  // namespace hf_fastpath
