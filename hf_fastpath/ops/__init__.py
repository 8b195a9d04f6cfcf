"""The ops, one file each. ``hf_fastpath.ops.<name>(...)`` checks its arguments and calls the op.

``torch.ops.hf_fastpath.<name>`` is the same op without the Python checks; it takes the numbers of :mod:`..choices`
instead of their names.
"""

from .add_rms_norm import SPEC as add_rms_norm
from .append_attention import SPEC as append_attention
from .bytes_sum import SPEC as bytes_sum
from .choose_experts import SPEC as choose_experts
from .decode_attention import SPEC as decode_attention
from .decode_layers import SPEC as decode_layers
from .exponential_race import SPEC as exponential_race
from .fake_quantize import SPEC as fake_quantize
from .fused_experts import SPEC as fused_experts
from .fused_gelu import SPEC as fused_gelu
from .fused_swiglu import SPEC as fused_swiglu
from .gated_delta_step import SPEC as gated_delta_step
from .gated_rms_norm import SPEC as gated_rms_norm
from .gather_ranks import SPEC as gather_ranks
from .gemm import SPEC as gemm
from .gemv import SPEC as gemv
from .gemv_swiglu import SPEC as gemv_swiglu
from .greedy_token import SPEC as greedy_token
from .head_products import SPEC as head_products
from .joined_gemv import SPEC as joined_gemv
from .latent_attention import SPEC as latent_attention
from .layer_norm import SPEC as layer_norm
from .lora_down import SPEC as lora_down
from .lora_up import SPEC as lora_up
from .packed_experts import SPEC as packed_experts
from .packed_gemm import SPEC as packed_gemm
from .packed_gemv import SPEC as packed_gemv
from .packed_gemv_swiglu import SPEC as packed_gemv_swiglu
from .packed_qkv_rope_append import SPEC as packed_qkv_rope_append
from .qkv_rope_append import SPEC as qkv_rope_append
from .quantizing_attention import SPEC as quantizing_attention
from .read_stream import SPEC as read_stream
from .rms_norm import SPEC as rms_norm
from .rope_append import SPEC as rope_append
from .routed_experts import SPEC as routed_experts
from .router_logits import SPEC as router_logits
from .selective_state_step import SPEC as selective_state_step
from .short_convolution import SPEC as short_convolution
from .step_inputs import SPEC as step_inputs
from .sum_ranks import SPEC as sum_ranks

__all__ = [
    "add_rms_norm",
    "append_attention",
    "bytes_sum",
    "choose_experts",
    "decode_attention",
    "decode_layers",
    "exponential_race",
    "fake_quantize",
    "fused_experts",
    "fused_gelu",
    "fused_swiglu",
    "gated_delta_step",
    "gated_rms_norm",
    "gather_ranks",
    "gemm",
    "gemv",
    "gemv_swiglu",
    "greedy_token",
    "head_products",
    "joined_gemv",
    "latent_attention",
    "layer_norm",
    "lora_down",
    "lora_up",
    "packed_experts",
    "packed_gemm",
    "packed_gemv",
    "packed_gemv_swiglu",
    "packed_qkv_rope_append",
    "qkv_rope_append",
    "quantizing_attention",
    "read_stream",
    "rms_norm",
    "rope_append",
    "routed_experts",
    "router_logits",
    "selective_state_step",
    "short_convolution",
    "step_inputs",
    "sum_ranks",
]
