"""Compiles the C++ kernels for the machine that runs them, once, and remembers the result.

The library's name carries everything that could change its code: sources, compiler, flags and the
CPU's features. So one cache directory may serve several machines and versions, and nothing in it
ever goes stale; old files are merely unused.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

_SOURCES = Path(__file__).parent.parent / "native"
_MAIN = "forebay.cpp"
_COMPILE_TIMEOUT_S = 300
_FLAGS = (
    "-O3",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-Wno-psabi",
)


class NativeUnavailable(Exception):
    """The native executor cannot be had here, or not for this model; the message says why."""


def build_library(say: Callable[[str], None]) -> Path:
    """The compiled kernels, from the cache if they are there.

    `say` is told before and after a compilation, which takes seconds. Raises NativeUnavailable when
    switched off (FOREBAY_NATIVE=off), without a compiler, or when it fails.
    """
    compiler = find_compiler()
    command = [compiler, *_FLAGS, _native_flag(), str(_SOURCES / _MAIN)]
    library = cache_directory() / f"native-{_key(compiler)}.so"
    if library.exists():
        return library
    say(f"compiling the CPU kernels with {compiler} (once for this machine)")
    started = time.perf_counter()
    _compile(command, library)
    say(f"compiled the CPU kernels in {time.perf_counter() - started:.1f} s: {library}")
    return library


def find_compiler() -> str:
    """Path of the C++ compiler: $CXX, else c++, g++ or clang++.

    Raises NativeUnavailable when there is none, or none is wanted (FOREBAY_NATIVE=off).
    """
    if os.environ.get("FOREBAY_NATIVE", "").lower() == "off":
        raise NativeUnavailable("switched off by FOREBAY_NATIVE=off")
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else ("c++", "g++", "clang++"):
        path = shutil.which(name)
        if path:
            return path
    raise NativeUnavailable(
        f"CXX={wanted} is not a program" if wanted else "no C++ compiler (c++, g++, clang++) found"
    )


def cache_directory() -> Path:
    """FOREBAY_CACHE_DIR, else $XDG_CACHE_HOME/forebay, else ~/.cache/forebay."""
    own = os.environ.get("FOREBAY_CACHE_DIR")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "forebay"


def _native_flag() -> str:
    return "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"


def _key(compiler: str) -> str:
    """Names what the compiled code depends on: 32 hex digits."""
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        if source.suffix in (".cpp", ".h"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    version = _run([compiler, "--version"])
    for part in (compiler, version.stdout, *_FLAGS, _native_flag(), _cpu_features()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def _cpu_features() -> str:
    """What -march=native goes by, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(command: list[str], library: Path) -> None:
    """Compile into a temporary file beside `library` and move it there, whole or not at all."""
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=library.parent, prefix="native-", suffix=".tmp")
    except OSError as problem:
        raise NativeUnavailable(
            f"cannot write to {library.parent} ({problem.strerror}): set FOREBAY_CACHE_DIR"
        ) from problem
    os.close(handle)
    temporary = Path(name)
    try:
        result = _run([*command, "-o", name])
        if result.returncode:
            raise NativeUnavailable(f"{command[0]} failed: {_first_error(result.stderr)}")
        temporary.chmod(0o755)
        temporary.replace(library)
    finally:
        temporary.unlink(missing_ok=True)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMPILE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise NativeUnavailable(f"{command[0]} does not run: {problem}") from problem


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")
