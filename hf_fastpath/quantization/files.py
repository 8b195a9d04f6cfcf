"""Files of packed weights: safetensors whose metadata say what is in them.

A directory holds ``packed.safetensors``, or ``packed-00001-of-00003.safetensors`` and so on with an index like that of
transformers' checkpoints, ``packed.safetensors.index.json``. The metadata of every file have one entry,
``hf_fastpath``, in JSON:

* ``version`` of this description, ``layout`` of the quants (``formats.py``), ``save_id`` that all files of one save
  share, ``file`` and ``files``: the number of this one, from 1, and of all;
* ``model``: a :class:`Header`, the same in every file;
* ``tensors``: name -> [dtype, shape, CRC-32 of the bytes] of this file's.

A packed weight ``name`` is the tensors ``name.quants``, ``name.scales`` and, where its format has them, ``name.zeros``;
everything else is under the name it has in the model.
"""

from __future__ import annotations

import json
import secrets
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

VERSION = 1
#: of the quants, as ``formats.py`` tells it: another order is another name
LAYOUT = "four-stretches-of-32"
KEY = "hf_fastpath"
SINGLE, INDEX = "packed.safetensors", "packed.safetensors.index.json"
_PATTERN = "packed*.safetensors*"


@dataclass(frozen=True)
class Header:
    """What the files say of the model.

    Attributes:
        architecture: class of the model.
        model_type: of its config.
        weights: name of a packed layer -> format, in_features, out_features, multiplier.
        joined: names of packed layers that lie behind each other in memory, in order.
        tied: name of a parameter -> the name under which it is saved.
        buffers: names of buffers that the model makes itself, and that another version may call otherwise.
        options: ``weights`` and ``lm_head`` of ``patch()``.
    """

    architecture: str
    model_type: str
    weights: dict[str, dict[str, Any]]
    joined: list[list[str]]
    tied: dict[str, str]
    buffers: list[str]
    options: dict[str, Any]


class Entry(NamedTuple):
    """A tensor: its type by name, shape, CRC-32 of its bytes, and name of its file."""

    dtype: str
    shape: list[int]
    checksum: int
    file: str


def not_persistent(model: nn.Module) -> list[str]:
    """Names of a model's buffers that no checkpoint of transformers holds."""
    modules = model.named_modules(remove_duplicate=False)
    return [f"{at}.{name}".lstrip(".") for at, module in modules for name in sorted(module._non_persistent_buffers_set)]


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shards(tensors: Mapping[str, torch.Tensor], limit: int) -> list[list[str]]:
    """Names of the tensors of each file, in order."""
    shards: list[list[str]] = [[]]
    room = limit
    for name, tensor in tensors.items():
        if shards[-1] and tensor.nbytes > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= tensor.nbytes
    return shards


def write(directory: Path, header: Header, tensors: Mapping[str, torch.Tensor], limit: int) -> None:
    """Write the files; they take the place of older ones once all are there.

    Args:
        limit: bytes of a file; a larger tensor has one for itself.
    """
    shards = _shards(tensors, limit)
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"packed-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    common = {"version": VERSION, "layout": LAYOUT, "save_id": secrets.token_hex(8), "files": count}
    common |= {"model": asdict(header)}
    written = []
    try:
        for number, (file, shard) in enumerate(zip(names, shards), 1):
            part = directory / f"{file}.part"
            written.append(part)
            here = {name: tensors[name].detach().cpu().contiguous() for name in shard}
            entries = {name: [_dtype_name(t), list(t.shape), zlib.crc32(_bytes(t))] for name, t in here.items()}
            text = json.dumps(common | {"file": number, "tensors": entries})
            save_file(here, part, {"format": "pt", KEY: text})
    except BaseException:
        for part in written:
            part.unlink(missing_ok=True)
        raise
    for old in directory.glob(_PATTERN):
        if old.suffix != ".part":
            old.unlink()
    for part in written:
        part.rename(part.with_suffix(""))
    if count > 1:
        weight_map = {name: file for file, shard in zip(names, shards) for name in shard}
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


class PackedFiles:
    """The files of a directory, opened; a context manager.

    What they say of themselves is checked when they are opened, a tensor's bytes when it is read.

    Attributes:
        header: what they say of the model.
        entries: every tensor by name.

    Raises:
        ValueError: a file is missing, damaged, of another version or of another save.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        self.entries: dict[str, Entry] = {}
        try:
            names, mapped = self._names()
            said = [self._read_metadata(name) for name in names]
            self.header = self._agreed(names, said)
            self._check_names(mapped)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> PackedFiles:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.clear()
        self._stack.close()

    def _names(self) -> tuple[list[str], dict[str, str] | None]:
        """The files, and which tensor the index expects in which."""
        index, single = self._directory / INDEX, self._directory / SINGLE
        if single.is_file():
            return [SINGLE], None
        if not index.is_file():
            raise ValueError(
                f"load_packed(): {self._directory} holds neither {SINGLE} nor {INDEX}, expected what save_packed() "
                "writes there"
            )
        try:
            mapped = json.loads(index.read_text())["weight_map"]
            names = sorted(set(mapped.values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"load_packed(): {index} is no index of safetensors files ({error}): {_AGAIN}") from None
        missing = [name for name in names if not (self._directory / name).is_file()]
        if missing:
            raise ValueError(
                f"load_packed(): {self._directory} lacks {', '.join(missing)}, which {INDEX} names beside "
                f"{len(names) - len(missing)} others: copy all files of the save"
            )
        return names, mapped

    def _read_metadata(self, name: str) -> dict[str, Any]:
        path = self._directory / name
        try:
            opened = self._stack.enter_context(safe_open(path, framework="pt"))
            metadata = opened.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"load_packed(): {path} is cut off or damaged ({error}): {_AGAIN}") from None
        if KEY not in metadata:
            raise ValueError(f"load_packed(): {path} is no file of save_packed(): its metadata have no {KEY!r}")
        try:
            said = json.loads(metadata[KEY])
            version, layout = said["version"], said["layout"]
            if (version, layout) == (VERSION, LAYOUT):
                tensors = {key: Entry(*entry, name) for key, entry in said["tensors"].items()}
                _ = said["save_id"], said["model"], said["files"], said["file"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"load_packed(): the metadata of {path} cannot be read ({error!r}): {_AGAIN}") from None
        if (version, layout) != (VERSION, LAYOUT):
            raise ValueError(
                f"load_packed(): {path} is of version {version!r} and layout {layout!r}, expected {VERSION} and "
                f"{LAYOUT!r}: load it with the hf_fastpath that wrote it, or pack the model anew"
            )
        twice = sorted(set(tensors) & set(self.entries))
        if twice:
            raise ValueError(f"load_packed(): {path} and {self.entries[twice[0]].file} both hold {twice[0]}: {_AGAIN}")
        self.entries |= tensors
        if set(opened.keys()) != set(tensors):
            other = ", ".join(sorted(set(opened.keys()) ^ set(tensors))[:5])
            raise ValueError(f"load_packed(): {path} does not hold the tensors that it names ({other}): {_AGAIN}")
        self._open[name] = opened
        return said

    def _agreed(self, names: list[str], said: list[dict[str, Any]]) -> Header:
        """What all files say of the model."""
        first = said[0]
        for name, each in zip(names, said):
            if (each["save_id"], each["model"]) != (first["save_id"], first["model"]):
                raise ValueError(
                    f"load_packed(): {name} and {names[0]} in {self._directory} are of different saves: copy all "
                    "files of one"
                )
        numbers = {each["file"] for each in said}
        if numbers != set(range(1, first["files"] + 1)):
            raise ValueError(
                f"load_packed(): {self._directory} has {len(numbers)} files of a save of {first['files']}: copy all"
            )
        try:
            header = Header(**{field.name: first["model"][field.name] for field in fields(Header)})
        except KeyError as error:
            raise ValueError(f"load_packed(): the metadata of {names[0]} lack {error}: {_AGAIN}") from None
        if sorted(name for group in header.joined for name in group) != sorted(header.weights):
            raise ValueError(f"load_packed(): the metadata of {names[0]} disagree on the packed layers: {_AGAIN}")
        return header

    def _check_names(self, mapped: dict[str, str] | None) -> None:
        held = {name: entry.file for name, entry in self.entries.items()}
        if mapped is not None and mapped != held:
            other = ", ".join(sorted({name for name, _ in mapped.items() ^ held.items()})[:5])
            raise ValueError(f"load_packed(): {INDEX} and the files disagree on {other}: {_AGAIN}")

    def read(self, name: str) -> torch.Tensor:
        """A tensor, in memory that is the file's.

        Raises:
            ValueError: it is not what was saved.
        """
        entry = self.entries[name]
        try:
            tensor = self._open[entry.file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"load_packed(): {name} in {entry.file} cannot be read ({error}): {_AGAIN}") from None
        is_as_named = (_dtype_name(tensor), list(tensor.shape)) == (entry.dtype, entry.shape)
        if not is_as_named or zlib.crc32(_bytes(tensor)) != entry.checksum:
            raise ValueError(
                f"load_packed(): {name} in {self._directory / entry.file} is damaged: its bytes do not have the "
                f"checksum they were saved with. {_AGAIN.capitalize()}"
            )
        return tensor

    def names_beside(self, packed: Iterator[str]) -> set[str]:
        """Names of the tensors that are no part of the packed weights named."""
        parts = {f"{name}.{part}" for name in packed for part in ("quants", "scales", "zeros")}
        return set(self.entries) - parts


_AGAIN = "copy or save it again"
