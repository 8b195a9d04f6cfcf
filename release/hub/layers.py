"""Layers that stand in for transformers': each has a forward alone, and reads the weights of the layer it replaces."""

import torch
from torch import nn

_rms_norm = torch.ops.hf_fastpath.rms_norm


class RMSNorm(nn.Module):
    """``weight * x / sqrt(mean(x^2) + eps)``, of Llama, Mistral, Qwen and others."""

    has_backward = False
    can_torch_compile = True
    weight: torch.Tensor

    def forward(self, hidden_states):
        """Return the norm of ``hidden_states`` [..., hidden_size], in their dtype."""
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        return _rms_norm(hidden_states, self.weight, eps)


class RMSNormZeroCentered(nn.Module):
    """``(1 + weight) * x / sqrt(mean(x^2) + eps)``, of Qwen3-Next and Qwen3.5."""

    has_backward = False
    can_torch_compile = True
    weight: torch.Tensor

    def forward(self, x):
        """Return the norm of ``x`` [..., hidden_size], in its dtype."""
        return _rms_norm(x, self.weight, self.eps, None, 1.0)
