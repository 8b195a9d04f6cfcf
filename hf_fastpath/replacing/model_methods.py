"""Methods of a model some of whose layers are quantized: they work, or refuse before they change anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..compat import text_embedding, text_head
from ..linears.absent_weight import REMEDY
from ..linears.packed_linear import QUANTIZED_OF, PackedLinear
from .quantizing import Replaced


def methods(replaced: list[Replaced]) -> dict[str, Callable[..., Any]]:
    """Return what takes the place of a model's methods, by their names.

    Args:
        replaced: the layers that quantized ones have replaced; the list is read when a method is called.
    """

    def tie_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Tie as the class does. A quantized layer stays as it is if it was made of the weight that it would be tied
        to; otherwise it refuses."""
        for each in replaced:
            vars(each.packed)[QUANTIZED_OF] = each.original._parameters.get("weight")
        try:
            return type(self).tie_weights(self, *args, **kwargs)
        finally:
            for each in replaced:
                vars(each.packed).pop(QUANTIZED_OF, None)

    return {
        "save_pretrained": save_pretrained,
        "push_to_hub": save_pretrained,
        "resize_token_embeddings": resize_token_embeddings,
        "load_state_dict": load_state_dict,
        "tie_weights": tie_weights,
    }


def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Refuse: the files could not be loaded."""
    raise ValueError(
        "save_pretrained() and push_to_hub() would write a checkpoint that transformers cannot load: its weights are "
        "quantized by hf_fastpath. save_packed(model, directory) writes them as they are; unpatch(model) brings the "
        "model's own back"
    )


def resize_token_embeddings(
    self: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *args: Any, **kwargs: Any
) -> nn.Module:
    """Resize as the class does, unless the head, which would be resized as well, is quantized."""
    if type(text_head(self)) is PackedLinear:
        known = len(text_embedding(self).weight)
        multiple, wanted = pad_to_multiple_of or 1, known if new_num_tokens is None else new_num_tokens
        if (wanted := -(-wanted // multiple) * multiple) != known:
            raise ValueError(
                f"resize_token_embeddings() is to make {known} tokens {wanted}, and the head is quantized by "
                f"hf_fastpath: resize before patch(). {REMEDY}"
            )
    return type(self).resize_token_embeddings(self, new_num_tokens, pad_to_multiple_of, *args, **kwargs)


def load_state_dict(self: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Load as the class does, unless there are weights for layers that are quantized."""
    packed = (name for name, module in self.named_modules() if type(module) is PackedLinear)
    unread = [name for name in packed if f"{name}.weight" in state_dict or name in state_dict]
    if unread:
        raise ValueError(
            f"load_state_dict() got {unread[0]}.weight and {len(unread) - 1} more weights of layers that are quantized "
            f"by hf_fastpath, which would not be read: load before patch(). {REMEDY}"
        )
    return type(self).load_state_dict(self, state_dict, *args, **kwargs)
