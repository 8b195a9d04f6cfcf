"""save_packed() is killed, out of space, or beside other files; load_packed() reads files that were changed."""

from __future__ import annotations

import errno
import inspect
import json
import os
import random
import shutil
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
import fresh_process
import pytest
import torch
from models import build, prompt, require_native
from safetensors.torch import save_file
from said import logged
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

import hf_fastpath
from hf_fastpath import compat
from hf_fastpath.packed_files.file_index import INDEX, KEY, sealed, unsealed
from hf_fastpath.packed_files.files import PackedFiles
from hf_fastpath.patching import passed_twins

CPU = torch.device("cpu")
#: files of another program with names like ours
FOREIGN = ("packed_lora.safetensors", "packed-notes.safetensors.txt", "packed.safetensors", "packed-00001.saving", "x")


@pytest.fixture(autouse=True)
def native():
    require_native(CPU)


def packed(seed: int, **changes) -> nn.Module:
    return hf_fastpath.patch(build("llama", seed=seed, num_hidden_layers=1, **changes), weights="int4", quiet=True)


@pytest.fixture(scope="module")
def old() -> nn.Module:
    return packed(1)


@pytest.fixture(scope="module")
def new() -> nn.Module:
    """Make another model, whose config differs as well."""
    return packed(2, max_position_embeddings=999)


def save(model: nn.Module, directory: Path) -> None:
    hf_fastpath.save_packed(model, directory, max_shard_size="150KB")


def content(directory: Path) -> tuple[bytes, dict[str, torch.Tensor]]:
    """Return the config and all tensors, as load_packed() reads them."""
    with PackedFiles(directory) as files:
        files.check()
        return files.configs()["config.json"], {name: files.read(name).clone() for name in files.entries}


def is_same(one: tuple, other: tuple) -> bool:
    return (
        one[0] == other[0]
        and one[1].keys() == other[1].keys()
        and all(torch.equal(tensor, other[1][name]) for name, tensor in one[1].items())
    )


def own_files(directory: Path) -> set[str]:
    """Return the names of the files that an index and the save itself account for."""
    said = unsealed((directory / INDEX).read_bytes())[KEY]
    return {INDEX, ".packed.lock", *said["files"], *said["placed"]}


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


# ---- saves that are broken off -------------------------------------------------------------------------------


class Killed(BaseException):
    """An exception that stands for the end of the process."""


class Counter:
    """Counts what is done to files, and fails from the chosen operation on."""

    OPERATIONS = ("open", "write", "fsync", "replace", "rename", "link", "unlink", "remove", "mkdir", "truncate")

    def __init__(self, first: int | None, last: int | None, make: Callable[[], BaseException]):
        self.count, self._first, self._last, self._make = 0, first, last, make

    @contextmanager
    def watching(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in self.OPERATIONS:
                patch.setattr(os, name, self._wrapped(name, getattr(os, name)))
            yield

    def _wrapped(self, name: str, original):
        def operation(*arguments, **options):
            self.count += 1
            if self._first is not None and self._first <= self.count and self.count <= (self._last or self.count):
                if name == "write":  # half of the bytes are written
                    original(arguments[0], arguments[1][: len(arguments[1]) // 2])
                raise self._make()
            return original(*arguments, **options)

        return operation


def no_space() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(scope="module")
def saves(old, new, tmp_path_factory) -> dict[str, Path]:
    made = {}
    for name, model in (("old", old), ("new", new)):
        made[name] = tmp_path_factory.mktemp(name)
        save(model, made[name])
    return made


@pytest.fixture
def quick(tmp_path) -> Iterator[Path]:
    """A folder in memory, where fsync takes no time, if the system has one."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        yield Path(directory)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("over", "lasts", "make"),
    ((True, True, Killed), (True, False, no_space), (True, True, no_space), (False, True, Killed)),
    ids=("killed", "no space once", "no space", "killed in an empty folder"),
)
def test_a_broken_off_save_leaves_the_old_or_the_new(over, lasts, make, old, new, saves, quick):
    """At every operation, what is there loads and is the old or the new model, and the next save cleans up."""
    contents = {name: content(directory) for name, directory in saves.items()}

    def begin(directory: Path) -> Path:
        directory.mkdir()
        for name in FOREIGN:
            (directory / name).write_bytes(name.encode())
        if over:
            shutil.copytree(saves["old"], directory, dirs_exist_ok=True)
        return directory

    whole = Counter(None, None, make)
    with whole.watching():
        save(new, begin(quick / "whole"))
    found = {"old": 0, "new": 0, "nothing": 0}
    for at in range(1, whole.count + 1):
        directory = begin(quick / str(at))
        # a killed process does nothing afterwards; an error may be over at once
        with Counter(at, None if lasts else at, make).watching():
            try:
                save(new, directory)
                left = {"new"}  # the operation did not matter, for example making a folder that exists
            except (Killed, OSError):
                left = {"old" if over else "nothing", "new"}
        where = f"operation {at} of {whole.count}"
        assert all((directory / name).read_bytes() == name.encode() for name in FOREIGN), where
        if (directory / INDEX).exists():
            now = content(directory)
            state = next((name for name, then in contents.items() if is_same(now, then)), "a mix")
            config = directory / "config.json"
            assert not config.exists() or config.read_bytes() == now[0], f"{where}: the config is another save's"
        else:
            state = "nothing"
        assert state in left, where
        found[state] += 1
        after = ("old", "new")[at % 2]
        save({"old": old, "new": new}[after], directory)
        assert is_same(content(directory), contents[after]), where
        assert names(directory) == own_files(directory) | set(FOREIGN), f"{where} left something for ever"
        assert (directory / "config.json").read_bytes() == contents[after][0], where
        shutil.rmtree(directory)
    assert found["new"] > 3 and found["old" if over else "nothing"] > 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_process_that_ends_in_a_save(saves, quick):
    """Processes really end, and files really cannot grow."""
    script = """
        import os, pathlib, resource, shutil, signal, sys, torch, hf_fastpath
        sys.path.insert(0, sys.argv[3])
        import test_packed_faults as faults

        old, quick = map(pathlib.Path, sys.argv[1:3])
        new, counter = faults.packed(2, max_position_embeddings=999), faults.Counter(None, None, None)

        def end():
            os._exit(9)

        shutil.copytree(old, quick / "whole")
        shutil.copytree(old, quick / "first")
        faults.save(new, quick / "first")  # does more, of what a process does once
        with counter.watching():
            faults.save(new, quick / "whole")
        for at in [*range(1, counter.count + 1, 7), 0]:
            shutil.copytree(old, quick / str(at))
            child = os.fork()
            if not child:
                if at:
                    with faults.Counter(at, None, end).watching():
                        faults.save(new, quick / str(at))
                    os._exit(0)
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
                try:
                    faults.save(new, quick / str(at))
                except OSError:
                    os._exit(9)
                os._exit(0)
            print(at, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    done = fresh_process.run(textwrap.dedent(script), str(saves["old"]), str(quick), str(Path(__file__).parent))
    assert done.returncode == 0, done.stderr
    ended = dict(map(int, line.split()) for line in done.stdout.splitlines())
    assert len(ended) > 6 and set(ended.values()) == {9}
    states = []
    for at in ended:
        model = hf_fastpath.load_packed(quick / str(at), quiet=True)
        states += [name for name, directory in saves.items() if is_same(content(quick / str(at)), content(directory))]
        assert model.config.max_position_embeddings == (999 if states[-1] == "new" else 2048)
    assert len(states) == len(ended) and set(states) == {"old", "new"} and states[-1] == "old"


def test_saves_that_are_broken_off_one_after_the_other(old, new, saves, quick):
    """The second save is also broken off while it cleans up after the first."""
    contents = {name: content(directory) for name, directory in saves.items()}
    draw = random.Random(0)
    for attempt in range(40):
        directory = quick / str(attempt)
        shutil.copytree(saves["old"], directory)
        for model in (new, old, new):
            with Counter(draw.randint(8, 70), None, Killed).watching():
                try:
                    save(model, directory)
                except Killed:
                    pass
            assert sum(is_same(content(directory), then) for then in contents.values()) == 1
        save(old, directory)
        assert is_same(content(directory), contents["old"]) and names(directory) == own_files(directory)
        assert (directory / "config.json").read_bytes() == contents["old"][0]


# ---- what else lies in the folder ----------------------------------------------------------------------------


def test_files_of_others_stay(old, new, saves, tmp_path):
    """Files stay that have the names a save would use: a checkpoint's config, another program's index."""
    others = {"config.json": b'{"model_type": "gpt2"}', "model.safetensors": b"weights", "README.md": b"mine"}
    for name, text in others.items():
        (tmp_path / name).write_bytes(text)
    with logged("leaves config.json in .* as they are"):
        save(old, tmp_path)
    with logged("leaves config.json"):
        save(new, tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in others} == others
    assert is_same(content(tmp_path), content(saves["new"]))
    assert hf_fastpath.load_packed(tmp_path, quiet=True).config.max_position_embeddings == 999
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    for index in (b'{"weight_map": {"x": "model.safetensors"}}', b"{", before[INDEX].replace(b"llama", b"lama_")):
        (tmp_path / INDEX).write_bytes(index)
        with pytest.raises(ValueError, match="another program's, or damaged .* move it away"):
            save(old, tmp_path)
        found = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
        assert found == before | {INDEX: index}


def test_an_edited_config_stays_and_is_told_of(old, new, saves, tmp_path):
    save(old, tmp_path)
    edited = json.loads((tmp_path / "config.json").read_text()) | {"rms_norm_eps": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(edited))
    with logged("config.json in .* are not what save_packed"):
        model = hf_fastpath.load_packed(tmp_path, quiet=True)
    assert model.config.rms_norm_eps == old.config.rms_norm_eps
    with logged("leaves config.json"):
        save(new, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == edited
    (tmp_path / "config.json").unlink()
    save(new, tmp_path)
    assert (tmp_path / "config.json").read_bytes() == content(saves["new"])[0]


@pytest.mark.parametrize("count", (1, 3))
def test_files_of_version_1_are_refused_and_replaced(count, old, saves, tmp_path):
    shards = ["packed.safetensors"] if count == 1 else [f"packed-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for file in shards:
        save_file({f"x{file}": torch.ones(2)}, tmp_path / file, {KEY: json.dumps({"version": 1, "save_id": "0"})})
    lora = "packed-00001-of-00002.safetensors"
    save_file({"lora": torch.ones(3)}, tmp_path / lora)
    if count > 1:
        mapped = {f"x{file}": file for file in shards} | {"lora": lora}
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": mapped}))
    with pytest.raises(ValueError, match=r"older hf_fastpath.*version 1.*pack the model anew"):
        hf_fastpath.load_packed(tmp_path, quiet=True)
    with Counter(30, None, Killed).watching(), pytest.raises(Killed):
        save(old, tmp_path)
    with pytest.raises(ValueError, match=r"older hf_fastpath.*version 1.*pack the model anew"):
        hf_fastpath.load_packed(tmp_path, quiet=True)
    save(old, tmp_path)
    assert is_same(content(tmp_path), content(saves["old"]))
    assert names(tmp_path) == own_files(tmp_path) | {lora}


def test_one_save_at_a_time(old, saves, tmp_path):
    save(old, tmp_path)
    with filelock.FileLock(tmp_path / ".packed.lock"):
        with pytest.raises(TimeoutError, match="another save is under way"):
            save(old, tmp_path)
        assert is_same(content(tmp_path), content(saves["old"]))
    save(old, tmp_path)


def test_loading_while_others_save(old, new, saves, quick):
    contents = [content(directory) for directory in saves.values()]
    save(old, quick)
    is_over = threading.Event()

    def saving():
        while not is_over.is_set():
            save(new, quick)
            save(old, quick)

    thread = threading.Thread(target=saving)
    thread.start()
    try:
        for _ in range(60):
            found = content(quick)
            assert sum(is_same(found, then) for then in contents) == 1
    finally:
        is_over.set()
        thread.join()


def test_files_outside_the_folder_are_refused(old, tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    save(old, inside)
    outside.mkdir()
    shard = next(inside.glob("*-00001-of-*.safetensors"))
    shutil.copy(shard, outside / shard.name)
    text = (inside / INDEX).read_bytes()
    for name in (f"../outside/{shard.name}", str(outside / shard.name), "..", f"{shard.name}/", f"./{shard.name}"):
        said = unsealed(text)
        said[KEY]["files"][name] = said[KEY]["files"].pop(shard.name)
        said["weight_map"] = {key: name if file == shard.name else file for key, file in said["weight_map"].items()}
        (inside / INDEX).write_text(sealed(said))
        with pytest.raises(ValueError, match="a file's name is .*expected packed-[0-9a-f]{16}-... in the same folder"):
            hf_fastpath.load_packed(inside, quiet=True)
    (inside / INDEX).write_bytes(text)
    shard.unlink()
    os.symlink(outside / shard.name, shard)
    with pytest.raises(ValueError, match="leads out of its folder, to .*outside"):
        hf_fastpath.load_packed(inside, quiet=True)
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(ValueError, match="is no file"):
        hf_fastpath.load_packed(inside, quiet=True)


def test_the_cache_of_the_hub(old, saves, tmp_path):
    """In the hub's cache, files are links into a folder beside the snapshot."""
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(saves["old"].glob("*")):
        shutil.copy(path, blobs / str(number))
        os.symlink(f"../../blobs/{number}", snapshot / path.name)
    hf_fastpath.load_packed(snapshot, quiet=True)
    assert is_same(content(snapshot), content(saves["old"]))


def test_a_folder_that_cannot_be_read_or_written(old, saves, tmp_path, monkeypatch):
    def denied(*arguments, **options):
        raise PermissionError(errno.EACCES, "Permission denied", str(arguments[0]))

    shutil.copytree(saves["old"], tmp_path / "copy")
    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(PermissionError, match=INDEX):
        hf_fastpath.load_packed(tmp_path / "copy", quiet=True)
    monkeypatch.undo()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="file"):
        save(old, tmp_path / "file")
    with pytest.raises(ValueError, match="holds no"):
        hf_fastpath.load_packed(tmp_path / "file", quiet=True)


# ---- code that comes with a config ---------------------------------------------------------------------------

CONFIG = """
    from transformers import LlamaConfig

    class PackedTwinConfig(LlamaConfig):
        model_type = "packed_twin"
"""


def with_code(directory: Path) -> None:
    """Write a checkpoint of a Llama under another name, with its code."""
    build("llama", num_hidden_layers=1).save_pretrained(directory)
    code = inspect.getsource(modeling_llama).replace("Llama", "PackedTwin").replace("from ...", "from transformers.")
    code = code.replace("from .configuration_llama", "from .configuration_packed_twin")
    (directory / "modeling_packed_twin.py").write_text(code)
    (directory / "configuration_packed_twin.py").write_text(textwrap.dedent(CONFIG))
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "packed_twin", "architectures": ["PackedTwinForCausalLM"]}
    config["auto_map"] = {
        "AutoConfig": "configuration_packed_twin.PackedTwinConfig",
        "AutoModelForCausalLM": "modeling_packed_twin.PackedTwinForCausalLM",
    }
    (directory / "config.json").write_text(json.dumps(config))


def test_code_of_a_config_runs_only_if_the_caller_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *text: pytest.fail("nobody is asked"))
    source, target = tmp_path / "source", tmp_path / "target"
    with_code(source)
    model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
    hf_fastpath.save_packed(hf_fastpath.patch(model, weights="int4", quiet=True), target)
    shutil.rmtree(source)
    assert AutoConfig.from_pretrained(target, trust_remote_code=True).model_type == "packed_twin"
    for options in ({}, {"trust_remote_code": False}):
        with pytest.raises(ValueError, match="custom code .*pass trust_remote_code=True to run the code"):
            hf_fastpath.load_packed(target, quiet=True, **options)
    (target / "modeling_packed_twin.py").write_text("raise SystemError")  # this was not saved, so nobody runs it
    with logged("modeling_packed_twin.py in .* are not what save_packed"):
        loaded = hf_fastpath.load_packed(target, quiet=True, trust_remote_code=True)
    assert type(loaded).__name__ == "PackedTwinForCausalLM"
    assert torch.equal(loaded(prompt(CPU)).logits, model(prompt(CPU)).logits)


def test_a_listed_model_needs_no_code(old, tmp_path, monkeypatch):
    """Whatever the model's config names, transformers has the class."""
    monkeypatch.setattr("builtins.input", lambda *text: pytest.fail("nobody is asked"))
    names = {"AutoConfig": "nowhere.Config", "AutoModelForCausalLM": "nowhere.Model"}
    monkeypatch.setattr(old.config, "auto_map", names, raising=False)
    save(old, tmp_path)
    assert type(hf_fastpath.load_packed(tmp_path, quiet=True)) is type(old)
    with pytest.raises(ValueError, match="the config saved in .* makes no model .*nowhere"):
        hf_fastpath.load_packed(tmp_path, quiet=True, trust_remote_code=True)


def test_an_untested_transformers_tries_a_twin(old, tmp_path, monkeypatch):
    """The model's own weights are on the meta device at that time."""
    tried, key_of = [], passed_twins.key_of
    monkeypatch.setattr(
        passed_twins, "key_of", lambda twin, *where: tried.append((type(twin).__name__, *where)) or key_of(twin, *where)
    )
    save(old, tmp_path)
    monkeypatch.setattr(compat.versions.transformers, "__version__", "99.1.0")
    hf_fastpath.load_packed(tmp_path, quiet=True)
    assert tried == [("LlamaForCausalLM", torch.device("cpu"), torch.float32)]
