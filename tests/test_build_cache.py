"""The build cache: a broken-off build goes on; who may write what; locks; logs; what is removed."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stub_compilers import compiled, stub

from hf_fastpath import progress
from hf_fastpath.native import build, build_cache, toolchain

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    """Make a build cache for the test."""
    monkeypatch.setenv("HF_FASTPATH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def few(monkeypatch, tmp_path) -> Path:
    """Make three sources with a header each and one shared header, in a folder with a space in its name."""
    csrc = tmp_path / "some sources" / "csrc"
    for name in ("common", "a", "b"):
        (csrc / name).mkdir(parents=True)
    (csrc / "common" / "all.h").write_text("// all\n")
    (csrc / "common" / "c_cpu.cpp").write_text('#include "common/all.h"\n')
    for name in ("a", "b"):
        (csrc / name / f"{name}.h").write_text('#include "common/all.h"\n')
        (csrc / name / f"{name}_cpu.cpp").write_text(f'#include "{name}.h"\n#include "not/there.h"\n')
    monkeypatch.setattr(build, "source_dir", lambda: csrc)
    return csrc


@pytest.fixture
def compiler(monkeypatch, tmp_path) -> Path:
    path = stub(tmp_path / "bin")
    monkeypatch.setenv("CXX", str(path))
    return path


def names(paths: list[str]) -> list[str]:
    return sorted(Path(path).name for path in paths)


# ---- objects -----------------------------------------------------------------------------------------------


def test_a_build_that_was_broken_off_goes_on_where_it_was(few, monkeypatch, tmp_path):
    """The compiler fails at one file; once that is cured, only that file and those after it are compiled."""
    broken = tmp_path / "broken"
    broken.touch()
    script = f'case "$*" in *b_cpu.cpp*) if [ -e "{broken}" ]; then echo "b_cpu.cpp:7:1: error: no"; exit 1; fi;; esac'
    compiler = stub(tmp_path / "bin", script=script)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("MAX_JOBS", "1")
    with pytest.raises(build.BuildError, match="b_cpu.cpp:7: no"):
        build.build("cpu", tmp_path / "out", progress=None)
    before = names(compiled(compiler))
    broken.unlink()
    lines: list[str] = []
    build.build("cpu", tmp_path / "out", progress=lines.append)
    after = names(compiled(compiler))
    assert "b_cpu.cpp" in after and sorted({*before, *after}) == ["a_cpu.cpp", "b_cpu.cpp", "c_cpu.cpp"]
    assert len(before) + len(after) == 4, "a file was compiled twice"
    assert len(after) == 3 or f"{len(after)} of 3 files" in lines[0]
    build.build("cpu", tmp_path / "again", progress=None)
    assert compiled(compiler) == []


INTERRUPTED = """
import os, signal, sys
from pathlib import Path
from hf_fastpath.native import build
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts without
build.source_dir = lambda: Path(sys.argv[1])
os.environ["PID"] = str(os.getpid())
build.build("cpu", Path(sys.argv[2]), progress=None)
"""


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGKILL), ids=("interrupt", "kill"))
def test_an_interrupted_build_goes_on_where_it_was(number, few, tmp_path):
    """Ctrl-C ends the compilers as well; whatever ends the build, no broken object is left."""
    script = f'case "$*" in *b_cpu.cpp*) if [ -n "$PID" ]; then kill -{int(number)} $PID; sleep 60; fi;; esac'
    compiler = stub(tmp_path / "bin", script=script)
    environment = os.environ | {"CXX": str(compiler), "MAX_JOBS": "1", "HF_FASTPATH_NATIVE": "0"}
    command = [sys.executable, "-c", INTERRUPTED, str(few), str(tmp_path / "out")]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, start_new_session=True)
    try:
        started = time.monotonic()
        process.communicate(timeout=55)
        assert process.returncode != 0 and time.monotonic() - started < 55
    finally:
        if number is signal.SIGKILL:
            os.killpg(process.pid, signal.SIGKILL)  # ninja and the compiler outlive a killed Python
    before = names(compiled(compiler))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", str(compiler))
        library = build.build("cpu", tmp_path / "out", progress=None)
    after = names(compiled(compiler))
    assert "b_cpu.cpp" in after and len(before) + len(after) == 4
    assert build_cache.why_damaged(library) is None


def test_objects_follow_what_they_are_made_of(few, compiler, monkeypatch, tmp_path):
    """A source, its header, a shared header, flags, the compiler and torch change; the test sees what is compiled."""

    def build_now(**options) -> list[str]:
        build.build("cpu", tmp_path / "out", progress=None, **options)
        return names(compiled(compiler))

    every = ["a_cpu.cpp", "b_cpu.cpp", "c_cpu.cpp"]
    assert build_now() == every and build_now() == []
    (few / "a" / "a_cpu.cpp").write_text('#include "a.h"\n// changed\n')
    assert build_now() == ["a_cpu.cpp"]
    (few / "b" / "b.h").write_text('#include "common/all.h"\n// changed\n')
    assert build_now() == ["b_cpu.cpp"]
    (few / "common" / "all.h").write_text("// changed\n")
    assert build_now() == every
    assert build_now(flags=["-fsanitize=address"]) == every and build_now() == []
    compiler.write_text(compiler.read_text().replace("1.2.3", "4.5.6"))
    assert build_now() == every
    torch = tmp_path / "torch"
    (torch / "include").mkdir(parents=True)
    (torch / "version.py").write_text("__version__ = '9.9'\n")
    monkeypatch.setattr(toolchain, "find_torch", lambda: torch)
    assert build_now() == every
    moved = few.parent.parent / "elsewhere"
    shutil.copytree(few, moved)
    monkeypatch.setattr(build, "source_dir", lambda: moved)
    assert build_now() == [], "the place of the sources does not matter"


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("name", ("gemv_avx2.cpp", "packed_gemm_amx_avx512_bf16.cpp", "convert_avx2.cpp"))
def test_included_files_are_those_that_the_compiler_reads(name):
    csrc = build.source_dir()
    (source,) = csrc.glob(f"*/{name}")
    flags = next(flags for end, flags in build.feature_flags().items() if name.endswith(end)).split()
    said = subprocess.run(["g++", "-MM", f"-I{csrc}", *flags, str(source)], capture_output=True, text=True, check=True)
    read = {Path(word).resolve() for word in said.stdout.replace("\\\n", " ").split()[1:]}
    assert len(read) > 1 and read <= set(build.included(source))


def test_objects_that_do_not_link_are_made_anew(few, monkeypatch, tmp_path):
    """A machine may have crashed before the objects were on its disk."""
    broken = tmp_path / "broken"
    script = f'case "$*" in *-shared*) if [ -e "{broken}" ]; then rm "{broken}"; exit 1; fi;; esac'
    compiler = stub(tmp_path / "bin", script=script)
    monkeypatch.setenv("CXX", str(compiler))
    build.build("cpu", tmp_path / "out", progress=None)
    (few / "a" / "a_cpu.cpp").write_text("// changed")
    compiled(compiler)
    broken.touch()
    build.build("cpu", tmp_path / "out", progress=None)
    assert names(compiled(compiler)) == ["a_cpu.cpp", "a_cpu.cpp", "b_cpu.cpp", "c_cpu.cpp"]


def test_what_nobody_used_for_long_is_removed(few, compiler, cache, tmp_path):
    build.build("cpu", cache / "key", progress=None)
    old = [cache / "old" / f"{build.library_name('cpu')}.json", cache / "objects" / "old.o"]
    old[0].parent.mkdir()
    for path in (*old, *(cache / "objects").glob("*.o")):
        path.touch()
        os.utime(path, (1, 1))
    build.build("cpu", tmp_path / "out", progress=None)
    assert not old[0].parent.exists() and not old[1].exists()
    assert len(list((cache / "objects").iterdir())) == 3 and (cache / "key").is_dir()


# ---- places ------------------------------------------------------------------------------------------------


def test_spaces_and_dollars_in_every_path(few, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_FASTPATH_CACHE", str(tmp_path / "a $cache: of mine"))
    compiler = stub(tmp_path / "a bin")
    monkeypatch.setenv("CXX", str(compiler))
    library = build.build("cpu", tmp_path / "an $output folder", progress=None)
    assert library.read_text() == "object\n" and len(compiled(compiler)) == 3


def test_a_compiler_with_arguments(few, monkeypatch, tmp_path):
    compiler = stub(tmp_path / "bin")
    monkeypatch.setenv("CXX", f"env A='b c' {compiler} --sysroot=/")
    build.build("cpu", tmp_path / "out", progress=None)
    assert all("--sysroot=/" in call for call in (compiler.parent / "log").read_text().splitlines())


def test_where_the_cache_is(monkeypatch, tmp_path):
    pytest.importorskip("platformdirs", reason="platformdirs is not installed")
    monkeypatch.setenv("HF_FASTPATH_CACHE", "relative")
    assert build_cache.root() == Path.cwd() / "relative"
    monkeypatch.delenv("HF_FASTPATH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build_cache.root() == tmp_path / "hf_fastpath"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(build.BuildError, match="no home folder for the build cache: set HF_FASTPATH_CACHE"):
        build_cache.root()


@pytest.mark.parametrize("place", ("/proc/hf_fastpath", "a file/cache"))
def test_a_cache_that_cannot_be_made_is_named(place, few, compiler, monkeypatch, tmp_path):
    """A build for another folder does without a cache."""
    (tmp_path / "a file").touch()
    monkeypatch.setenv("HF_FASTPATH_CACHE", str(tmp_path / place))
    with pytest.raises(build.BuildError, match="build cache .* cannot be made .*set HF_FASTPATH_CACHE"):
        with build.locked(build_cache.root() / "key"):
            pass
    assert build.build("cpu", tmp_path / "out", progress=None).is_file()


def test_a_read_only_cache_is_named(cache, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # because root may write everywhere
    with pytest.raises(build.BuildError, match="cannot be written: set HF_FASTPATH_CACHE"):
        with build.locked(cache / "key"):
            pass


def test_folders_are_the_users_alone_whatever_the_umask(few, compiler, cache):
    before = os.umask(0)
    try:
        with build.locked(cache / "key"):
            build.build("cpu", cache / "key", progress=None)
    finally:
        os.umask(before)
    made = [path for path in (cache, *cache.rglob("*")) if path.name != ".lock"]
    assert len(made) > 6 and not [path for path in made if path.stat().st_mode & 0o022]
    assert build_cache.why_unsafe(cache / "key" / build.library_name("cpu")) is None


@pytest.mark.parametrize("which", ("cache", "folder", "library"))
@pytest.mark.parametrize("mode", (0o775, 0o757))
def test_what_others_may_write_is_not_trusted(which, mode, cache):
    folder = cache / "key"
    with build.locked(folder):
        library = folder / build.library_name("cpu")
        library.touch(mode=0o755)
    assert build_cache.why_unsafe(library) is None
    path = {"cache": cache, "folder": folder, "library": library}[which]
    path.chmod(mode)
    reason = build_cache.why_unsafe(library)
    assert (
        reason == f"{path} may be written by other users and is not trusted: remove it, or set HF_FASTPATH_CACHE "
        "to a folder of yours"
    )
    if which != "library":
        with pytest.raises(build.BuildError, match="may be written by other users"):
            with build.locked(folder):
                pass


def test_what_belongs_to_others_is_not_trusted(cache, monkeypatch):
    with build.locked(cache / "key"):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(cache).st_uid + 1)
    if os.stat(cache).st_uid != 0:
        assert "belongs to another user" in build_cache.why_unsafe(cache / "key")
    else:
        assert build_cache.why_unsafe(cache / "key") is None, "what root has made everybody may run"
        os.chown(cache / "key", 12345, -1)
        assert "belongs to another user (uid 12345)" in build_cache.why_unsafe(cache / "key")


# ---- errors ------------------------------------------------------------------------------------------------

SAID = {
    "gemv/gemv_cpu.cpp:12: expected ';' before '}' token": """[1/9] gemv/gemv_cpu.cpp
FAILED: [code=1] /x/objects/gemv.o
c++ -c /x/csrc/gemv/gemv_cpu.cpp
/x/csrc/gemv/gemv_cpu.cpp: In function 'int f()':
/x/csrc/gemv/gemv_cpu.cpp:9:3: warning: unused
/x/csrc/gemv/gemv_cpu.cpp:12:3: error: expected ';' before '}' token
/x/csrc/gemv/gemv_cpu.cpp:13:3: error: another
ninja: build stopped: subcommand failed.
""",
    "common/cpu_glue.h:5: cpuid.h: No such file or directory": """FAILED: x
In file included from /x/csrc/a/a_cpu.cpp:3:
/x/csrc/common/cpu_glue.h:5:10: fatal error: cpuid.h: No such file or directory
""",
    'gemv/gemv.cu:33: identifier "x" is undefined': '/x/csrc/gemv/gemv.cu(33): error: identifier "x" is undefined\n',
    "ptxas exploded": "ptxas error   : ptxas exploded\n",
    "Unsupported gpu architecture 'compute_20'": "nvcc fatal   : Unsupported gpu architecture 'compute_20'\n",
    "Killed signal terminated program cc1plus: memory is short, MAX_JOBS=1 compiles one file at a time": (
        "c++: fatal error: Killed signal terminated program cc1plus\n"
    ),
    "unrecognized command-line option '-mamx'": "c++: error: unrecognized command-line option '-mamx'\n",
    "cannot find -ltorch_cpu: No such file": "/usr/bin/ld: cannot find -ltorch_cpu: No such file\n",
    "undefined reference to `f()'": (
        "/usr/bin/ld: /x/objects/a.o: in function `g':\na.cpp:(.text+0x5): undefined reference to `f()'\n"
    ),
    "nothing that a pattern knows": "[0/1] x\nnothing that a pattern knows\nninja: build stopped: subcommand failed.\n",
    "no output": "",
}


@pytest.mark.parametrize("line", SAID)
def test_the_first_error_is_found(line):
    assert build.first_error(SAID[line]) == line


def test_a_failed_build_is_one_line_and_a_log(few, cache, monkeypatch, tmp_path):
    script = 'for i in 1 2 3; do echo "$4/common/all.h:$i:1: error: expected $i"; done; exit 1'
    monkeypatch.setenv("CXX", str(stub(tmp_path / "bin", script=script)))
    with pytest.raises(build.BuildError) as caught:
        build.build("cpu", tmp_path / "out", progress=None)
    log = cache / "build_cpu.log"
    assert str(caught.value) == (
        f"building the CPU kernels failed: common/all.h:1: expected 1 (the whole output: {log})"
    )
    assert "expected 3" in log.read_text() and "FAILED" in log.read_text()


def test_a_full_disk_is_a_build_error(few, compiler, monkeypatch, tmp_path):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build_cache, "replace", full)
    with pytest.raises(build.BuildError, match="No space left on device"):
        build.build("cpu", tmp_path / "out", progress=None)


BROKEN = ("{ half a fi", "[]", "3", "null", '{"target": "cpu"}', "\x00", "[" * 100_000)


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_description_is_none(text, tmp_path):
    library = tmp_path / "lib.so"
    library.write_text("x")
    build_cache.note_file(library).write_text(text)
    assert build.description(library) is None and "no complete description" in build_cache.why_damaged(library)


@pytest.mark.parametrize("name", ("target", "sources", "cuda_archs", "size", "sha256"))
@pytest.mark.parametrize("value", (None, {}, [3], 1.5), ids=str)
def test_a_description_of_wrong_types_is_none(name, value, tmp_path):
    library = tmp_path / "lib.so"
    library.write_text("x")
    right = {"target": "cpu", "sources": "x", "cuda_archs": ["80"], "size": 1, "sha256": build_cache.sha256(library)}
    note = build_cache.note_file(library)
    note.write_text(json.dumps(right))
    assert build.description(library) == right and build_cache.why_damaged(library) is None
    note.write_text(json.dumps(right | {name: value}))
    assert build.description(library) is None


def test_a_damaged_library_is_seen(tmp_path):
    library = tmp_path / "lib.so"
    library.write_text("whole")
    info = {"target": "cpu", "sources": "", "cuda_archs": [], "size": 5, "sha256": build_cache.sha256(library)}
    build_cache.note_file(library).write_text(json.dumps(info))
    assert build_cache.why_damaged(library) is None
    library.write_text("whol")
    assert build_cache.why_damaged(library) == f"{library} is damaged: 4 bytes, not 5"
    library.write_text("whale")
    assert build_cache.why_damaged(library) == f"{library} is damaged: its content is not what was built"


class Terminal(io.StringIO):
    """A terminal that keeps what is written."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("quiet", (False, True))
def test_a_bar_counts_files_on_a_terminal(quiet, few, monkeypatch, tmp_path):
    """The bar comes once a build takes long; in this test it comes at once."""
    monkeypatch.setenv("CXX", str(stub(tmp_path / "bin", script="sleep 0.3")))
    monkeypatch.setenv("MAX_JOBS", "1")
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    lines: list[str] = []
    build.build("cpu", tmp_path / "out", progress=None if quiet else lines.append)
    assert ("hf_fastpath: CPU kernels" in stream.getvalue()) != quiet
    assert ("3/4" in stream.getvalue()) != quiet, "three files and the library"
    assert [line.split(":")[1].split(" ")[1] for line in lines] == ([] if quiet else ["building", "built"])


def test_elsewhere_a_build_is_two_lines(few, compiler, capfd, tmp_path):
    build.build("cpu", tmp_path / "out")
    captured = capfd.readouterr()
    assert len(captured.out.splitlines()) == 2 and captured.err == ""
