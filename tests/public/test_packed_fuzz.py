"""load_packed() of files with flipped bits and rewritten values: a documented type of error, or the same model."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CPU, build, require_native
from torch import nn
from transformers import AutoModelForCausalLM

import hf_fastpath
from hf_fastpath.linears.packed_linear import PackedLinear
from hf_fastpath.packed_files.file_index import INDEX, KEY, digest, sealed, unsealed

#: values to put anywhere: other types, out of range, too large for memory, too deep
VALUES = (
    None,
    True,
    -1,
    0,
    1.5,
    10**30,
    float("nan"),
    float("inf"),
    "",
    "x",
    "../x",
    "\ud800\0",
    [],
    [[]],
    {},
    [10**30],
)
DEEP: list = []
for _ in range(300):
    DEEP = [DEEP]
#: number of entries of an object, and of a list, that are tried: the others are alike
MANY = 3


@pytest.fixture(autouse=True)
def native():
    require_native(CPU)


class Target:
    """A folder of packed files, and a model for it that is made anew only after it was filled."""

    def __init__(self, directory: Path):
        self.directory = directory
        config = build("llama", num_hidden_layers=1).config
        model = hf_fastpath.patch(build("llama", num_hidden_layers=1), weights="int4", quiet=True)
        hf_fastpath.save_packed(model, directory, max_shard_size="200KB")
        self._config, self._expected, self._empty = config, self._tensors(model), None
        self.content = {path.name: path.read_bytes() for path in directory.iterdir()}

    @staticmethod
    def _tensors(model: nn.Module) -> dict[str, Any]:
        packed = {f"{n}.multiplier": m.multiplier for n, m in model.named_modules() if type(m) is PackedLinear}
        return dict(model.named_parameters()) | dict(model.named_buffers()) | packed

    def restore(self) -> None:
        for name, content in self.content.items():
            (self.directory / name).write_bytes(content)

    def is_refused(self, *, by_directory: bool = False) -> bool:
        """Whether a documented type of error refuses the files; if not, they gave the same model."""
        if self._empty is None:
            with torch.device("meta"):
                self._empty = AutoModelForCausalLM.from_config(self._config).eval()
        try:
            if by_directory:
                model = hf_fastpath.load_packed(self.directory, quiet=True)
            else:
                model = hf_fastpath.load_packed(self._empty, self.directory, quiet=True)
        except (ValueError, OSError) as error:
            assert str(error).startswith("load_packed()") or isinstance(error, hf_fastpath.UnsupportedModelError), error
            return True
        self._empty = None
        found = self._tensors(model)
        assert found.keys() == self._expected.keys()
        for name, value in self._expected.items():
            same = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
            assert same, f"{name} is another one, and nobody noticed"
        return False


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    return Target(tmp_path_factory.mktemp("fuzz"))


def test_flipped_bits_are_noticed(target):
    draw = random.Random(0)
    index = target.content[INDEX]
    places = []
    at = index.find(b'"multiplier": ')
    end = index.find(b"\n", at)
    places += [(INDEX, byte, bit) for byte in range(at, end) for bit in range(8)]
    for name, content in target.content.items():
        if name.startswith("packed"):
            count = 100 if name == INDEX else 15
            places += [(name, draw.randrange(len(content)), draw.randrange(8)) for _ in range(count)]
            places += [(name, draw.randrange(min(len(content), 200)), draw.randrange(8)) for _ in range(5)]
    refused = 0
    for name, byte, bit in places:
        content = bytearray(target.content[name])
        content[byte] ^= 1 << bit
        (target.directory / name).write_bytes(content)
        is_refused = target.is_refused()
        # the index's values are checked, not its bytes: a space may become a tab
        assert is_refused or name == INDEX and content[byte] in b" \t\r\n", f"{name}, byte {byte}, bit {bit}"
        refused += is_refused
        (target.directory / name).write_bytes(target.content[name])
    assert refused > 0.9 * len(places)


def test_files_that_are_cut_off_or_longer(target):
    for name, content in target.content.items():
        if not name.startswith("packed"):
            continue
        for other in (b"", content[:7], content[: len(content) // 2], content[:-1], content + b"\0", content * 2):
            if other.strip() == content.strip():
                continue  # this ends a line
            (target.directory / name).write_bytes(other)
            assert target.is_refused(), f"{name}, {len(other)} of {len(content)} bytes"
        target.restore()


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield where the values of a JSON text are."""
    if path:
        yield path
    if isinstance(value, (dict, list)):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        # the names of an object that is a table are alike
        chosen = keys if len(path) < 2 or len(keys) <= 8 else keys[:MANY]
        for key in chosen:
            yield from places(value[key], (*path, key))


def with_value(content: Any, path: tuple, value: Any) -> Any:
    """Return a copy of ``content`` with another value, or without the value if it is ``del``."""
    copy = json.loads(json.dumps(content))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    if value is del_:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return copy


del_ = object()


@pytest.mark.parametrize("is_sealed", (False, True), ids=("edited", "with a right checksum"))
def test_rewritten_values_of_the_index(is_sealed, target):
    """This includes values with the right checksum: no value that cannot be is used."""
    said = unsealed(target.content[INDEX])
    tried = [(path, value) for path in places(said) for value in (*VALUES, DEEP, del_)]
    draw = random.Random(0)
    draw.shuffle(tried)
    refused = 0
    tried = tried[:600] if is_sealed else tried[:60]
    for path, value in tried:
        changed = with_value(said, path, value)
        if changed == said and type(value) is type(said):
            continue
        seal = json.loads(target.content[INDEX])["sha256"]
        (target.directory / INDEX).write_text(sealed(changed) if is_sealed else json.dumps(changed | {"sha256": seal}))
        is_refused = target.is_refused()
        assert is_refused or is_sealed or changed == said, path
        refused += is_refused
    target.restore()
    assert refused > 0.7 * len(tried)


def test_values_are_within_their_ranges(target):
    """Each wrong value is in the one place where it would do harm, with a right checksum."""
    said = unsealed(target.content[INDEX])
    own = said[KEY]
    layer = (KEY, "model", "weights", "model.layers.0.mlp.gate_proj")
    tensor = (KEY, "tensors", "lm_head.weight")
    file = said["weight_map"]["lm_head.weight"]
    for path, value in (
        *(((*layer, "multiplier"), value) for value in (0.0, -0.5, 3.0, 2.0**128, 1, True, "1.0", 5e-324 * 3)),
        *(((*layer, "rounding"), value) for value in (None, [], ["fp8_block"], ["none", 0.0], ["int8_outliers", -1.0])),
        *(((*layer, "in_features"), value) for value in (0, -1, 10**30, 112.0, True)),
        *(((*layer, "out_features"), value) for value in (0, -1, 10**30, 204.0, True)),
        *(((*tensor, 0), value) for value in ("float33", "Tensor", "load", 3)),
        *(((*tensor, 1), value) for value in ([-1, 112], [10**30, 0], [307], [307, 112, 1], 34384, [307, "112"])),
        *(((*tensor, 2), value) for value in (-8, 10**30, 1, own["files"][file][0])),
        *(((KEY, "files", file, 0), value) for value in (-1, 10**30, 0, own["files"][file][0] + 1)),
        *(((KEY, "files", file, 1), value) for value in ("", "0" * 64, own["files"][file][1].upper())),
        ((KEY, "model", "joined"), own["model"]["joined"] * 2),
        ((KEY, "model", "tied"), {"lm_head.weight": "model.norm.weight"}),
        ((KEY, "model", "tied"), {"x": "y"}),
        ((KEY, "model", "options"), {"weights": "int9", "lm_head": "fp16"}),
        ((KEY, "placed"), ["../config.json"]),
        ((KEY, "save_id"), "../../../../../"),
    ):
        (target.directory / INDEX).write_text(sealed(with_value(said, path, value)))
        assert target.is_refused(), (path, value)
    target.restore()


def test_rewritten_values_of_the_config(target):
    """Checksums are right; an error of transformers, or sizes that do not fit, give one documented error."""
    said = unsealed(target.content[INDEX])
    name = next(name for name in said[KEY]["files"] if name.endswith("-config.json"))
    config = json.loads(target.content[name])
    draw = random.Random(0)
    small = [value for value in (*VALUES, del_) if value is del_ or "1000000" not in repr(value)]
    tried = [(path, value) for path in places(config) for value in small]
    refused = 0
    for path, value in draw.sample(tried, 60):
        text = json.dumps(with_value(config, path, value)).encode()
        (target.directory / name).write_bytes(text)
        files = said[KEY]["files"] | {name: [len(text), digest([memoryview(text)])]}
        (target.directory / INDEX).write_text(sealed(with_value(said, (KEY, "files"), files)))
        refused += target.is_refused(by_directory=True)
    for text in (b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model_type": "nothing"}', b'{"model_type": "bert"}'):
        (target.directory / name).write_bytes(text)
        files = said[KEY]["files"] | {name: [len(text), digest([memoryview(text)])]}
        (target.directory / INDEX).write_text(sealed(with_value(said, (KEY, "files"), files)))
        assert target.is_refused(by_directory=True), text
    target.restore()
    assert refused > 10
    assert not target.is_refused(by_directory=True)
