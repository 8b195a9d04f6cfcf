"""Writing a save into a folder: every file gets a new name, then one index replaces the former index.

Until the new index is in place, the former index names files that are all there; from then on the new index does. The
files that a save may leave behind, its own files and those of the former index, are listed beforehand in a journal,
``packed-<save id>.saving``. One rule settles a folder, whatever has happened: a file that a journal lists and the index
does not list is removed. A save settles the folder at its end, and the next save settles what a killed save has left.
No other file is ever removed or written over.

Files for other programs, such as ``config.json``, have names that cannot be new. Each save has a copy of such a file
under a new name, and :func:`load_packed` reads the copy. The file itself is removed before the index changes and
restored from the index's copy afterwards, so that it never stands beside another save's weights. The file is left
alone if it is not what the former save put there.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock
import torch
from safetensors import SafetensorError, safe_open

from .. import logs
from .file_index import (
    DTYPES,
    INDEX,
    KEY,
    LAYOUT,
    VERSION,
    Entry,
    Header,
    Index,
    Stored,
    Unsealed,
    digest,
    digest_of_stretch,
    is_own_name,
    joined_digest,
    sealed,
    stretches,
    unsealed,
)
from .plain_files import read_plain

#: threads that hash a file
THREADS = min(8, os.cpu_count() or 1)
_SINGLE_OF_VERSION_1 = "packed.safetensors"
_NAME_OF_VERSION_1 = re.compile(r"packed(-[0-9]{5}-of-[0-9]{5})?\.safetensors")
_LOCK = ".packed.lock"
_JOURNAL = ".saving"
_PART = ".part"


def files_of_version_1(directory: Path) -> list[str]:
    """Return the names of the files that a save of version 1 left here."""
    names: list[Any] = [_SINGLE_OF_VERSION_1]
    try:
        unsealed(read_plain(directory / INDEX))
    except Unsealed as error:
        mapped = error.content.get("weight_map")
        if KEY not in error.content and isinstance(mapped, dict):
            names += sorted(name for name in mapped.values() if isinstance(name, str))
    except (OSError, ValueError):
        pass  # a save of version 1 would have left a readable index
    return [name for name in dict.fromkeys(names) if _is_of_version_1(directory, name)]


def _is_of_version_1(directory: Path, name: str) -> bool:
    """Whether a file has a name that version 1 gave, and its own metadata say that it is of version 1."""
    path = directory / name
    try:
        if not _NAME_OF_VERSION_1.fullmatch(name) or not path.is_file():
            return False
        with safe_open(path, framework="pt") as file:
            return json.loads((file.metadata() or {})[KEY])["version"] == 1
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError):
        return False  # the file is another program's


# ---- what lies in a folder -----------------------------------------------------------------------------------


def _current(directory: Path) -> tuple[Index | None, set[str]]:
    """Return the index (None if there is none, or one of version 1), and the names of the files that belong to it.

    Raises:
        ValueError: the index is not what ``save_packed()`` wrote.
    """
    try:
        index = Index.parse(unsealed(read_plain(directory / INDEX)))
    except FileNotFoundError:
        return None, set(files_of_version_1(directory))
    except ValueError as error:
        old = files_of_version_1(directory)
        if old:
            return None, set(old)
        raise ValueError(
            f"save_packed(): {directory / INDEX} is another program's, or damaged ({error}), and would be lost: move "
            "it away, or save into another folder"
        ) from None
    return index, set(index.files)


def _journals(directory: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield save id and listed names of every journal. A save that was killed over its journal has written no more."""
    for path in sorted(directory.glob(f"packed-*{_JOURNAL}")):
        save_id = path.name.removeprefix("packed-").removesuffix(_JOURNAL)
        if not is_own_name(path.name, save_id):
            continue
        try:
            text, begin = read_plain(path), _journal(save_id, []).partition(b'"files"')[0]
        except (OSError, ValueError):  # no save has put it there
            continue
        if not text.startswith(begin) and not begin.startswith(text):
            continue
        try:
            names = unsealed(text)[KEY]["files"]
        except ValueError:
            names = []
        yield save_id, [name for name in names if _is_removable(directory, name)]


def _journal(save_id: str, names: list[str]) -> bytes:
    return sealed({KEY: {"saving": save_id, "files": names}}).encode()


def _is_removable(directory: Path, name: Any) -> bool:
    """Whether a file that a journal lists is a save's, as far as its name or its metadata can tell."""
    return is_own_name(name) or isinstance(name, str) and _is_of_version_1(directory, name)


def _settle(directory: Path) -> None:
    """Remove files that journals list and the index does not, and restore the index's files for other programs."""
    journals = list(_journals(directory))
    if not journals:
        return
    index, kept = _current(directory)
    for save_id, names in journals:
        for name in names:
            if name not in kept and os.path.lexists(directory / name):
                os.unlink(directory / name)
        for name in () if index is None else index.placed:
            copy, path = directory / index.copy_of(name), directory / name
            if not os.path.lexists(path) and copy.is_file():
                part = directory / f"packed-{save_id}{_PART}"
                _write_new(part, [[memoryview(read_plain(copy))]])
                os.replace(part, path)
    _sync_folder(directory)
    for save_id, _ in journals:
        os.unlink(directory / f"packed-{save_id}{_JOURNAL}")


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Lock a folder against other saves, which would take this save's files for those of a killed save."""
    lock = filelock.FileLock(directory / _LOCK)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise TimeoutError(
            f"save_packed(): another save is under way in {directory}: wait for its end, or choose another folder"
        ) from None
    except NotImplementedError as error:  # from older versions of filelock, if a file system has no locks
        raise OSError(
            f"save_packed() cannot lock a file in {directory}: save into another file system, and copy the folder"
        ) from error
    try:
        yield
    finally:
        lock.release()


# ---- writing -------------------------------------------------------------------------------------------------


def _sync_folder(directory: Path) -> None:
    """Make a folder's names survive a loss of power, if the system supports that."""
    if os.name == "nt":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def _write_new(path: Path, pieces: Iterable[Iterable[memoryview]]) -> None:
    """Write a file that is not there yet, and make it survive a loss of power."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        for piece in pieces:
            for buffer in piece:
                while len(buffer):
                    buffer = buffer[os.write(handle, buffer) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def dtype_name(tensor: torch.Tensor) -> str:
    """Return torch's name of a tensor's type."""
    return str(tensor.dtype).removeprefix("torch.")


def _shards(tensors: Mapping[str, torch.Tensor], limit: int) -> list[list[str]]:
    """Return the names of each file's tensors, wide types first, so that each tensor is aligned to its type."""
    shards: list[list[str]] = [[]]
    room = limit
    for name, tensor in tensors.items():
        if shards[-1] and tensor.nbytes > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= tensor.nbytes
    return [sorted(shard, key=lambda name: -tensors[name].itemsize) for shard in shards]


class _Shard:
    """A file in the safetensors format: its bytes in host memory, and the places of its tensors."""

    def __init__(self, file: str, tensors: dict[str, torch.Tensor], save_id: str):
        said = {"version": VERSION, "layout": LAYOUT, "save_id": save_id}
        head: dict[str, dict] = {"__metadata__": {"format": "pt", KEY: json.dumps(said)}}
        end = 0
        for name, tensor in tensors.items():
            begin, end = end, end + tensor.nbytes
            dtype = DTYPES[dtype_name(tensor)]
            head[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        text = json.dumps(head).encode()
        text += b" " * (-len(text) % 8)
        first = 8 + len(text)
        self._buffers = [memoryview(len(text).to_bytes(8, "little") + text), *map(_bytes_of, tensors.values())]
        self.size = first + end
        self.entries = {
            name: Entry(dtype_name(tensor), list(tensor.shape), first + head[name]["data_offsets"][0], file)
            for name, tensor in tensors.items()
        }

    def write(self, path: Path, pool: ThreadPoolExecutor) -> Stored:
        """Write the file while the pool hashes it."""
        digests: list[Future[bytes]] = []

        def pieces() -> Iterator[list[memoryview]]:
            for piece in stretches(self._buffers):
                digests.append(pool.submit(digest_of_stretch, piece))
                yield piece

        _write_new(path, pieces())
        return Stored(self.size, joined_digest(each.result() for each in digests))


def _content_of(path: Path) -> bytes | None:
    """Return what a small file holds; None if something else is in its place, or nothing."""
    try:
        return read_plain(path)
    except (FileNotFoundError, ValueError):
        return None


def _placing(
    directory: Path, former: Index | None, configs: Mapping[str, bytes]
) -> tuple[list[str], list[str], list[str]]:
    """Decide about files for other programs.

    Returns:
        Names of the files that the save puts into the folder; of those of the former save that it removes; and of those
        that have to stay although they are not what the save would put there.
    """
    placed, taken, foreign = [], [], []
    for name in dict.fromkeys([*(former.placed if former else ()), *configs]):
        path = directory / name
        there = _content_of(path)
        is_ours = (
            former is not None
            and name in former.placed
            and there is not None
            and digest([memoryview(there)]) == former.files[former.copy_of(name)].digest
        )
        if is_ours and there != configs.get(name):
            taken.append(name)
        if name not in configs:
            continue
        if is_ours or not os.path.lexists(path):
            placed.append(name)
        elif there != configs[name]:
            foreign.append(name)
    return placed, taken, foreign


def write(
    directory: Path,
    header: Header,
    tensors: Mapping[str, torch.Tensor],
    limit: int,
    configs: Mapping[str, bytes],
) -> None:
    """Write the files of a save, which replace those of the former save all at once.

    Args:
        limit: bytes of a file at most; a larger tensor has a file for itself.
        configs: name -> content of the files that belong to the model and that other programs read as well.

    Raises:
        OSError: a file cannot be written. The folder then holds the former save or, after a late error, the new save.
        TimeoutError: another save is under way in the folder.
        ValueError: the folder's index is not what ``save_packed()`` wrote; or files have no name for a tensor's type.
    """
    save_id = secrets.token_hex(8)
    own = f"packed-{save_id}"
    for name in configs:
        if not is_own_name(f"{own}-{name}", save_id):
            raise ValueError(f"save_packed() cannot write {name!r} beside the config: its name is not plain ASCII")
    for name, tensor in tensors.items():
        if dtype_name(tensor) not in DTYPES:
            raise ValueError(f"save_packed(): {name} is {dtype_name(tensor)}, expected one of {', '.join(DTYPES)}")
    shards = _shards(tensors, limit)
    names = [f"{own}-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    with _alone(directory):
        former, kept = _current(directory)
        _settle(directory)
        placed, taken, foreign = _placing(directory, former, configs)
        if foreign:
            logs.warn(
                f"hf_fastpath: save_packed() leaves {', '.join(foreign)} in {directory} as they are: another program "
                "made them, or an edit. load_packed() reads the save's own copies; other programs do not"
            )
        copies = {f"{own}-{name}": content for name, content in configs.items()}
        part = directory / f"{own}{_PART}"
        try:
            listed = [*names, *copies, part.name, *sorted(kept)]
            _write_new(directory / f"{own}{_JOURNAL}", [[memoryview(_journal(save_id, listed))]])
            _sync_folder(directory)
            files: dict[str, Stored] = {}
            entries: dict[str, Entry] = {}
            with ThreadPoolExecutor(THREADS) as pool:
                for file, shard in zip(names, shards):
                    here = {name: tensors[name].detach().cpu().contiguous() for name in shard}
                    made = _Shard(file, here, save_id)
                    files[file] = made.write(directory / file, pool)
                    entries |= made.entries
            for name, content in copies.items():
                view = memoryview(content)
                _write_new(directory / name, [[view]])
                files[name] = Stored(len(view), digest([view]))
            index = Index(save_id, files, entries, placed, header)
            _write_new(part, [[memoryview(sealed(index.content()).encode())]])
            for name in taken:
                os.unlink(directory / name)
            _sync_folder(directory)
            os.replace(part, directory / INDEX)
            _sync_folder(directory)
        finally:
            _settle(directory)
