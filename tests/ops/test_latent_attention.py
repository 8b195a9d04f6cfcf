"""latent_attention: the common tests, agreement with transformers, caches by address, what is not visible."""

from __future__ import annotations

import importlib

import pytest
import torch
from checks import assert_matches, common_tests, over_dtypes
from memory import same_bits

from hf_fastpath.choices import Rotation
from hf_fastpath.ops.latent_attention import MAX_RANK, SPEC
from hf_fastpath.registry import OpInputError, Sample


def call(device, dtype, batch, heads, rank, rope_dim, capacity, lengths, starts=None, **given):
    def randn(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    numbers = [None if n is None else torch.tensor(n, dtype=torch.int32, device=device) for n in (lengths, starts)]
    caches = randn(batch, 1, capacity, rank), randn(batch, 1, capacity, rope_dim)
    return Sample(
        *(randn(batch, heads, rank), randn(batch, heads, rope_dim), *caches, *numbers, (rank + rope_dim) ** -0.5),
        **given,
    )


def newest(device, dtype, batch, rank, rope_dim, rows=1):
    """Make the newest position of each row, and angles."""
    new = torch.randn(batch, rank, device=device).to(dtype), torch.randn(batch, rope_dim, device=device).to(dtype)
    angles = torch.randn(rows, rope_dim, device=device)
    return dict(new_latent=new[0], new_rope=new[1], cos=angles.cos().to(dtype), sin=angles.sin().to(dtype))


def odd_sizes(device, dtype):
    for heads, rank, rope_dim, capacity, length in (
        *((1, 1, 1, 1, 1), (3, 33, 7, 20, 19), (17, 100, 31, 65, 65), (2, 511, 127, 40, 33)),
        *((16, 512, 64, 1000, 999), (33, 512, 64, 130, 129), (5, 256, 32, 700, 641), (128, 512, 64, 64, 31)),
    ):
        yield call(device, dtype, 2, heads, rank, rope_dim, capacity, [length, max(1, length // 2)])
    yield call(device, dtype, 3, 16, 512, 64, 200, [200, 150, 33], [0, 149, 32])
    yield call(device, dtype, 0, 2, 64, 16, 8, [])
    for rotation in Rotation:
        for rank, rope_dim in ((512, 64), (256, 32), (33, 10)):
            given = newest(device, dtype, 2, rank, rope_dim, rows=2) | {"rotation": rotation}
            yield call(device, dtype, 2, 17, rank, rope_dim, 150, [129, 64], [100, 0], **given)


globals().update(common_tests(SPEC, odd_sizes))


@over_dtypes
@pytest.mark.parametrize(("rank", "rope_dim"), ((512, 64), (256, 32), (40, 24)))
def test_latent_attention_ignores_what_is_not_visible(rank, rope_dim, dtype, device):
    """Slots behind the last position and in front of the first may hold anything."""
    sample = call(device, dtype, 2, 18, rank, rope_dim, 150, [130, 70], [9, 64])
    expected = SPEC(*sample.args)
    for cache in sample.args[2:4]:
        cache[0, :, 130:], cache[0, :, :9], cache[1, :, 70:], cache[1, :, :64] = (float("nan"),) * 4
    assert same_bits(SPEC(*sample.args), expected)


@over_dtypes
@pytest.mark.parametrize(("rank", "rope_dim"), ((512, 64), (256, 32), (40, 24)))
def test_latent_attention_appends(rank, rope_dim, dtype, device):
    """The newest position is in the cache, and no other slot has changed; so it is if nobody sees it."""
    given = newest(device, dtype, 4, rank, rope_dim)
    sample = call(device, dtype, 4, 18, rank, rope_dim, 150, [130, 1, 64, 0], [0, 0, 64, 0], **given)
    before = [cache.clone() for cache in sample.args[2:4]]
    result = SPEC(*sample.args, **sample.kwargs)
    latents, rope_keys = sample.args[2:4]
    for row, length in enumerate((130, 1, 64)):
        assert same_bits(latents[row, 0, length - 1], given["new_latent"][row])
        assert not same_bits(rope_keys[row, 0, length - 1], before[1][row, 0, length - 1])
        for now, then in ((latents, before[0]), (rope_keys, before[1])):
            then[row, 0, length - 1] = now[row, 0, length - 1]
    assert same_bits(latents, before[0]) and same_bits(rope_keys, before[1])
    assert not result[2:].any()
    given |= dict(new_latent=None, new_rope=None)
    assert same_bits(SPEC(*sample.args, **given), result)


@pytest.mark.parametrize(
    ("rotation", "module", "name"),
    (
        ("halves", "deepseek_v3", "apply_rotary_pos_emb"),
        ("neighbors_to_halves", "deepseek_v3", "apply_rotary_pos_emb_interleave"),
        ("neighbors", "cohere", "apply_rotary_pos_emb"),
    ),
)
def test_latent_attention_rotations_are_transformers(rotation, module, name):
    turn = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
    given = newest("cpu", torch.float32, 2, 16, 8)
    angle = torch.randn(1, 4)
    angle = angle.repeat_interleave(2, dim=-1) if rotation == "neighbors" else angle.repeat(1, 2)
    given |= dict(cos=angle.cos(), sin=angle.sin(), rotation=rotation)
    sample = call("cpu", torch.float32, 2, 3, 16, 8, 5, [4, 5], **given)
    q, k = turn(
        sample.args[1][:, :, None], given["new_rope"][:, None, None], given["cos"][:, None], given["sin"][:, None]
    )
    plain = [t.clone() if isinstance(t, torch.Tensor) else t for t in sample.args]
    found = SPEC.reference(*sample.args, **SPEC.numbered(sample).kwargs)
    torch.testing.assert_close(sample.args[3][[0, 1], 0, [3, 4]], k[:, 0, 0])
    plain[2][[0, 1], 0, [3, 4]], plain[3][[0, 1], 0, [3, 4]] = given["new_latent"], k[:, 0, 0]
    torch.testing.assert_close(SPEC.reference(plain[0], q[:, :, 0], *plain[2:5], None, plain[6]), found)


@over_dtypes
def test_latent_attention_large_scores(dtype, device):
    """A score far above the others takes all of the weight; no exponential overflows."""
    sample = call(device, dtype, 1, 16, 512, 64, 200, [200])
    sample.args[2][0, 0, 137] = 40 * sample.args[0][0, 3]
    assert assert_matches(SPEC, sample).isfinite().all()


@over_dtypes
@pytest.mark.parametrize(("rank", "rope_dim"), ((512, 64), (64, 16)))
def test_latent_attention_takes_caches_by_address(rank, rope_dim, dtype, device):
    """With a table, the tensors only say shapes and types."""
    sample = call(device, dtype, 2, 16, rank, rope_dim, 70, [70, 33])
    expected = SPEC(*sample.args)
    q_latent, q_rope, latents, rope_keys, *rest = sample.args
    row = [latents.data_ptr(), rope_keys.data_ptr(), 70]
    table = torch.tensor([[0, 0, 0], row], dtype=torch.int64, device=device)
    small = latents.new_zeros(2, 1, 1, rank), latents.new_zeros(2, 1, 1, rope_dim)
    torch.testing.assert_close(SPEC(q_latent, q_rope, *small, *rest, table, 1), expected)


def test_latent_attention_reference_is_deepseek():
    """Absorbing ``kv_b_proj`` changes the order of products, and nothing else."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, eager_attention_forward

    config = DeepseekV3Config(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=48,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, num_hidden_layers=1,
    )  # fmt: skip
    attention = DeepseekV3Attention(config, 0).double()
    torch.nn.init.normal_(attention.kv_b_proj.weight)
    q, latents, rope = (torch.randn(shape).double() for shape in ((2, 4, 1, 24), (2, 1, 9, 48), (2, 1, 9, 8)))
    weights = attention.kv_b_proj.weight.detach().view(4, 28, 48)
    expanded = torch.einsum("bsr,hdr->bhsd", latents[:, 0], weights)
    keys, values = expanded.split((16, 12), dim=-1)
    keys = torch.cat((keys, rope.expand(-1, 4, -1, -1)), dim=-1)
    stock, _ = eager_attention_forward(attention, q, keys, values, None, scaling=0.2)
    q_latent = torch.einsum("bhd,hdr->bhr", q[:, :, 0, :16], weights[:, :16])
    lens = torch.full((2,), 9, dtype=torch.int32)
    found = SPEC.reference(q_latent, q[:, :, 0, 16:], latents, rope, lens, None, 0.2)
    torch.testing.assert_close(torch.einsum("bhr,hdr->bhd", found, weights[:, 16:]), stock[:, 0], rtol=1e-6, atol=1e-6)


def test_latent_attention_names_the_fault():
    given = call("cpu", torch.float32, 1, 2, 16, 8, 10, [10]).args
    with pytest.raises(OpInputError, match=f"rank is {MAX_RANK + 1}, rope_dim 8, expected 1 to {MAX_RANK}"):
        SPEC(*call("cpu", torch.float32, 1, 2, MAX_RANK + 1, 8, 4, [4]).args)
    with pytest.raises(OpInputError, match="new_latent and new_rope go together: pass both or neither"):
        SPEC(*given, new_latent=torch.zeros(1, 16))
    with pytest.raises(OpInputError, match=r"cos has shape \(2, 8\), expected \[1 or 1, 8\], even"):
        SPEC(*given, cos=torch.zeros(2, 8), sin=torch.zeros(1, 8))
    with pytest.raises(OpInputError, match="seq_lens holds 11, expected at most the cache's capacity 10"):
        SPEC(*given[:4], torch.tensor([11], dtype=torch.int32), *given[5:])
    with pytest.raises(OpInputError, match=r"rope_keys has shape \(1, 1, 9, 8\), expected \(1, 1, 10, 8\)"):
        SPEC(*given[:3], given[3][:, :, 1:].contiguous(), *given[4:])
