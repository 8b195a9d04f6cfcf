"""How the proof of a recorded step runs stock code."""

import torch
from torch.nn.functional import linear
from torch.nn.functional import scaled_dot_product_attention as attention

from hf_fastpath.recording.proof import _WideAttention


def test_attention_of_16_bits_runs_in_float32_and_nothing_else_does():
    q, k, v = (torch.randn(2, 4, 3, 16, dtype=torch.bfloat16) for _ in range(3))
    mask = torch.randn(2, 1, 3, 3, dtype=torch.bfloat16)
    wide = [each.float() for each in (q, k, v, mask)]
    expected = attention(*wide[:3], attn_mask=wide[3]), attention(*wide[:3], is_causal=True)
    narrow, rows = attention(q, k, v, attn_mask=mask), linear(q, k[0, 0])
    with _WideAttention():
        found = attention(query=q, key=k, value=v, attn_mask=mask), attention(q, k, v, is_causal=True)
        in_float32 = attention(*wide[:3], attn_mask=wide[3])
        assert torch.equal(linear(q, k[0, 0]), rows)
    assert all(each.dtype == torch.bfloat16 for each in found)
    assert all(torch.equal(each, one.bfloat16()) for each, one in zip(found, expected))
    assert torch.equal(in_float32, expected[0]) and torch.equal(attention(q, k, v, attn_mask=mask), narrow)
    assert not torch.equal(narrow, found[0])
