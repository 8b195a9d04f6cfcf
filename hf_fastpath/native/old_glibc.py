"""Make a library that is linked on a new system load on older ones, where libdl, libpthread and librt are separate.

glibc 2.34 moved these three into libc, with new versions of their functions. CUDA's static runtime calls the functions,
so a library linked today would need 2.34. The linker gets stand-ins for the three libraries with the old versions of
the functions, which newer systems keep; the library then names the three itself. This module never imports torch.
"""

from __future__ import annotations

import platform
import shlex
import subprocess
from pathlib import Path

from .toolchain import BuildError

#: library -> version -> functions that CUDA's static runtime calls
_FUNCTIONS = {
    "libdl.so.2": {
        "GLIBC_2.2.5": "dlopen dlclose dlsym dlvsym dlerror",
        "GLIBC_2.3.4": "dlmopen",
    },
    "libpthread.so.0": {
        "GLIBC_2.2.5": "pthread_create pthread_join pthread_detach pthread_kill pthread_once pthread_key_create "
        "pthread_key_delete pthread_getspecific pthread_setspecific pthread_mutex_trylock pthread_mutexattr_init "
        "pthread_mutexattr_destroy pthread_mutexattr_settype pthread_mutexattr_setpshared pthread_condattr_setpshared "
        "pthread_rwlock_init pthread_rwlock_destroy pthread_rwlock_rdlock pthread_rwlock_tryrdlock "
        "pthread_rwlock_timedrdlock pthread_rwlock_wrlock pthread_rwlock_trywrlock pthread_rwlock_timedwrlock "
        "pthread_rwlock_unlock pthread_rwlockattr_init pthread_rwlockattr_destroy pthread_rwlockattr_setpshared "
        "pthread_spin_init pthread_spin_destroy pthread_spin_lock pthread_spin_trylock pthread_spin_unlock "
        "sem_init sem_destroy sem_wait sem_trywait sem_timedwait sem_post",
    },
    "librt.so.1": {"GLIBC_2.2.5": "shm_open shm_unlink"},
}


def applies() -> bool:
    """Whether this system's C library is glibc on x86_64, whose old versions are listed here."""
    return platform.machine() == "x86_64" and platform.libc_ver()[0] == "glibc"


def stand_ins(cxx: str, folder: Path) -> list[str]:
    """Make the stand-ins in ``folder``; return what the linker gets in front of other libraries.

    Raises:
        BuildError: the compiler fails.
    """
    made = []
    for library, versions in _FUNCTIONS.items():
        stem = folder / library.split(".")[0]
        functions = " ".join(versions.values()).split()
        lines = "".join(f'extern "C" void {name}_() __asm__("{name}"); void {name}_() {{}}\n' for name in functions)
        stem.with_suffix(".cpp").write_text(lines)
        script = "".join(f"{name} {{ {'; '.join(text.split())}; }};\n" for name, text in versions.items())
        stem.with_suffix(".map").write_text(script)
        output = folder / f"{stem.name}_old.so"
        command = [*shlex.split(cxx), "-shared", "-fPIC", "-nostdlib", "-o", str(output), str(stem.with_suffix(".cpp"))]
        command += [f"-Wl,-soname,{library}", f"-Wl,--version-script={stem.with_suffix('.map')}"]
        result = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if result.returncode:
            raise BuildError(f"no stand-in for {library} can be linked: {result.stderr.strip()[-200:]}")
        made.append(str(output))
    return made
