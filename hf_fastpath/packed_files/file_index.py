"""The index of a folder of packed weights: its entries, its checksum, and the values that it may hold.

``packed.safetensors.index.json`` has the entries that an index of transformers' checkpoints has, ``metadata`` and
``weight_map``, and two of its own:

* ``hf_fastpath``: ``version`` and ``layout`` of what the files hold (``packed_formats.py``); ``save_id``, with
  which the names of all files of one save begin; ``files``: name -> [bytes, :func:`digest`]; ``tensors``: name ->
  [dtype, shape, offset in its file]; ``placed``: the files for other programs that this save has put into the folder,
  such as ``config.json``; ``model``: a :class:`Header`;
* ``sha256`` of everything else in the index.

Shards and copies of the configs are listed in ``files`` like any other file: a checksum covers every byte that
:func:`load_packed` uses. Every value is checked when the index is read, so that code that uses it meets no wrong type.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import torch

from ..choices import InputQuants
from ..quantization.formats import FORMATS, is_multiplier

VERSION = 2
#: name of the order of the quants, as ``packed_formats.py`` describes it; another order would get another name
LAYOUT = "four-stretches-of-32"
#: name of our entry in the index, in a journal, and in a shard's own metadata
KEY = "hf_fastpath"
INDEX = "packed.safetensors.index.json"
#: the advice of an error if files are not what was saved
AGAIN = "copy or save it again"

_SEAL = "sha256"
_SAVE_ID = re.compile(r"[0-9a-f]{16}")
_OWN_NAME = re.compile(r"packed-([0-9a-f]{16})[-.][A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
#: bytes that one digest covers, so that threads can share a file; long enough that starting a digest costs little
STRETCH = 1 << 24
_MAX_SIZE = 1 << 40  # of a dimension: far beyond any weight, and far from an overflow
_MAX_DIMENSIONS = 8
_LEAST_HEADER = 8  # bytes that hold the length of a file's header

#: types that files can hold: torch's name -> safetensors' name
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}


class Entry(NamedTuple):
    """A tensor: name of its type, its shape, the offset of its bytes, and the name of its file."""

    dtype: str
    shape: list[int]
    offset: int
    file: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


class Stored(NamedTuple):
    """A file: its number of bytes, and their :func:`digest`."""

    size: int
    digest: str


def is_own_name(name: Any, save_id: str | None = None) -> bool:
    """Whether a file of a save, or of this save, may have this name. A file of such a name stays in its folder."""
    found = _OWN_NAME.fullmatch(name) if isinstance(name, str) else None
    return found is not None and save_id in (None, found[1])


# ---- checksums -----------------------------------------------------------------------------------------------


def stretches(buffers: Iterable[memoryview]) -> Iterable[list[memoryview]]:
    """Split the bytes of consecutive buffers into the pieces that :func:`digest` hashes."""
    piece: list[memoryview] = []
    room = STRETCH
    for buffer in buffers:
        while len(buffer):
            piece.append(buffer[:room])
            buffer, room = buffer[room:], room - len(piece[-1])
            if not room:
                yield piece
                piece, room = [], STRETCH
    if piece:
        yield piece


def digest_of_stretch(piece: Iterable[memoryview]) -> bytes:
    """Return the SHA-256 of one piece."""
    made = hashlib.sha256()
    for buffer in piece:
        made.update(buffer)
    return made.digest()


def joined_digest(digests: Iterable[bytes]) -> str:
    """Return the digest of a file, from those of its pieces."""
    return hashlib.sha256(b"".join(digests)).hexdigest()


def digest(buffers: Iterable[memoryview]) -> str:
    """Return the SHA-256 of the SHA-256s of each 16 MiB; so threads can share a file."""
    return joined_digest(map(digest_of_stretch, stretches(buffers)))


def sealed(content: dict[str, Any]) -> str:
    """Return JSON text of ``content`` with a checksum over it."""
    return json.dumps(content | {_SEAL: _seal_of(content)}, indent=1) + "\n"


def _seal_of(content: dict[str, Any]) -> str:
    """Return the checksum, which covers the values: copying a file may change line ends and spaces."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def unsealed(data: bytes) -> dict[str, Any]:
    """Return what :func:`sealed` was given.

    Raises:
        ValueError: the data are no JSON object.
        Unsealed: the data are an object whose checksum is missing or wrong.
    """
    try:
        content = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError(f"it is {_kind(content)}, expected an object")
    seal = content.pop(_SEAL, None)
    if not isinstance(seal, str) or seal != _seal_of(content):
        raise Unsealed(content)
    return content


class Unsealed(ValueError):
    """A JSON object without the right checksum; ``content`` must not be trusted."""

    def __init__(self, content: dict[str, Any]):
        super().__init__("its checksum does not fit what it says")
        self.content = content


# ---- values --------------------------------------------------------------------------------------------------


def _kind(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, (bool, int, float)) else f"a {type(value).__name__}"


def _expect(is_right: bool, what: str, value: Any, expected: str) -> None:
    if not is_right:
        text = repr(value)
        raise ValueError(f"{what} is {text if len(text) <= 80 else text[:77] + '...'}, expected {expected}")


def _text(value: Any, what: str) -> str:
    _expect(isinstance(value, str), what, value, "text")
    return value


def _object(value: Any, what: str) -> dict[str, Any]:
    _expect(isinstance(value, dict), what, value, "an object")
    return value


def _list(value: Any, what: str) -> list[Any]:
    _expect(isinstance(value, list), what, value, "a list")
    return value


def _names(value: Any, what: str) -> list[str]:
    return [_text(name, f"an entry of {what}") for name in _list(value, what)]


def _whole(value: Any, what: str, lowest: int = 0, highest: int = _MAX_SIZE) -> int:
    is_right = type(value) is int and lowest <= value <= highest
    _expect(is_right, what, value, f"a whole number from {lowest} to {highest}")
    return value


def _get(content: dict[str, Any], key: str, what: str) -> Any:
    if key not in content:
        raise ValueError(f"{what} has no {key!r}")
    return content[key]


@dataclass(frozen=True)
class Header:
    """What the files say about the model.

    Attributes:
        architecture: class of the model.
        model_type: model_type of its config.
        weights: name of a packed layer -> format, in_features, out_features, multiplier; and rounding, a list of quants
            and limit, of layers that have their input rounded.
        joined: names of packed layers that lie behind each other in memory, in order.
        tied: name of a parameter -> the name under which it is saved.
        buffers: names of buffers that the model makes itself, and that another version may name differently.
        options: ``weights`` and ``lm_head`` of ``patch()``.
    """

    architecture: str
    model_type: str
    weights: dict[str, dict[str, Any]]
    joined: list[list[str]]
    tied: dict[str, str]
    buffers: list[str]
    options: dict[str, Any]

    @classmethod
    def parse(cls, said: Any, tensors: Iterable[str]) -> Header:
        """Check what an index says about a model whose tensors have these names.

        Raises:
            ValueError: the message names the value and what is expected.
        """
        values = {field.name: _get(_object(said, "model"), field.name, "model") for field in fields(cls)}
        _text(values["architecture"], "architecture")
        _text(values["model_type"], "model_type")
        weights = _object(values["weights"], "weights")
        for name, weight in weights.items():
            _check_weight(name, weight)
        groups = [_names(group, "joined") for group in _list(values["joined"], "joined")]
        if sorted(name for group in groups for name in group) != sorted(weights):
            raise ValueError("joined and weights disagree on the packed layers")
        for group in groups:
            kinds = {(weights[name]["format"], weights[name]["in_features"]) for name in group}
            _expect(len(kinds) == 1, "joined", group, "layers of one format and one size of their input")
        held = set(tensors)
        for name, target in _object(values["tied"], "tied").items():
            is_right = isinstance(target, str) and target in held and name not in held
            _expect(is_right, f"tied[{name!r}]", target, "the name of another tensor in the files")
        _names(values["buffers"], "buffers")
        options = _object(values["options"], "options")
        for key in ("weights", "lm_head"):
            value = _get(options, key, "options")
            _expect(value is None or isinstance(value, str), f"options[{key!r}]", value, "text or null")
        return cls(**values)


def _check_weight(name: str, weight: Any) -> None:
    what = f"weights[{name!r}]"
    _object(weight, what)
    format = _get(weight, "format", what)
    _expect(isinstance(format, str) and format in FORMATS, f"{what} format", format, f"one of {', '.join(FORMATS)}")
    for key in ("in_features", "out_features"):
        _whole(_get(weight, key, what), f"{what} {key}", 1)
    multiplier = _get(weight, "multiplier", what)
    _expect(is_multiplier(multiplier), f"{what} multiplier", multiplier, "a power of two up to 2 ** 127")
    if "rounding" in weight:
        _check_rounding(weight["rounding"], f"{what} rounding")


def _check_rounding(rounding: Any, what: str) -> None:
    labels = [each.label for each in InputQuants]
    is_pair = isinstance(rounding, list) and len(rounding) == 2 and rounding[0] in labels
    is_right = is_pair and type(rounding[1]) in (int, float) and 0 <= rounding[1] < math.inf
    _expect(is_right, what, rounding, f"a list of one of {', '.join(labels)} and a limit of 0 or more")


@dataclass(frozen=True)
class Index:
    """The contents of an index; see the module's docstring.

    Attributes:
        save_id: 16 hexadecimal digits.
        files: every file of the save, by name.
        tensors: every tensor, by name.
        placed: names of the files for other programs that the save has put into the folder.
        header: what the files say about the model.
    """

    save_id: str
    files: dict[str, Stored]
    tensors: dict[str, Entry]
    placed: Sequence[str]
    header: Header

    def copy_of(self, name: str) -> str:
        """Return the name of the save's own copy of a file for other programs."""
        return f"packed-{self.save_id}-{name}"

    def content(self) -> dict[str, Any]:
        """Return the index in the form that :func:`sealed` takes."""
        return {
            "metadata": {"total_size": sum(entry.nbytes for entry in self.tensors.values())},
            "weight_map": {name: entry.file for name, entry in self.tensors.items()},
            KEY: {
                "version": VERSION,
                "layout": LAYOUT,
                "save_id": self.save_id,
                "files": {name: list(stored) for name, stored in self.files.items()},
                "placed": list(self.placed),
                "model": asdict(self.header),
                "tensors": {name: [e.dtype, e.shape, e.offset] for name, e in self.tensors.items()},
            },
        }

    @classmethod
    def parse(cls, content: dict[str, Any]) -> Index:
        """Check every value of an index.

        Raises:
            ValueError: the message names the value and what is expected.
        """
        said = _object(_get(content, KEY, "the index"), KEY)
        made_by = _get(said, "version", KEY), _get(said, "layout", KEY)
        if made_by != (VERSION, LAYOUT):
            raise ValueError(
                f"it is of version {made_by[0]!r} and layout {made_by[1]!r}, expected {VERSION} and {LAYOUT!r}: load "
                "it with the hf_fastpath that wrote it, or pack the model anew"
            )
        save_id = _get(said, "save_id", KEY)
        is_id = isinstance(save_id, str) and _SAVE_ID.fullmatch(save_id) is not None
        _expect(is_id, "save_id", save_id, "16 hexadecimal digits")
        files = {}
        for name, stored in _object(_get(said, "files", KEY), "files").items():
            _expect(is_own_name(name, save_id), "a file's name", name, f"packed-{save_id}-... in the same folder")
            is_right = isinstance(stored, list) and len(stored) == 2 and isinstance(stored[1], str)
            _expect(is_right, f"files[{name!r}]", stored, "[bytes, checksum]")
            files[name] = Stored(_whole(stored[0], f"bytes of {name}"), stored[1])
        placed = _names(_get(said, "placed", KEY), "placed")
        for name in placed:
            is_copied = f"packed-{save_id}-{name}" in files
            _expect(is_copied, "an entry of placed", name, "a name of which files has a copy")
        places = _object(_get(content, "weight_map", "the index"), "weight_map")
        tensors = {}
        for name, entry in _object(_get(said, "tensors", KEY), "tensors").items():
            file = places.get(name)
            _expect(isinstance(file, str) and file in files, f"weight_map[{name!r}]", file, "a name in files")
            tensors[name] = _entry(name, entry, file, files[file].size)
        _expect(places.keys() == tensors.keys(), "weight_map", sorted(places.keys() - tensors.keys()), "as in tensors")
        _check_offsets(tensors, files)
        return cls(save_id, files, tensors, placed, Header.parse(_get(said, "model", KEY), tensors))


def _entry(name: str, said: Any, file: str, size: int) -> Entry:
    what = f"tensors[{name!r}]"
    _expect(isinstance(said, list) and len(said) == 3, what, said, "[dtype, shape, offset]")
    dtype, shape, offset = said
    _expect(isinstance(dtype, str) and dtype in DTYPES, f"{what} dtype", dtype, f"one of {', '.join(DTYPES)}")
    _expect(len(_list(shape, f"{what} shape")) <= _MAX_DIMENSIONS, f"{what} shape", shape, "at most 8 dimensions")
    for length in shape:
        _whole(length, f"{what} shape")
    entry = Entry(dtype, shape, _whole(offset, f"{what} offset"), file)
    is_inside = offset + entry.nbytes <= size and offset % getattr(torch, dtype).itemsize == 0
    _expect(is_inside, f"{what} offset", offset, f"that of {entry.nbytes} bytes in a file of {size}")
    return entry


def _check_offsets(tensors: dict[str, Entry], files: dict[str, Stored]) -> None:
    """Raise if tensors overlap, or leave a gap between their file's header and its end."""
    ends: dict[str, int] = {}
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        begin = ends.get(entry.file, max(entry.offset, _LEAST_HEADER))
        _expect(entry.offset == begin, f"tensors[{name!r}] offset", entry.offset, f"{begin} in {entry.file}")
        ends[entry.file] = begin + entry.nbytes
    for file, end in ends.items():
        _expect(end == files[file].size, f"bytes of {file}", files[file].size, f"{end}, where its tensors end")
