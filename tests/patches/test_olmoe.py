"""OLMoE: the common checks, and the switches of its config."""

from architecture_checks import architecture_tests, assert_variant_right

globals().update(architecture_tests("olmoe"))


def test_olmoe_weights_that_sum_to_one(device):
    assert_variant_right("olmoe", device, norm_topk_prob=True)


def test_olmoe_grouped_heads(device):
    assert_variant_right("olmoe", device, num_key_value_heads=1)


def test_olmoe_clipped_projections(device):
    assert_variant_right("olmoe", device, clip_qkv=0.8)
