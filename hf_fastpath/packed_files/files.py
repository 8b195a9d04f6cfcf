"""Reading files of packed weights. Everything in them is compared with the index's checksums before it is used.

``folder.py`` writes the files, and ``file_index.py`` describes the index. A packed weight ``name`` is stored as the
tensors ``name.quants``, ``name.scales`` and, if its format has zero points, ``name.zeros``; every other tensor is
stored under its name in the model.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn

from .file_index import (
    AGAIN,
    INDEX,
    KEY,
    STRETCH,
    Entry,
    Header,
    Index,
    Unsealed,
    digest,
    digest_of_stretch,
    joined_digest,
    unsealed,
)
from .folder import THREADS, files_of_version_1
from .plain_files import MOST_BYTES, read_plain


def not_persistent(model: nn.Module) -> list[str]:
    """Return the names of a model's buffers that no checkpoint of transformers holds."""
    modules = model.named_modules(remove_duplicate=False)
    return [f"{at}.{name}".lstrip(".") for at, module in modules for name in sorted(module._non_persistent_buffers_set)]


def _read_index(directory: Path) -> Index:
    """Read the index of a folder.

    Raises:
        ValueError: there is no index, or it is damaged, of another version, or another program's.
        OSError: the index cannot be read.
    """
    path = directory / INDEX
    try:
        _check_place(path)
        return Index.parse(unsealed(read_plain(path)))
    except (FileNotFoundError, ValueError) as error:
        is_missing = isinstance(error, FileNotFoundError)
        is_foreign = isinstance(error, Unsealed) and KEY not in error.content
        old = files_of_version_1(directory) if is_missing or is_foreign else []
        if old:
            what = (
                f"{directory} was written by an older hf_fastpath ({', '.join(old)}: version 1, which has no checksum "
                "over sizes and multipliers): pack the model anew, with patch(model, weights=...) and "
                "save_packed(model, directory), which replaces these files"
            )
        elif is_missing:
            what = f"{directory} holds no {INDEX}, expected what save_packed() writes there"
        elif is_foreign:
            what = f"{path} is no index of save_packed(): expected what it writes there"
        else:
            what = f"{path} is not what save_packed() wrote ({error}): {AGAIN}"
        raise ValueError(f"load_packed(): {what}") from None


def _check_place(path: Path) -> None:
    """Refuse a link that leads out of a file's folder, except for those in the hub's cache.

    Raises:
        ValueError: the link leads out.
    """
    home, real = Path(os.path.realpath(path.parent)), Path(os.path.realpath(path))
    # snapshots/<revision>/<file> in the hub's cache is a link into blobs/, which lies beside snapshots/
    blobs = [parent.parent / "blobs" for parent in home.parents if parent.name == "snapshots"]
    if not any(real.is_relative_to(root) for root in (home, *blobs)):
        raise ValueError(f"load_packed(): {path} leads out of its folder, to {real}: put the file itself there")


class PackedFiles:
    """The files of a folder, opened; a context manager.

    The index, the files' sizes and the copies of configs are checked when the object is made; :meth:`check` checks the
    tensors' bytes. A save into the folder in the meantime does no harm.

    Attributes:
        header: what the files say about the model.
        entries: every tensor by name.

    Raises:
        ValueError: a file is missing, damaged or of another version.
        OSError: a file cannot be read.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        index = _read_index(directory)
        while True:
            try:
                self._maps = {name: self._open(name, stored.size) for name, stored in index.files.items()}
                break
            except FileNotFoundError as error:
                before, index = index, _read_index(directory)
                if index == before:
                    raise ValueError(
                        f"load_packed(): {directory} lacks {Path(error.filename).name}, which {INDEX} names: copy all "
                        "files of the save"
                    ) from None
        self._index = index
        self.header: Header = index.header
        self.entries: dict[str, Entry] = index.tensors
        self._shards = sorted({entry.file for entry in self.entries.values()})
        for name in index.files.keys() - set(self._shards):
            if (size := index.files[name].size) > MOST_BYTES:
                raise ValueError(
                    f"load_packed(): {directory / name} has {size:,} bytes, expected a file of {MOST_BYTES:,} at most "
                    f"beside the tensors: {AGAIN}"
                )
            self._check_digest(name, digest([memoryview(self._maps[name])]))

    def __enter__(self) -> PackedFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._maps.clear()  # tensors that were read keep their file mapped on their own

    def _open(self, name: str, size: int) -> mmap.mmap | bytes:
        path = self._directory / name
        _check_place(path)
        if not stat.S_ISREG(path.stat().st_mode):  # asked once: another process may replace the file
            raise ValueError(f"load_packed(): {path} is no file: {AGAIN}")
        with open(path, "rb") as file:
            found = os.fstat(file.fileno()).st_size
            if found != size:
                raise ValueError(
                    f"load_packed(): {path} has {found:,} bytes instead of {size:,}: it is cut off or damaged, {AGAIN}"
                )
            # The mapping is private (copy on write), because torch wants writable memory.
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else b""

    def _check_digest(self, name: str, found: str) -> None:
        if found != self._index.files[name].digest:
            raise ValueError(
                f"load_packed(): {self._directory / name} is damaged: its bytes do not have the checksum they were "
                f"saved with. {AGAIN.capitalize()}"
            )

    def check(self) -> None:
        """Hash every file that tensors are read from.

        Raises:
            ValueError: a file is not what was saved.
        """
        with ThreadPoolExecutor(THREADS) as pool:
            for name in self._shards:
                content = self._maps[name]
                view = memoryview(content)

                def hashed(start: int, content: mmap.mmap = content, view: memoryview = view) -> bytes:
                    length = min(STRETCH, len(view) - start)
                    if hasattr(mmap, "MADV_WILLNEED"):
                        content.madvise(mmap.MADV_WILLNEED, start, length)
                    return digest_of_stretch([view[start : start + length]])

                self._check_digest(name, joined_digest(pool.map(hashed, range(0, len(view), STRETCH))))

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor in the mapped memory of its file; :meth:`check` has to have found the file right."""
        entry = self.entries[name]
        dtype = getattr(torch, entry.dtype)
        count = entry.nbytes // dtype.itemsize
        if not count:
            return torch.empty(entry.shape, dtype=dtype)
        return torch.frombuffer(self._maps[entry.file], dtype=dtype, count=count, offset=entry.offset).view(entry.shape)

    def names_beside(self, packed: Iterator[str]) -> set[str]:
        """Return the names of the tensors that are no part of these packed weights."""
        parts = {f"{name}.{part}" for name in packed for part in ("quants", "scales", "zeros", "order")}
        return set(self.entries) - parts

    @property
    def name(self) -> str:
        """The common beginning of the names of the save's files."""
        return self._index.copy_of("")[:-1]

    def configs(self) -> dict[str, bytes]:
        """Return name and content of each file of the model that the save has copied."""
        first = self._index.copy_of("")
        return {name.removeprefix(first): bytes(self._maps[name]) for name in self._maps if name not in self._shards}

    def changed_since(self) -> list[str]:
        """Return the names of the files for other programs that are not what the save put there."""
        changed = []
        for name in self._index.placed:
            path = self._directory / name
            stored = self._index.files[self._index.copy_of(name)]
            try:
                is_same = digest([memoryview(read_plain(path))]) == stored.digest
            except FileNotFoundError:
                continue
            except (OSError, ValueError):
                is_same = False
            if not is_same:
                changed.append(name)
        return changed
