"""Build the runtime's libraries from their C source, once, and load them.

torch_npu's libraries name the libraries of CANN that they need; the dynamic linker takes one that is loaded already if its
name (soname) fits. So the libraries are loaded here by their full path and with RTLD_GLOBAL before torch_npu is imported, and
neither LD_LIBRARY_PATH nor a second start of the program is needed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from portable.errors import ConfigurationError

_SOURCE = Path(__file__).parent / "runtime"
_RUNTIME = "libascendcl.so"
# Libraries that torch_npu's list as needed (readelf -d); all symbols it takes from them are in the runtime's one library,
# on which they depend.
_EMPTY = ("libhccl.so", "libacl_op_compiler.so", "libge_runner.so", "libgraph.so", "libacl_tdt_channel.so", "libatb.so")
_SIZES = "built.txt"  # written last
_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")


def cache_folder() -> Path:
    """Where built libraries are kept: PORTABLE_CACHE, or the user's cache folder."""
    base = os.environ.get("PORTABLE_CACHE")
    if base:
        return Path(base) / "host_acl"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "portable" / "host_acl"


def find_compiler() -> str:
    """Path of the C compiler: the variable CC, or cc, gcc, clang.

    Raises:
        ConfigurationError: there is none.
    """
    asked = os.environ.get("CC")
    for name in [asked.split()[0]] if asked and asked.split() else ["cc", "gcc", "clang"]:
        found = shutil.which(name)
        if found:
            return found
    raise ConfigurationError(
        "the host ACL runtime is built from C source on first use, but no C compiler was found "
        f"({f'CC={asked}' if asked else 'cc, gcc and clang are not on PATH'}). Install one (Debian and Ubuntu: "
        "apt install gcc libc6-dev), or name it in the variable CC."
    )


def build(headers: Path) -> Path:
    """The folder with the built libraries, built now if it is not there yet.

    Args:
        headers: ACL's headers of the torch_npu wheel (``torch_npu/include/third_party/acl/inc``).

    Raises:
        ConfigurationError: no C compiler, or it failed; the message has its output.
    """
    sources = sorted(_SOURCE.glob("*.c"))
    if not (headers / "acl" / "acl.h").is_file():
        raise ConfigurationError(
            f"torch_npu's own headers (acl/acl.h) are not in {headers}. Reinstall torch-npu from its wheel."
        )
    folder = cache_folder() / _key(sources, headers)
    if _whole(folder):
        return folder
    compiler = find_compiler()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Built beside its place and moved there whole: processes that start together do not see half a library.
        work = Path(tempfile.mkdtemp(prefix=".build-", dir=folder.parent))
    except OSError as error:
        raise ConfigurationError(
            f"the host ACL runtime is built from C source on first use, but its folder {folder.parent} cannot be written: "
            f"{error.strerror or error}. Name another one in the variable PORTABLE_CACHE."
        ) from error
    try:
        _compile([compiler, *_FLAGS, f"-I{headers}", *map(str, sources)], work / _RUNTIME)
        empty = work / "empty.c"
        empty.write_text("/* no symbols: everything is in " + _RUNTIME + " */\ntypedef int nothing;\n")
        for name in _EMPTY:
            # torch_npu also looks functions up by library and name; the search goes on into what a library depends on.
            _compile([compiler, *_FLAGS, str(empty), "-Wl,--no-as-needed", f"-L{work}", "-lascendcl"], work / name)
        (work / _SIZES).write_text(_sizes(work))
        if folder.exists() and not _whole(folder):
            shutil.rmtree(folder, ignore_errors=True)
        try:
            work.rename(folder)
        except OSError:
            if not _whole(folder):  # otherwise another process was first
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _sizes(folder: Path) -> str:
    """Names and sizes of the libraries in a folder."""
    return "".join(f"{path.name} {path.stat().st_size}\n" for path in sorted(folder.glob("*.so")))


def _whole(folder: Path) -> bool:
    """Whether a folder has all that was built into it: someone may have cleaned the cache in part, or the disk been full."""
    written = folder / _SIZES
    return written.is_file() and written.read_text() == _sizes(folder)


def _key(sources: list[Path], headers: Path) -> str:
    digest = hashlib.sha256(Path(__file__).read_bytes() + repr((_FLAGS, _EMPTY, sysconfig.get_platform())).encode())
    for path in (*sources, *sorted(_SOURCE.glob("*.h")), *sorted((headers / "acl").glob("*.h"))):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(command: list[str], target: Path) -> None:
    command = [*command, "-o", str(target), f"-Wl,-soname,{target.name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigurationError(
            f"building {target.name} of the host ACL runtime failed (exit status {done.returncode}). Command: "
            f"{' '.join(command)}\n{done.stderr.strip()}\nCheck that the C compiler works and has the C library's headers."
        )


def load(folder: Path) -> ctypes.CDLL:
    """Load the libraries for every later library of this process, and return the runtime's.

    Raises:
        ConfigurationError: this is not Linux, or CANN's own runtime is loaded already.
    """
    if not sys.platform.startswith("linux"):
        raise ConfigurationError(f"the host ACL runtime needs Linux, as torch_npu does; this is {sys.platform}.")
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(_RUNTIME)}
    if any(Path(path) != folder / _RUNTIME for path in loaded):
        raise ConfigurationError(
            f"another ACL runtime is loaded already: {', '.join(sorted(loaded))}. Enable the host runtime before anything "
            "loads CANN, in a fresh process."
        )
    runtime = ctypes.CDLL(str(folder / _RUNTIME), mode=ctypes.RTLD_GLOBAL)
    for name in _EMPTY:
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    runtime.host_acl_configure.argtypes = [ctypes.c_char_p, ctypes.c_int32, ctypes.c_uint64, *[ctypes.c_int64] * 3]
    runtime.host_acl_configure.restype = ctypes.c_int
    runtime.host_acl_used.argtypes = [ctypes.c_int32]
    runtime.host_acl_used.restype = ctypes.c_uint64
    return runtime
