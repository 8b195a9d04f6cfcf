"""The folder that keeps built libraries and objects: where it is, who may write to it, locks, and what is removed.

``<root>/<key>/`` holds a library with its description and lock. ``<root>/objects/`` holds the compilers' objects; the
name of each has a hash of everything that the object was made from, so that a build that was broken off goes on.
``<root>/twins/`` and ``<root>/heard/`` hold what :mod:`..patching.passed_twins` keeps, and ``<root>/recordings/`` what
:mod:`..recording.kept_recordings` keeps, and ``<root>/families/`` what :mod:`..structural` has found.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .toolchain import BuildError

#: seconds after which a process that waits for another process's build says so
PATIENCE = 2.0
#: seconds after which the next build removes what no build or load has used
KEPT_SECONDS = 30 * 24 * 3600
OBJECTS, TWINS, HEARD, RECORDINGS, FAMILIES = "objects", "twins", "heard", "recordings", "families"
_CHUNK = 1 << 20
_REMEDY = "set HF_FASTPATH_CACHE to a folder of yours"


def root() -> Path:
    """Return the cache folder: ``HF_FASTPATH_CACHE``, or the platform's cache folder for this user.

    Raises:
        BuildError: there is no such folder, e.g. because HOME is unset.
    """
    given = os.environ.get("HF_FASTPATH_CACHE")
    if given:
        return Path(given).absolute()
    try:
        import platformdirs
    except ImportError:
        raise BuildError(f"platformdirs is not installed: pip install platformdirs, or {_REMEDY}") from None
    try:
        found = Path(platformdirs.user_cache_dir("hf_fastpath", appauthor=False))
    except RuntimeError:  # from newer versions of platformdirs; older ones leave the "~" as it is
        found = Path("~")
    if not found.is_absolute():
        raise BuildError(f"this user has no home folder for the build cache: {_REMEDY}")
    return found


def make_folder(folder: Path) -> None:
    """Make ``folder`` and the root that it lies in, writable by the user alone whatever the umask says.

    Raises:
        BuildError: the folder cannot be made or written, or is not safe.
    """
    top = root()
    try:
        top.parent.mkdir(parents=True, exist_ok=True)
        for each in (top, folder):
            each.mkdir(mode=0o755, exist_ok=True)
    except OSError as error:
        raise BuildError(f"the build cache {folder} cannot be made ({error.strerror}): {_REMEDY}") from None
    if reason := why_unsafe(folder):
        raise BuildError(reason)
    if not os.access(folder, os.W_OK):
        raise BuildError(f"the build cache {folder} cannot be written: {_REMEDY}")


def why_unsafe(path: Path) -> str | None:
    """Return why ``path`` in the cache must not be run: someone else may have written it. None if it is safe.

    The library that came with the package is not checked: who can write it can write the Python files beside it.

    Raises:
        OSError: ``path`` is not there.
    """
    if not hasattr(os, "geteuid"):  # Windows has access lists instead; there are no kernels for it
        return None
    top = root()
    between = [each for each in path.parents if each == top or top in each.parents]
    for each in (path, *between):
        found = each.stat()
        if found.st_uid not in (0, os.geteuid()):
            return f"{each} belongs to another user (uid {found.st_uid}) and is not trusted: remove it, or {_REMEDY}"
        if stat.S_IMODE(found.st_mode) & 0o022:
            return f"{each} may be written by other users and is not trusted: remove it, or {_REMEDY}"
    return None


@contextlib.contextmanager
def locked(directory: Path, progress: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold an exclusive lock on ``directory``, so that one process builds while the others wait.

    Raises:
        BuildError: the folder cannot be made, written or locked, or is not safe.
    """
    try:
        import filelock
    except ImportError:
        raise BuildError("filelock is not installed: pip install filelock") from None
    make_folder(directory)
    lock = filelock.FileLock(directory / ".lock")
    try:
        try:
            lock.acquire(timeout=PATIENCE)
        except filelock.Timeout:
            if progress is not None:
                progress("hf_fastpath: waiting for another process that builds the same kernels ...")
            lock.acquire()
    except (OSError, NotImplementedError) as error:
        raise BuildError(f"the build cache {directory} cannot be locked ({error}): {_REMEDY}") from None
    try:
        yield
    finally:
        lock.release()


# ---- libraries ---------------------------------------------------------------------------------------------


def replace(path: Path, content: bytes, mode: int = 0o755) -> None:
    """Put a file in place so that no reader ever sees only a part of it."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_bytes(content)
        scratch.chmod(mode)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def note_file(library: Path) -> Path:
    """Return the path of the description beside a library."""
    return library.with_name(f"{library.name}.json")


def description(library: Path) -> dict | None:
    """Return what the build noted beside ``library``, or None if library and description are not both complete."""
    try:
        info = json.loads(note_file(library).read_text()) if library.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    kinds = {"target": str, "sources": str, "cuda_archs": list, "size": int, "sha256": str}
    if not isinstance(info, dict) or not all(isinstance(info.get(name), kind) for name, kind in kinds.items()):
        return None
    return info if all(isinstance(arch, str) for arch in info["cuda_archs"]) else None


def sha256(path: Path) -> str:
    """Hash a file's content; 3 MB take 2 to 8 ms and 50 MB of CUDA kernels 30 to 120 ms, depending on the processor."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def why_damaged(library: Path) -> str | None:
    """Return why ``library`` must not be loaded, or None. If a part is missing or changed, loading would crash.

    Raises:
        OSError: the library cannot be read.
    """
    info = description(library)
    if info is None:
        return f"{library} has no complete description beside it"
    size = library.stat().st_size
    if size != info["size"]:
        return f"{library} is damaged: {size} bytes, not {info['size']}"
    return None if sha256(library) == info["sha256"] else f"{library} is damaged: its content is not what was built"


# ---- objects -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def workshop() -> Iterator[tuple[Path, Path]]:
    """Make a scratch folder for one build; yield it and the folder of objects on the same disk, which the builds share.

    If the cache cannot be used, both folders are removed at the end, and a build that is broken off has to begin anew.
    """
    with contextlib.ExitStack() as stack:
        try:
            objects = root() / OBJECTS
            make_folder(objects)
            scratch = Path(tempfile.mkdtemp(prefix=".build_", dir=objects))
        except (BuildError, OSError):
            scratch = Path(tempfile.mkdtemp(prefix="hf_fastpath_build_"))
            objects = scratch / OBJECTS
            objects.mkdir()
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        yield scratch, objects


def used(path: Path) -> None:
    """Note that ``path`` was used, so that :func:`clean` keeps it; a cache that cannot be written needs no note."""
    with contextlib.suppress(OSError):
        os.utime(path)


def clean() -> None:
    """Remove objects, scratch folders, libraries and notes that nothing has used for ``KEPT_SECONDS``."""
    try:
        top = root()
        oldest = time.time() - KEPT_SECONDS
        for path in (
            each for folder in (OBJECTS, TWINS, HEARD, RECORDINGS, FAMILIES) for each in top.glob(f"{folder}/*")
        ):
            if path.stat().st_mtime < oldest:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for note in top.glob("*/libhf_fastpath_*.json"):
            if note.stat().st_mtime < oldest:
                shutil.rmtree(note.parent)
    except (BuildError, OSError):
        return  # another process cleans, or this user may not clean the cache; the next build tries again


def keep_log(name: str, text: str) -> Path:
    """Write a build's whole output where the user can find it; return the file."""
    try:
        make_folder(root())
        path = root() / f"{name}.log"
        replace(path, text.encode(errors="replace"), 0o644)
        return path
    except (BuildError, OSError):
        handle, made = tempfile.mkstemp(prefix=f"hf_fastpath_{name}_", suffix=".log")
        with open(handle, "w", errors="replace") as file:
            file.write(text)
        return Path(made)
