"""A small decoder of one's own, as people publish them beside their weights, whose MLPs read a factor from somewhere.

Each class of :data:`FACTORS` keeps the factor at another place that Python can change; ``edit`` changes it there.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import types
import weakref
from array import array
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import own_helpers
import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb, eager_attention_forward

from hf_fastpath.compat import CACHE

WIDTH, HEADS, VOCAB = 64, 2, 97


class OwnConfig(PreTrainedConfig):
    model_type = "own_decoder"

    def __init__(self, mlp: str = "Attribute", **entries: Any):
        sizes = dict(hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=WIDTH // HEADS)
        sizes |= dict(num_hidden_layers=2, vocab_size=VOCAB, max_position_embeddings=8192, intermediate_size=96)
        sizes |= dict(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, tie_word_embeddings=False)
        sizes |= dict(pad_token_id=0, bos_token_id=None, eos_token_id=None)
        self.factors = {"first": 1.0}
        for name, value in (sizes | entries).items():
            setattr(self, name, value)
        super().__init__(mlp=mlp, **{name: sizes[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")})


class OwnAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.head_dim, self.scaling = config.head_dim, config.head_dim**-0.5
        self.num_key_value_groups = 1
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x, position_embeddings, attention_mask, cache):
        shape = *x.shape[:-1], -1, self.head_dim
        q, k, v = (each(x).view(shape).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        function = eager_attention_forward
        if self.config._attn_implementation != "eager":
            function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, _ = function(self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling)
        return self.o_proj(out.reshape(*x.shape[:-1], -1))


class OwnMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.up, self.down = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)

    def forward(self, x):
        return self.down(nn.functional.silu(self.up(x))) * self.factor()


class OwnLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.attention, self.mlp = OwnAttention(config, layer_idx), FACTORS[config.mlp](config)
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH, eps=1e-6) for _ in range(2)])

    def forward(self, x, *given):
        x = x + self.attention(self.norms[0](x), *given)
        return x + self.mlp(self.norms[1](x))


class OwnPreTrained(PreTrainedModel):
    config_class = OwnConfig
    base_model_prefix = "model"
    _supports_sdpa = True

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(0.0, 0.2)


class OwnDecoder(OwnPreTrained):
    layer_class = OwnLayer

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([self.layer_class(config, index) for index in range(config.num_hidden_layers)])
        self.norm, self.rotary_emb = nn.RMSNorm(WIDTH, eps=1e-6), LlamaRotaryEmbedding(config)
        self.post_init()

    def and_mask_function(self):
        """Return what hides more keys than those behind a token, or None."""
        return None

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, cache=None):
        x = self.embed_tokens(input_ids)
        if position_ids is None:
            past = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(past, past + x.shape[1], device=x.device)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            position_ids=position_ids,
            and_mask_function=self.and_mask_function(),
            **{CACHE: cache},
        )
        angles = self.rotary_emb(x, position_ids)
        for layer in self.layers:
            x = layer(x, angles, mask, cache)
        return self.norm(x)


class OwnDecoderForCausalLM(OwnPreTrained, GenerationMixin):
    decoder_class = OwnDecoder

    def __init__(self, config):
        super().__init__(config)
        self.model, self.lm_head = self.decoder_class(config), nn.Linear(WIDTH, VOCAB, bias=False)
        self.post_init()

    def forward(  # transformers has called the cache by either name
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        cache=None,
        past_key_values=None,
        use_cache=None,
        logits_to_keep=0,
        **_,
    ):
        cache = past_key_values if cache is None else cache
        hidden = self.model(input_ids, attention_mask, position_ids, cache)
        logits = self.lm_head(hidden[:, -logits_to_keep or None :])
        return CausalLMOutputWithPast(logits=logits, **{CACHE: cache})


def own_model(mlp: str, **entries: Any) -> OwnDecoderForCausalLM:
    """Return a random model, the same in every call."""
    torch.manual_seed(0)
    return OwnDecoderForCausalLM(OwnConfig(mlp, **entries)).eval()


# ---- where a factor may be --------------------------------------------------------------------------------------


class Attribute(OwnMLP):
    def __init__(self, config):
        super().__init__(config)
        self.number = 1.0

    def factor(self):
        return self.number

    def edit(self, value):
        self.number = value


class InDict(OwnMLP):
    def __init__(self, config):
        super().__init__(config)
        self.table = {"other": 5.0, "factor": 1.0}

    def factor(self):
        return self.table["factor"]

    def edit(self, value):
        self.table["factor"] = value


class InList(OwnMLP):
    def __init__(self, config):
        super().__init__(config)
        self.numbers = [1.0, 0.0]

    def factor(self):
        return sum(self.numbers)

    def edit(self, value):
        self.numbers[:] = [value - 1.0, 1.0]


class LengthOfList(OwnMLP):
    """As PEFT's list of merged adapters."""

    def __init__(self, config):
        super().__init__(config)
        self.merged = []

    def factor(self):
        return float(1 + len(self.merged))

    def edit(self, value):
        self.merged[:] = ["name"] * int(value - 1)


class InSet(OwnMLP):
    def __init__(self, config):
        super().__init__(config)
        self.found = {"1.0"}

    def factor(self):
        return float(next(iter(self.found)))

    def edit(self, value):
        self.found.clear()
        self.found.add(str(value))


class OrderOfDict(OwnMLP):
    def __init__(self, config):
        super().__init__(config)
        self.order = OrderedDict(one=1.0, two=2.0, three=3.0)

    def factor(self):
        return next(iter(self.order.values()))

    def edit(self, value):
        for each in sorted(self.order, key=lambda name: (self.order[name] != value, name)):
            self.order.move_to_end(each)


class InObject(OwnMLP):
    def __init__(self, config):
        super().__init__(config)
        self.settings = types.SimpleNamespace(inner=types.SimpleNamespace(factor=1.0))

    def factor(self):
        return self.settings.inner.factor

    def edit(self, value):
        self.settings.inner.factor = value


class AttributesOfObject(InObject):
    """Another dict of attributes is given to an object."""

    def __init__(self, config):
        super().__init__(config)
        self.settings = types.SimpleNamespace(inner=own_helpers.Holder(1.0))
        self.settings.inner.factor = 1.0

    def edit(self, value):
        self.settings.inner.__dict__ = dict(factor=value)


class AttributesOfModule(Attribute):
    """Another dict of attributes is given to the module, and edited then."""

    def edit(self, value):
        self.__dict__ = dict(vars(self))
        super().edit(value)


class Held:
    scale = 1.0


class OtherHeld(Held):
    scale = 3.0


class OfHeldsClass(OwnMLP):
    """What the class of an object says that a module holds."""

    def __init__(self, config):
        super().__init__(config)
        self.held = Held()

    def factor(self):
        return self.held.scale

    def edit(self, value):
        Held.scale = value


class HeldsClass(OwnMLP):
    """The class of such an object is another one."""

    def __init__(self, config):
        super().__init__(config)
        self.held = Held()

    def factor(self):
        return 1.0 if type(self.held) is Held else 3.0

    def edit(self, value):
        self.held.__class__ = Held if value == 1.0 else OtherHeld


class OfFunction(OwnMLP):
    def __init__(self, config):
        super().__init__(config)
        self.function = lambda: self.function.number
        self.function.number = 1.0

    def factor(self):
        return self.function()

    def edit(self, value):
        self.function.number = value


class InArray(OwnMLP):
    def __init__(self, config):
        super().__init__(config)
        self.numbers = array("d", [1.0])

    def factor(self):
        return self.numbers[0]

    def edit(self, value):
        self.numbers[0] = value


class DefaultFactory(OwnMLP):
    def __init__(self, config):
        super().__init__(config)
        self.numbers = defaultdict(lambda: 1.0)

    def factor(self):
        return self.numbers.default_factory()

    def edit(self, value):
        self.numbers.default_factory = lambda: value


class Private:
    __slots__ = ("__number",)

    def __init__(self):
        self.set(1.0)

    def set(self, value):
        self.__number = value

    def get(self):
        return self.__number


class InPrivateSlot(OwnMLP):
    def __init__(self, config):
        super().__init__(config)
        self.held = Private()

    def factor(self):
        return self.held.get()

    def edit(self, value):
        self.held.set(value)


@dataclass
class Settings:
    __slots__ = ("factor",)
    factor: float


class InSlots(OwnMLP):
    def __init__(self, config):
        super().__init__(config)
        self.settings = Settings(1.0)

    def factor(self):
        return self.settings.factor

    def edit(self, value):
        self.settings.factor = value


class DeepInside(OwnMLP):
    def __init__(self, config):
        super().__init__(config)
        self.tree = {"a": [({"b": 1.0},)]}
        self.tree["itself"] = self.tree

    def factor(self):
        return self.tree["a"][0][0]["b"]

    def edit(self, value):
        self.tree["a"][0][0]["b"] = value


class PlainTensor(OwnMLP):
    """A tensor that is no buffer, edited in place."""

    def __init__(self, config):
        super().__init__(config)
        self.scale = torch.ones(WIDTH)

    def factor(self):
        return self.scale

    def edit(self, value):
        self.scale.fill_(value)


class OtherTensor(PlainTensor):
    """A tensor in whose place another one is put."""

    def edit(self, value):
        self.scale = torch.full((WIDTH,), value)


class NumberInTensor(PlainTensor):
    """Tensors of one element, which ``==`` may take for each other: the second is edited later."""

    def __init__(self, config):
        super().__init__(config)
        self.scale = torch.tensor(1.0)

    def edit(self, value):
        self.scale = self.scale.clone()
        self.scale.fill_(value)


class TensorsInList(OwnMLP):
    def __init__(self, config):
        super().__init__(config)
        self.scales = [{"scale": torch.ones(WIDTH)}, (torch.ones(1), None)]

    def factor(self):
        return self.scales[0]["scale"] * self.scales[1][0]

    def edit(self, value):
        self.scales[1][0].fill_(value)


class HiddenModule(OwnMLP):
    """A module that only a list holds."""

    def __init__(self, config):
        super().__init__(config)
        self.hidden = [nn.Linear(1, 1)]
        nn.init.constant_(self.hidden[0].weight, 1.0)

    def factor(self):
        return self.hidden[0].weight[0, 0]

    def edit(self, value):
        nn.init.constant_(self.hidden[0].weight, value)


class Array(OwnMLP):
    def __init__(self, config):
        super().__init__(config)
        self.numbers = np.ones(3)

    def factor(self):
        return float(self.numbers[1])

    def edit(self, value):
        self.numbers[1] = value


class OfConfig(OwnMLP):
    def factor(self):
        return self.config.factors["first"]

    def edit(self, value):
        self.config.factors["first"] = value


def enclosing(number):
    def factor():
        return number

    def edit(value):
        nonlocal number
        number = value

    return factor, edit


class Enclosed(OwnMLP):
    def __init__(self, config):
        super().__init__(config)
        self.function, self.change = enclosing(1.0)

    def factor(self):
        return self.function()

    def edit(self, value):
        self.change(value)


class EnclosedTensor(OwnMLP):
    def __init__(self, config):
        super().__init__(config)
        self.function, _ = enclosing(torch.ones(WIDTH))

    def factor(self):
        return self.function()

    def edit(self, value):
        self.function().fill_(value)


class DefaultArgument(OwnMLP):
    def __init__(self, config):
        super().__init__(config)
        self.function = lambda number=1.0: number

    def factor(self):
        return self.function()

    def edit(self, value):
        self.function.__defaults__ = (value,)


class PartialOf(OwnMLP):
    def __init__(self, config):
        super().__init__(config)
        self.function = functools.partial(max, [1.0])

    def factor(self):
        return self.function()

    def edit(self, value):
        self.function.args[0][0] = value


class MethodOfObject(OwnMLP):
    def __init__(self, config):
        super().__init__(config)
        self.get = {"factor": 1.0}.get
        self.holder = own_helpers.Holder(1.0)
        self.function = self.holder.read

    def factor(self):
        return self.function()

    def edit(self, value):
        self.holder.value = value


NUMBER, TABLE, TENSOR = 1.0, {"factor": [1.0]}, torch.ones(WIDTH)


class Global(OwnMLP):
    def factor(self):
        return NUMBER

    def edit(self, value):
        global NUMBER
        NUMBER = value


class InGlobalTable(OwnMLP):
    def factor(self):
        return TABLE["factor"][0]

    def edit(self, value):
        TABLE["factor"][0] = value


class GlobalTensor(OwnMLP):
    def factor(self):
        return TENSOR

    def edit(self, value):
        TENSOR.fill_(value)


class OfOtherFile(OwnMLP):
    """A global of another file, by that file's name."""

    def factor(self):
        return own_helpers.NUMBER

    def edit(self, value):
        own_helpers.NUMBER = value


class FunctionOfOtherFile(OwnMLP):
    """A global that a function of another file reads."""

    def factor(self):
        return own_helpers.factor()

    def edit(self, value):
        own_helpers.TABLE["factor"] = value


class ReplacedFunction(OwnMLP):
    """A function of another file, in whose place another one is put."""

    def factor(self):
        return own_helpers.replaceable()

    def edit(self, value):
        own_helpers.replaceable = lambda: value


class OfClass(OwnMLP):
    numbers = [1.0]

    def factor(self):
        return self.numbers[0]

    def edit(self, value):
        type(self).numbers[0] = value


class OfOtherClass(OwnMLP):
    def factor(self):
        return own_helpers.Constants.FACTOR

    def edit(self, value):
        own_helpers.Constants.FACTOR = value


class ReplacedMethod(OwnMLP):
    def factor(self):
        return 1.0

    def edit(self, value):
        type(self).factor = lambda self: value


def of_everywhere(number):
    """Decorate a method, so that it reads what the decorator encloses."""
    held = [number]

    def decorate(method):
        @functools.wraps(method)
        def decorated(self):
            return held[0] * method(self)

        decorated.held = held
        return decorated

    return decorate


class Decorated(OwnMLP):
    @of_everywhere(1.0)
    def factor(self):
        return 1.0

    def edit(self, value):
        type(self).factor.held[0] = value


class SubclassOfNumber(Attribute):
    def __init__(self, config):
        super().__init__(config)
        self.number = own_helpers.Number(1.0)

    def edit(self, value):
        self.number = own_helpers.Number(value)


class MemberOfEnum(OwnMLP):
    def __init__(self, config):
        super().__init__(config)
        self.mode = own_helpers.Mode.ONE

    def factor(self):
        return self.mode.value[0]

    def edit(self, value):
        self.mode.value[0] = value


class ImportedInside(OwnMLP):
    def factor(self):
        from own_helpers import NUMBER

        return NUMBER

    def edit(self, value):
        own_helpers.NUMBER = value


class FoundByName(OwnMLP):
    def factor(self):
        return importlib.import_module("own_helpers").NUMBER

    def edit(self, value):
        own_helpers.NUMBER = value


class OfEnvironment(OwnMLP):
    def factor(self):
        return float(os.environ.get("OWN_DECODERS_FACTOR", 1.0))

    def edit(self, value):
        os.environ["OWN_DECODERS_FACTOR"] = str(value)


math.own_decoders_factor = 1.0


class OfPythonsModule(OwnMLP):
    def factor(self):
        return math.own_decoders_factor

    def edit(self, value):
        math.own_decoders_factor = value


class OfContext(OwnMLP):
    def factor(self):
        return own_helpers.VARIABLE.get()

    def edit(self, value):
        own_helpers.VARIABLE.set(value)


class OfThread(OwnMLP):
    def factor(self):
        return getattr(own_helpers.OF_THREAD, "number", 1.0)

    def edit(self, value):
        own_helpers.OF_THREAD.number = value


class BehindReferences(OwnMLP):
    held = own_helpers.Holder(1.0)
    table = weakref.WeakValueDictionary(first=held)
    reference, proxy = weakref.ref(held), weakref.proxy(held)

    def factor(self):
        return (self.table["first"].value * self.reference().value * self.proxy.value) ** (1 / 3)

    def edit(self, value):
        self.held.value = value


FACTORS: dict[str, type[OwnMLP]] = {cls.__name__: cls for cls in OwnMLP.__subclasses__()}
FACTORS |= {
    cls.__name__: cls for cls in (OtherTensor, NumberInTensor, AttributesOfObject, AttributesOfModule, SubclassOfNumber)
}


def edit(model: OwnDecoderForCausalLM, value: float) -> None:
    """Change the factor of all MLPs: 1.0 is what they begin with."""
    for layer in model.model.layers:
        layer.mlp.edit(value)
