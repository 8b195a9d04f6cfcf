"""verify(model, inputs): compare a patched model with itself unpatched, beside stock's own noise floor."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .. import compat
from ..parity.comparison import compare, sequences
from ..parity.rows import Verification
from ..patching.api import patch, unpatch
from ..patching.state import patched_model, state_of


@torch.no_grad()
def verify(model: nn.Module, inputs: Any, max_new_tokens: int = 32) -> Verification:
    """Compare this model patched with itself unpatched on ``inputs``, beside stock's own noise floor.

    The inputs are made into five rows: their beginning (short); a batch of two lengths (padded); all of them, repeated
    if they have less than 512 tokens (long); a text up to the edge of the smallest sliding window, if the model has one
    (window edge); and the beginning with tokens drawn from a seed (sampling). A recorded model whose step is another
    one from some length of the text on gets a row for each such length, too, up to the positions that the model knows.
    End tokens and the logits processors of ``model.generation_config`` are left out. An unpatched model is patched for
    the comparison and unpatched afterwards. Of an encoder-decoder, the rows are made of what its encoder gives for
    ``inputs``, and the text begins with the token that starts the decoder. If the decode loop is stock's, the patched
    modules are compared.

    Args:
        model: a model that generates text.
        inputs: input_ids [batch, seq_len] without padding, or a mapping that holds them (a tokenizer's output); of an
            encoder-decoder, what its encoder takes, also sound.
        max_new_tokens: length of the generations that are compared.

    Returns:
        The differences and whether they are within bounds.

    Raises:
        ValueError: the inputs are too short, too many or padded, or nothing of the model is patched.
    """
    model = patched_model(model)
    device, encoded = compat.input_device(model), None
    if compat.has_encoder(model):
        ids, encoded = compat.read_by_encoder(model, inputs)
    else:
        ids = sequences(inputs).to(device)
    was_patched = state_of(model) is not None
    if not was_patched:
        patch(model, quiet=True)
    try:
        return compare(model, ids, max_new_tokens, encoded)
    finally:
        if not was_patched:
            unpatch(model)
