"""from_gguf(file): a model whose weights stay in the bits of a GGUF file."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from .. import logs
from ..compat import gguf_files
from ..linears.gguf_modules import EMBEDDING, LINEAR, is_gguf
from ..native import heap, loader
from ..options import MAX_BATCH, Options
from ..patching.api import patch_with
from ..quantization.ggml_blocks import BLOCK_TYPES

_EXPERTS, _PARTS = re.compile(r"(blk\.\d+)\.ffn_(gate|up|down)_exps\.weight"), ("gate", "up", "down")
_PLAIN = ("F32", "F16", "BF16", "F64")
_INSTEAD = "AutoModelForCausalLM.from_pretrained(folder, gguf_file=name) dequantizes it, and patch(model) takes that"


def from_gguf(
    file: str | os.PathLike,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    kv_dtype: str | torch.dtype = "auto",
    ops: str | Iterable[str] = "all",
    strict: bool = False,
    max_batch_size: int = MAX_BATCH,
    quiet: bool = False,
    page_size: int | None = None,
    prefix_cache: int | str | None = None,
) -> nn.Module:
    """Load a GGUF file without dequantizing it, and patch the model.

    Weights of types that one of our formats holds (``quantization/ggml_blocks.py`` lists them) stay quantized, with the
    values that ``gguf.dequantize()`` gives; others are dequantized, which a line tells. No kernel of the hub is needed.
    ``unpatch()`` puts transformers' own modules with the file's blocks back, which need that kernel.

    Args:
        file: path of the file.
        dtype: type of the model's other tensors, and of its activations.
        device: where the model goes.
        kv_dtype, ops, strict, max_batch_size, quiet, page_size, prefix_cache: as for ``patch()``.

    Returns:
        The model, patched, in eval mode.

    Raises:
        ImportError: a package that reads such files is missing.
        ValueError: the file is no GGUF file, or damaged, or of an architecture that transformers does not know, or
            has a type of blocks that nobody reads.
        OSError: the file cannot be read.
        UnsupportedModelError: as for ``patch()``.
    """
    path = Path(file)
    options = Options.parse(kv_dtype, None, ops, strict, max_batch_size, page_size=page_size, prefix_cache=prefix_cache)
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"from_gguf() got dtype={dtype}, expected torch.float32, torch.float16 or torch.bfloat16")
    if missing := gguf_files.missing_packages():
        raise ImportError(f"from_gguf() needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    where = torch.device(device)
    loader.ensure(where.type, None if quiet else logs.say)
    if not loader.is_native(where.type):
        raise ValueError(
            f"from_gguf() has no kernels for {where.type}: see `python -m hf_fastpath info` for why, or use stock's "
            f"loading: {_INSTEAD}"
        )
    with _opened(path) as reader:
        architecture = _architecture(path, reader)
        if gguf_files.keeps_blocks(architecture):
            model = gguf_files.load_kept(path, BLOCK_TYPES, dtype).to(where).eval()
        else:
            model = _filled(path, reader, architecture, dtype, where, quiet)
    model.config._name_or_path = model.name_or_path = str(path)
    patch_with(model, options, quiet)
    left = [name for name, module in model.named_modules() if is_gguf(module, LINEAR)]
    if left:
        raise ValueError(
            f"from_gguf(): {len(left)} layers of {path} ({left[0]}, ...) stay in the file's blocks, which only a "
            f"kernel of the hub can multiply; hf_fastpath.report(model) says why. {_INSTEAD}"
        )
    return model


class _opened:
    """The file's directory of tensors, for a ``with`` block."""

    def __init__(self, path: Path):
        self._path = path

    def __enter__(self) -> Any:
        from gguf import GGUFReader

        with self._path.open("rb") as file:
            start = file.read(4)
        if start != b"GGUF":
            raise ValueError(
                f"from_gguf(): {self._path} begins with {start!r}, expected b'GGUF': it is no GGUF file, or a "
                "pointer to one (Git LFS); fetch the file itself"
            )
        try:
            return GGUFReader(str(self._path))
        except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
            raise ValueError(
                f"from_gguf(): {self._path} cannot be read ({error or type(error).__name__}): it is cut off, damaged, "
                "or of a newer version than the package gguf knows; fetch it again, or pip install -U gguf"
            ) from error

    def __exit__(self, *_: Any) -> None:
        pass


def _architecture(path: Path, reader: Any) -> str:
    field = reader.fields.get("general.architecture")
    if field is None:
        raise ValueError(f"from_gguf(): {path} does not say general.architecture, which every model's file does")
    return str(bytes(field.parts[field.data[0]]), "utf-8")


def _filled(
    path: Path, reader: Any, architecture: str, dtype: torch.dtype, device: torch.device, quiet: bool
) -> nn.Module:
    """Return a model with the file's tensors in it, in blocks where one of our formats holds them."""
    try:
        model = gguf_files.model_without_weights(path, dtype)
        conversion = gguf_files.Conversion(path, architecture, model)
    except (ValueError, NotImplementedError, KeyError) as error:
        first = f"{error} ".splitlines()[0].strip() or type(error).__name__
        raise ValueError(
            f"from_gguf(): transformers makes no model of {path}, architecture {architecture!r} ({first}): convert it "
            "to safetensors, or use a newer transformers"
        ) from error
    made = _Filling(model, conversion, dtype, device)
    with path.open("rb") as file, heap.repacking():
        for tensor in reader.tensors:
            made.put(tensor, file)
    made.finish(path)
    if made.dequantized and not quiet:
        kinds = ", ".join(f"{count} of {name}" for name, count in made.dequantized.most_common())
        logs.say(f"hf_fastpath: dequantized, as no format of ours or no linear layer holds them: {kinds}")
    return model


class _Filling:
    """Tensors of a file on their way into a model.

    Args:
        model: on the meta device.
        conversion: what happens to tensors.
        dtype, device: of those that are not quantized; and of all.
    """

    def __init__(self, model: Any, conversion: Any, dtype: torch.dtype, device: torch.device):
        self._model, self._conversion, self._dtype, self._device = model, conversion, dtype, device
        self._experts: dict[str, dict[str, Any]] = {}
        #: name of a type of blocks -> tensors that were dequantized
        self.dequantized: Counter[str] = Counter()

    def put(self, tensor: Any, file: Any) -> None:
        """Read a tensor and put it in its place, if the model has one."""
        found = _EXPERTS.fullmatch(tensor.name) if self._conversion.keeps_experts else None
        if found is not None and self._keeps(found[1]):
            stack = self._experts.setdefault(found[1], {})
            stack[found[2]] = tensor
            if len(stack) == len(_PARTS):
                self._put_experts(found[1], stack, file)
            return
        self._put_one(tensor, file)

    def _put_one(self, tensor: Any, file: Any) -> None:
        kind = tensor.tensor_type
        name = self._conversion.names.get(tensor.name)
        module = self._module(name)
        if int(kind) in BLOCK_TYPES and module is not None and self._put_blocks(tensor, file, name, module):
            return
        from gguf import dequantize

        data = _bytes_of(tensor, file)
        try:
            values = dequantize(data, kind)
        except (NotImplementedError, ValueError) as error:
            raise ValueError(
                f"from_gguf(): {tensor.name} has blocks of type {kind.name}, which the package gguf does not "
                f"dequantize ({error}): pip install -U gguf, or requantize the file to one of "
                f"{', '.join(each.name for each in BLOCK_TYPES.values())}"
            ) from error
        for at, made in self._conversion.converted(tensor.name, values).items():
            self._put_values(at, made)
            if kind.name not in _PLAIN:
                self.dequantized[kind.name] += 1

    def _keeps(self, block: str) -> bool:
        """Whether the experts of a block of layers may keep their blocks, as far as is known."""
        stack = self._experts_of(block)
        return stack is not None and all(
            getattr(stack, name, None) is not None for name in ("gate_up_proj", "down_proj")
        )

    def _experts_of(self, block: str) -> Any:
        name = self._conversion.names.get(f"{block}.ffn_down_exps")
        return None if name is None else self._model.get_submodule(name.rpartition(".")[0])

    def _put_experts(self, block: str, stack: dict[str, Any], file: Any) -> None:
        """Put matrices of experts in their place: blocks, or what they are dequantized to."""
        numbers = {part: int(each.tensor_type) for part, each in stack.items()}
        experts = self._experts_of(block)
        if numbers["gate"] != numbers["up"] or not set(numbers.values()) <= set(BLOCK_TYPES):
            for each in stack.values():
                self._put_one(each, file)
            return
        blocks = {part: torch.from_numpy(_bytes_of(each, file)) for part, each in stack.items()}
        gate_up = torch.cat((blocks["gate"], blocks["up"]), 1)
        for made, kind, own in (
            (gate_up, numbers["gate"], experts.gate_up_proj),
            (blocks["down"], numbers["down"], experts.down_proj),
        ):
            expected = (*own.shape[:2], BLOCK_TYPES[kind].row_bytes(own.shape[2]))
            if tuple(made.shape) != expected:
                raise ValueError(
                    f"from_gguf(): experts of {block} have blocks of {tuple(made.shape)} bytes, expected {expected} by "
                    "the file's config: the file is of another model than it says"
                )
        parameters = tuple(
            nn.Parameter(each.to(self._device), requires_grad=False) for each in (gate_up, blocks["down"])
        )
        made = gguf_files.gguf_experts(experts, (numbers["gate"], numbers["down"]), parameters)  # type: ignore[arg-type]
        name = self._conversion.names[f"{block}.ffn_down_exps"].rpartition(".")[0]
        self._model.set_submodule(name, made)

    def _module(self, name: str | None) -> nn.Module | None:
        if name is None or not name.endswith(".weight"):
            return None
        module = self._model.get_submodule(name.removesuffix(".weight"))
        return module if type(module) in (nn.Linear, nn.Embedding) else None

    def _put_blocks(self, tensor: Any, file: Any, name: str, module: Any) -> bool:
        rows, columns = module.weight.shape
        kind = BLOCK_TYPES[int(tensor.tensor_type)]
        if list(map(int, tensor.shape)) != [columns, rows]:
            raise ValueError(
                f"from_gguf(): {tensor.name} is {list(map(int, reversed(tensor.shape)))}, expected {[rows, columns]} "
                "by the file's config: the file is of another model than it says"
            )
        order = self._conversion.row_order(tensor.name, rows, columns)
        if order is None:
            return False
        blocks = torch.from_numpy(_bytes_of(tensor, file)).view(rows, kind.row_bytes(columns))
        if not torch.equal(order, torch.arange(rows)):
            blocks = blocks[order]
        parameter = nn.Parameter(blocks.to(self._device), requires_grad=False)
        if type(module) is nn.Linear:
            made = gguf_files.gguf_linear(module, kind.number, parameter)
        else:
            made = gguf_files.gguf_embedding(module, kind.number, parameter, self._dtype)
        self._model.set_submodule(name.removesuffix(".weight"), made)
        return True

    def _put_values(self, name: str, values: torch.Tensor) -> None:
        at, _, attribute = name.rpartition(".")
        own = getattr(self._model.get_submodule(at), attribute)
        if own.shape != values.shape:
            raise ValueError(
                f"from_gguf(): {name} is {list(values.shape)} in the file, expected {list(own.shape)} by its config: "
                "the file is of another model than it says"
            )
        made = values.to(self._device, self._dtype if own.is_floating_point() else own.dtype)
        module = self._model.get_submodule(at)
        if attribute in module._parameters:
            module._parameters[attribute] = nn.Parameter(made, requires_grad=own.requires_grad)
        else:
            module._buffers[attribute] = made

    def finish(self, path: Path) -> None:
        """Tie the head to the embeddings, where the model does, and move buffers.

        Raises:
            ValueError: the model has tensors that the file lacks.
        """
        model = self._model
        head, table = model.get_output_embeddings(), model.get_input_embeddings()
        if head is not None and head.weight.is_meta and getattr(model.config, "tie_word_embeddings", False):
            if is_gguf(table, EMBEDDING):
                name = next(name for name, module in model.named_modules() if module is head)
                model.set_submodule(name, gguf_files.gguf_linear(head, table.ggml_type, table.weight))
            else:
                head.weight = table.weight
        lacking = [name for name, each in model.named_parameters() if each.is_meta]
        if lacking:
            raise ValueError(
                f"from_gguf(): {path} lacks {len(lacking)} tensors of its model ({', '.join(lacking[:5])}): it is cut "
                "off, or one file of several; join them with `llama-gguf-split --merge` first"
            )
        model.to(self._device)


def _bytes_of(tensor: Any, file: Any) -> np.ndarray:
    """Read a tensor's bytes, in the shape that the package gguf has for them."""
    data = np.empty(tensor.n_bytes, dtype=np.uint8)
    file.seek(int(tensor.data_offset))
    if file.readinto(memoryview(data)) != tensor.n_bytes:
        raise ValueError(f"from_gguf(): the file ends within {tensor.name}: fetch it again")
    return data.view(tensor.data.dtype).reshape(tensor.data.shape)
