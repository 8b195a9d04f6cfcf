"""The build recipe with stand-ins for the compilers: what it asks of them, and how it fails."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
from stub_compilers import compiled, stub

from hf_fastpath.native import build, build_cache, loader, old_glibc, ptxas_report, toolchain

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    """Make a build cache for the test."""
    for name in ("HF_FASTPATH_TARGETS", "HF_FASTPATH_CUDA_ARCHS", "MAX_JOBS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_FASTPATH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """Use the stub as the C++ compiler, and no nvcc."""
    path = stub(tmp_path / "bin")
    monkeypatch.setenv("CXX", str(path))
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    return path


def test_build_leaves_library_and_description(compiler, tmp_path):
    lines = []
    path = build.build("cpu", tmp_path / "out", progress=lines.append)
    assert path == tmp_path / "out" / build.library_name("cpu") and path.read_text() == "object\n"
    info = build.description(path)
    assert info["sources"] == build.sources_hash("cpu") and info["compiler"] == "stub c++ 1.2.3"
    assert len(lines) == 2 and "building the CPU kernels" in lines[0]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [path.name, f"{path.name}.json"], "scratch is left"


def test_only_files_named_so_get_wider_instructions(compiler, tmp_path):
    build.build("cpu", tmp_path / "out", progress=None)
    calls = (compiler.parent / "log").read_text().splitlines()
    compiles = [call for call in calls if " -c " in call]
    assert len(compiles) == len(build.sources("cpu")) and len(calls) == len(compiles) + 1
    for call in compiles:
        assert ("-mavx2" in call) == any(end in call for end in build.feature_flags()), call
        assert ("-mavx512" in call) == ("_avx512" in call), call
        assert ("-mavx512vnni" in call) == ("_vnni.cpp" in call), call
        assert f"-DTORCH_TARGET_VERSION={build.TORCH_TARGET_VERSION}" in call
        assert "-march=native" not in call, "the library must run on other CPUs"
    link = calls[-1]
    assert "-shared" in link and "-ltorch_cpu" in link and "python" not in link.split("-o")[1].split()[0]


def test_extra_flags_reach_compiler_and_linker(compiler, tmp_path):
    build.build("cpu", tmp_path / "out", progress=None, flags=["-fsanitize=address"])
    calls = (compiler.parent / "log").read_text().splitlines()
    assert all("-fsanitize=address" in call for call in calls)


def test_failing_compiler_is_quoted(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(stub(tmp_path / "bin", status=1)))
    with pytest.raises(build.BuildError, match="building the CPU kernels failed"):
        build.build("cpu", tmp_path / "out", progress=None)
    assert build.description(tmp_path / "out" / build.library_name("cpu")) is None


def test_compiler_that_cannot_tell_its_version_is_a_build_error(monkeypatch, tmp_path):
    """CXX names something that is no compiler."""
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(build.BuildError, match=r"broken --version` fails \(exit status 1\): set CXX"):
        build.cache_dir("cpu")


def test_missing_compiler_gives_a_clear_line(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda *args, **kwargs: None)
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler: install g\+\+ .* or set CXX"):
        toolchain.find_toolchain("cpu")


def test_missing_nvcc_gives_a_clear_line(compiler):
    with pytest.raises(build.BuildError, match="no nvcc: install the CUDA toolkit .* or set CUDA_HOME"):
        toolchain.find_toolchain("cuda")


def test_missing_ninja_gives_a_clear_line(compiler, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda *args, **kwargs: None)
    with pytest.raises(build.BuildError, match="ninja is not installed: pip install ninja"):
        build.build("cpu", tmp_path, progress=None)


def test_missing_sources_give_a_clear_line(compiler, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "_PACKAGE", tmp_path / "hf_fastpath")
    with pytest.raises(build.BuildError, match="csrc.* not installed: reinstall"):
        build.build("cpu", tmp_path, progress=None)


def test_unknown_target_is_named(tmp_path):
    with pytest.raises(build.BuildError, match="unknown target 'rocm', expected one of cpu, cuda"):
        build.build("rocm", tmp_path)


def test_interrupted_build_is_never_taken_for_a_library(compiler, monkeypatch, tmp_path):
    """Whichever file is written last may be missing, in an empty folder or over an older library."""
    out = tmp_path / "out"
    real = build_cache.replace
    for older in (False, True):
        for survivors in (0, 1):
            for path in out.glob("*") if out.exists() else ():
                path.unlink()
            out.mkdir(exist_ok=True)
            library = out / build.library_name("cpu")
            if older:
                library.write_text("older")
                older_info = {"target": "cpu", "sources": "older", "cuda_archs": [], "size": 5, "sha256": ""}
                Path(f"{library}.json").write_text(json.dumps(older_info))
            written = []

            def interrupted(path, content, written=written, survivors=survivors):
                if len(written) == survivors:
                    raise KeyboardInterrupt
                written.append(path)
                real(path, content)

            monkeypatch.setattr(build_cache, "replace", interrupted)
            with pytest.raises(KeyboardInterrupt):
                build.build("cpu", out, progress=None)
            info = build.description(library)
            if info is not None and info["sources"] == build.sources_hash("cpu"):
                assert library.read_text() == "object\n", "an older library is described as made from these sources"


def test_cache_key_follows_what_the_library_is_made_from(compiler, monkeypatch, tmp_path):
    first = build.cache_dir("cpu")
    assert first == build.cache_dir("cpu") and first.parent == tmp_path / "cache"
    compiler.write_text(compiler.read_text().replace("1.2.3", "4.5.6"))
    other_compiler = build.cache_dir("cpu")
    monkeypatch.setattr(build, "sources_hash", lambda target: "0" * 16)
    other_sources = build.cache_dir("cpu")
    assert (
        len(
            {
                first,
                other_compiler,
                other_sources,
                build.cache_dir("cpu", ["80"]),
                build.cache_dir("cpu", ["90a"]),
            }
        )
        == 5
    )


def test_sources_hash_sees_headers(monkeypatch, tmp_path):
    (tmp_path / "common").mkdir()
    (tmp_path / "gemv").mkdir()
    (tmp_path / "gemv" / "gemv_cpu.cpp").write_text("1")
    monkeypatch.setattr(build, "source_dir", lambda: tmp_path)
    seen = {build.sources_hash("cpu")}
    for name in ("common/x.h", "gemv/gemv.cuh"):
        (tmp_path / name).write_text("1")
        seen.add(build.sources_hash("cpu"))
    (tmp_path / "common" / "x.h").write_text("2")
    seen.add(build.sources_hash("cpu"))
    assert len(seen) == 4


def _hold(folder: Path, log: Path) -> None:
    with build.locked(folder):
        with log.open("a") as handle:
            handle.write(f"in {os.getpid()}\n")
        time.sleep(0.2)
        with log.open("a") as handle:
            handle.write(f"out {os.getpid()}\n")


def test_lock_excludes_other_processes(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_hold, args=(tmp_path / "key", tmp_path / "log")) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    lines = (tmp_path / "log").read_text().split()
    assert lines[0::4] == ["in"] * 3 and lines[2::4] == ["out"] * 3 and lines[1::4] == lines[3::4]


# ---- CUDA flags and reports --------------------------------------------------------------------------------


def test_gencode_adds_ptx_of_the_newest_generic_architecture():
    flags = build._gencode(["80", "90a", "120"])
    assert "-gencode=arch=compute_90a,code=sm_90a" in flags
    assert flags[3] == "-gencode=arch=compute_120,code=compute_120"
    assert not any("code=compute" in flag for flag in build._gencode(["80", "90a"])), (
        "there is no PTX for an architecture-specific target"
    )


PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5firstPf' for 'sm_80'
ptxas info    : Function properties for _Z5firstPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 1024 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function '_Z6secondPf' for 'sm_90a'
ptxas info    : Function properties for _Z6secondPf
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 400 bytes cmem[0]
"""


def test_ptxas_report_is_parsed(tmp_path):
    (tmp_path / "gemv_gemv.cu.o.ptxas").write_text(PTXAS)
    first, second = ptxas_report.parse_ptxas(tmp_path / "gemv_gemv.cu.o.ptxas")
    assert tuple(first) == ptxas_report.PTXAS_COLUMNS
    assert tuple(first.values()) == ("gemv_gemv", "_Z5firstPf", "80", "40", "0", "0", "1024")
    assert tuple(second.values()) == ("gemv_gemv", "_Z6secondPf", "90a", "255", "12", "8", "0")


def test_ptxas_report_names_new_spills_once(tmp_path):
    """A spill is new if the table that was there does not have it; the table that is written has it."""
    (tmp_path / "gemv_gemv.cu.o.ptxas").write_text(PTXAS)
    table = tmp_path / "report.csv"
    lines = ptxas_report.write_ptxas_report(tmp_path, table)
    assert len(lines) == 1 and "second" in lines[0] and "sm_90a" in lines[0] and "12 bytes" in lines[0]
    assert table.read_text().splitlines()[0] == ",".join(ptxas_report.PTXAS_COLUMNS)
    assert ptxas_report.write_ptxas_report(tmp_path, table) == []
    (tmp_path / "gemv_gemv.cu.o.ptxas").write_text(PTXAS.replace("12 bytes spill", "40 bytes spill"))
    assert len(ptxas_report.write_ptxas_report(tmp_path, table)) == 1


def test_only_changed_kernels_are_compiled_for_the_report(monkeypatch, tmp_path):
    """A header counts for those that include it; another compiler, and a table that is gone, for all."""
    csrc, table = tmp_path / "csrc", tmp_path / "csrc" / "report.csv"
    for name, content in {
        "common/shared.cuh": "// 1",
        "one/one.cu": '#include "common/shared.cuh"',
        "two/two.cu": "// 2",
        "two/two_cuda.cpp": "// no kernels",
    }.items():
        (csrc / name).parent.mkdir(parents=True, exist_ok=True)
        (csrc / name).write_text(content)
    monkeypatch.setattr(build, "source_dir", lambda: csrc)
    monkeypatch.setattr(build.generated, "update", lambda folder: None)
    says = f"cat >&2 <<'END'\n{PTXAS}END"
    nvcc = stub(tmp_path / "cuda" / "bin", name="nvcc", script=says)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("CXX", str(stub(tmp_path / "bin")))

    def check() -> tuple[list[str], list[str]]:
        spills = build.check_kernels(["80", "90a"], table, progress=None)
        return [Path(each).name for each in sorted(compiled(nvcc))], spills

    names, spills = check()
    assert names == ["one.cu", "two.cu"] and len(spills) == 2 and all("second" in each for each in spills)
    first = table.read_text()
    assert check() == ([], []) and table.read_text() == first
    (csrc / "common" / "shared.cuh").write_text("// another")
    assert check() == (["one.cu"], []) and table.read_text() == first
    stub(tmp_path / "cuda" / "bin", name="nvcc", script=says.replace("12 bytes spill", "40 bytes spill"))
    (csrc / "two" / "two.cu").write_text("// another")
    names, spills = check()
    assert names == ["two.cu"] and len(spills) == 1 and "40 bytes" in spills[0]
    monkeypatch.setattr(toolchain, "version", lambda tool: "another")
    assert check()[0] == ["one.cu", "two.cu"]
    table.unlink()
    (tmp_path / "cache").rename(tmp_path / "old")
    assert check()[0] == ["one.cu", "two.cu"]


def test_libraries_for_several_architectures_are_compressed():
    assert "--compress-mode=size" in build._gencode(["80", "90a"])
    assert "--compress-mode=size" not in build._gencode(["90a"])


def test_command_line_reports_errors(compiler, capsys, tmp_path):
    assert build.main(["cuda", "--output", str(tmp_path)]) == 1
    assert "no nvcc" in capsys.readouterr().err
    assert build.main(["cpu", "--output", str(tmp_path)]) == 0


# ---- the wheel ---------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path):
    """Copy what a wheel is made from, without libraries."""
    made = tmp_path / "tree"
    for folder in ("hf_fastpath", "patches", "csrc"):
        shutil.copytree(ROOT / folder, made / folder, ignore=shutil.ignore_patterns("lib", "__pycache__"))
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE", ".git_archival.txt", ".gitattributes"):
        shutil.copy(ROOT / file, made)
    (made / "hf_fastpath" / "_version.py").unlink(missing_ok=True)  # of a build in this clone
    return made


@pytest.fixture
def compilers(tmp_path):
    """Return an environment with stubs for g++ and nvcc that asks for both libraries."""
    stub(tmp_path / "cuda" / "bin", name="nvcc")
    wanted = {"HF_FASTPATH_TARGETS": "cpu cuda", "HF_FASTPATH_CUDA_ARCHS": "all"}
    return {"CXX": str(stub(tmp_path / "bin")), "CUDA_HOME": str(tmp_path / "cuda")} | wanted


def run_setup(tree: Path, **environment: str) -> subprocess.CompletedProcess:
    """Run ``setup.py bdist_wheel`` in ``tree``, as pip does."""
    names = ("HF_FASTPATH_CACHE", "HOME", "LD_LIBRARY_PATH", "PATH")
    inherited = {name: os.environ[name] for name in names if name in os.environ}
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "-d", "dist"]
    return subprocess.run(command, cwd=tree, env=inherited | environment, capture_output=True, text=True)


def wheel(tree: Path, **environment: str) -> tuple[str, dict[str, bytes], str]:
    """Return the tags of the wheel that ``tree`` makes, its files without the metadata, and what was printed."""
    shutil.rmtree(tree / "dist", ignore_errors=True)
    result = run_setup(tree, **environment)
    assert result.returncode == 0, result.stderr
    (path,) = (tree / "dist").iterdir()
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
    return path.stem.split("-", 2)[2], files, result.stdout


def packaged(tree: Path) -> set[str]:
    """Return what a wheel of ``tree`` holds whatever compilers there are."""
    found = {path.relative_to(tree).as_posix() for path in (tree / "hf_fastpath").rglob("*.py")}
    found.add("hf_fastpath/py.typed")
    for pattern in ("patches/*.py", "csrc/*/*.*"):
        found |= {f"hf_fastpath/{path.relative_to(tree).as_posix()}" for path in tree.glob(pattern)}
    return found


def test_wheel_without_compilers_is_for_any_platform(tree):
    tags, files, printed = wheel(tree, PATH=str(tree))
    assert tags == "py3-none-any" and set(files) == packaged(tree)
    assert printed.count("no C++ compiler: install g++") == printed.count("no cuda kernels in this install: ") == 1


def test_wheel_holds_the_libraries_and_nothing_that_is_gone(tree, compilers):
    """Two wheels are made in one tree: a source and an architecture removed in between are not in the second wheel."""
    removed = [tree / "csrc" / "gemv" / "old_cpu.cpp", tree / "patches" / "old.py"]
    for path in removed:
        path.write_text("")
    lib = {f"hf_fastpath/lib/{build.library_name(target)}{end}" for target in build.TARGETS for end in ("", ".json")}
    for _ in range(2):
        tags, files, _ = wheel(tree, **compilers)
        assert tags.startswith("py3-none-") and tags != "py3-none-any"
        assert set(files) == packaged(tree) | lib
        for path in removed:
            path.unlink(missing_ok=True)


def test_wheel_holds_the_architectures_that_were_asked_for(tree, compilers, monkeypatch):
    """A library that lies in the tree is taken as it is, unless it lacks one of the architectures."""
    for name, value in compilers.items():
        monkeypatch.setenv(name, value)
    build.build("cuda", tree / "hf_fastpath" / "lib", ["80", "90a"], None)
    every = list(build.WHEEL_CUDA_ARCHS)
    for wanted, held in (("80", ["80", "90a"]), ("100", ["100"]), ("all", every)):
        environment = compilers | {"HF_FASTPATH_CUDA_ARCHS": wanted}
        _, files, _ = wheel(tree, **environment)
        assert json.loads(files[f"hf_fastpath/lib/{build.library_name('cuda')}.json"])["cuda_archs"] == held


def test_architectures_that_are_no_architectures_are_named(tree):
    result = run_setup(tree, HF_FASTPATH_CUDA_ARCHS="sm_80;sm_90a")
    assert result.returncode != 0 and "HF_FASTPATH_CUDA_ARCHS is 'sm_80;sm_90a', expected 'all' or" in result.stderr


def test_source_archive_holds_what_a_clone_holds(tree, tmp_path):
    """The archive has tests, documentation, examples and benchmarks, which `make test` needs."""
    for folder in (".ci", ".github", "benchmarks", "docs", "examples", "release", "tests"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith(".") and path.name != "compile_commands.json":
            shutil.copy(path, tree)
    result = subprocess.run(
        [sys.executable, "-B", "setup.py", "-q", "sdist"], cwd=tree, env=os.environ, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    (path,) = (tree / "dist").iterdir()
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    held = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
    left_out = {name for name in held if name.startswith(("dist/", "build/")) or ".egg-info" in name}
    assert held - left_out <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def git(tree: Path, *arguments: str) -> bytes:
    names = [item for key in ("user.name", "user.email") for item in ("-c", f"{key}=nobody")]
    return subprocess.run(["git", *names, *arguments], cwd=tree, check=True, capture_output=True).stdout


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_version_is_the_tags(tree, tmp_path):
    """A clone at a tag has its version, one behind it another; what was packed from the clone has it without git."""
    pytest.importorskip("setuptools_scm", reason="setuptools-scm is not installed")

    def version(folder: Path) -> str:
        done = subprocess.run([sys.executable, "setup.py", "--version"], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        told, written = done.stdout.splitlines()[-1], (folder / "hf_fastpath" / "_version.py").read_text()
        assert f'__version__ = "{told}"' in written
        return told

    assert version(tree) == "0.0", "neither git nor a file says it"
    (tree / ".gitignore").write_text("__pycache__/\n*.egg-info/\ndist/\nhf_fastpath/_version.py\n")
    git(tree, "init")
    git(tree, "add", ".")
    git(tree, "commit", "-m", "first")
    git(tree, "tag", "v7.8.9")
    assert version(tree) == "7.8.9"
    downloaded, packed = tmp_path / "downloaded", tmp_path / "packed"
    downloaded.mkdir()
    subprocess.run(["tar", "x", "-C", downloaded], input=git(tree, "archive", "HEAD"), check=True)
    assert version(downloaded) == "7.8.9"
    subprocess.run([sys.executable, "setup.py", "-q", "sdist"], cwd=tree, check=True, capture_output=True)
    (archive,) = (tree / "dist").iterdir()
    packed.mkdir()
    subprocess.run(["tar", "xf", archive, "-C", packed, "--strip-components=1"], check=True)
    assert version(packed) == "7.8.9"
    git(tree, "commit", "--allow-empty", "-m", "second")
    assert re.match(r"7\.8\.10\.dev1\+g[0-9a-f]+", version(tree))


def test_links_of_the_long_description_are_absolute(tree):
    """The description is shown where no file of the project is beside it."""
    result = subprocess.run(
        [sys.executable, "setup.py", "--long-description"], cwd=tree, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    text = re.sub(r"```.*?```", "", result.stdout, flags=re.S)
    targets = re.findall(r"\]\(([^)\s]+)", text) + re.findall(r"""(?:src|href)=["']([^"']+)["']""", text)
    assert targets and not [target for target in targets if not re.match(r"[a-z]+:|#", target)]
    assert "https://github.com/hf-fastpath/hf_fastpath/blob/main/docs/performance.md" in targets


def test_targets_that_were_asked_for_and_cannot_be_built_stop_the_installation(tree):
    result = run_setup(tree, HF_FASTPATH_TARGETS="cpu", PATH=str(tree))
    assert result.returncode != 0 and "no cpu kernels in this install: no C++ compiler" in result.stderr
    result = run_setup(tree, HF_FASTPATH_TARGETS="gpu")
    assert result.returncode != 0 and "HF_FASTPATH_TARGETS is 'gpu', expected" in result.stderr
    tags, _, printed = wheel(tree, HF_FASTPATH_TARGETS="none")
    assert tags == "py3-none-any" and not printed


# ---- torch's headers ---------------------------------------------------------------------------------------


def test_compile_check_knows_the_oldest_torch_and_sees_what_a_header_lacks(monkeypatch, tmp_path):
    import compile_check

    assert re.fullmatch(r"2\.\d+\.0", compile_check.floor())
    (tmp_path / "include").mkdir()
    monkeypatch.setattr(compile_check, "headers", lambda version: tmp_path)
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    csrc = build.source_dir() / "gemv"
    monkeypatch.setattr(build, "sources", lambda target: [csrc / "gemv_cpu.cpp"])
    (text,) = compile_check.errors("0.0")
    assert "torch/csrc/stable" in build.first_error(text)


# ---- older systems -----------------------------------------------------------------------------------------


def versions(library: Path) -> set[tuple[str, tuple[int, ...]]]:
    """Return the versions of the C and C++ libraries that a library needs."""
    said = subprocess.run(["objdump", "-T", str(library)], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"\*UND\*.*?\((GLIBC|GLIBCXX)_([\d.]+)\)", said)
    return {(name, tuple(map(int, version.split(".")))) for name, version in found}


def asks_for_no_more_than_manylinux_2_28(library: Path) -> bool:
    most = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24)}
    return bool(found := versions(library)) and all(version <= most[name] for name, version in found)


@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
@pytest.mark.skipif(tuple(map(int, platform.libc_ver()[1].split("."))) > (2, 36), reason="linked on a newer glibc")
def test_the_cpu_library_loads_on_older_systems():
    library = loader.status()["cpu"]
    if not library.native:
        pytest.skip("no native library for the CPU here")
    assert asks_for_no_more_than_manylinux_2_28(Path(library.detail)), versions(Path(library.detail))


@pytest.mark.skipif(shutil.which("g++") is None or shutil.which("objdump") is None, reason="no g++ or objdump")
def test_the_shared_cxx_library_is_linked_where_the_compilers_own_search_finds_none(tmp_path):
    source, library = tmp_path / "x.cpp", tmp_path / "x.so"
    source.write_text("#include <sstream>\nvoid f(int x) { std::ostringstream text; text << x; throw text.str(); }\n")
    own_search_left_out = ["g++", "-shared", "-fPIC", "-nodefaultlibs", "-Wl,-z,defs", "-o", str(library), str(source)]
    subprocess.run([*own_search_left_out, *toolchain.shared_cxx_library("g++"), "-lc", "-lgcc_s"], check=True)
    assert "libstdc++.so.6" in needed(library)


def needed(library: Path) -> list[str]:
    said = subprocess.run(["objdump", "-p", str(library)], capture_output=True, text=True, check=True).stdout
    return re.findall(r"NEEDED\s+(\S+)", said)


@pytest.mark.parametrize("target", ("cpu", "cuda"))
@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
def test_libraries_share_the_cxx_library_with_torch(target):
    library = loader.status()[target]
    if not library.native:
        pytest.skip(f"no native library: {target}")
    assert "libstdc++.so.6" in needed(Path(library.detail))


@pytest.mark.skipif(shutil.which("objdump") is None or toolchain.find_nvcc() is None, reason="no objdump or nvcc")
@pytest.mark.skipif(not old_glibc.applies(), reason="another C library")
def test_cudas_static_runtime_loads_on_older_systems(tmp_path):
    source, library = tmp_path / "x.cpp", tmp_path / "x.so"
    source.write_text('extern "C" int cudaMalloc(void**, unsigned long);\nint f() { return cudaMalloc(nullptr, 1); }\n')
    words = old_glibc.stand_ins(os.environ.get("CXX") or "g++", tmp_path)
    command = [toolchain.find_nvcc(), "-shared", "-cudart", "static", "-Xcompiler=-fPIC", "-o", str(library)]
    subprocess.run([*command, str(source), *words], check=True)
    assert asks_for_no_more_than_manylinux_2_28(library), versions(library)
    ctypes.CDLL(str(library))


def test_the_command_line_says_its_version(capsys):
    from hf_fastpath import __version__
    from hf_fastpath.cli import main as cli

    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0 and capsys.readouterr().out == f"hf-fastpath {__version__}\n"
