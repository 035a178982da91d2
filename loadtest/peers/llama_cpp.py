"""llama.cpp's server, built from the source that llama-cpp-python's sdist carries."""

from __future__ import annotations

import os
import tarfile
from dataclasses import dataclass
from pathlib import Path

from loadtest.peers.peer import HOST, Launch
from loadtest.peers.place import PeerError, Place
from loadtest.peers.weights import bfloat16_gguf
from loadtest.peers.workshop import Workshop

_PACKAGE = "llama-cpp-python"
_VERSION = "0.3.36"
_OPTIONS = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DGGML_OPENMP=ON"),
    *("-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_UI=OFF"),
    *("-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"),
)
_TARGETS = ("llama-server", "llama-quantize")
_READY_S = 120.0
_SLOTS = 8
_CONTEXT_TOKENS = 16_384
"""Of all slots together: 2,048 each, as forebay's own default."""


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """`llama-server` with 8 slots: the weights of the file as they are, or all in bfloat16."""

    name: str
    bfloat16: bool

    @property
    def home(self) -> str:
        """Both variants are one build."""
        return "llama.cpp"

    @property
    def recipe(self) -> str:
        """The source and how it is built."""
        return " ".join((f"{_PACKAGE}=={_VERSION}", *_OPTIONS, *_TARGETS))

    def install(self, workshop: Workshop) -> None:
        """Takes about five minutes on two cores."""
        workshop.require(
            "c++", "g++", "clang++", hint="install a C++ compiler (on Debian: apt-get install g++)"
        )
        workshop.make_venv()
        workshop.pip("install", "cmake", "ninja")
        source = _unpacked(workshop)
        build = _build(workshop.place)
        workshop.compile(
            "configuring llama.cpp",
            ["cmake", "-S", source, "-B", build, "-G", "Ninja", *_OPTIONS],
            directory=workshop.place.root,
        )
        jobs = str(os.cpu_count() or 1)
        workshop.compile(
            f"building llama.cpp with {jobs} jobs",
            ["cmake", "--build", build, "-j", jobs, "--target", *_TARGETS],
            directory=workshop.place.root,
        )

    def prepare(self, workshop: Workshop, model: Path) -> Path:
        """The file itself, or its weights in bfloat16."""
        if not self.bfloat16:
            return model
        return bfloat16_gguf(workshop, model, _program(workshop.place, "llama-quantize"))

    def launch(
        self, place: Place, *, model: Path, served_as: str, threads: int, port: int, key: str | None
    ) -> Launch:
        """As many threads for prompts as for tokens."""
        return Launch(
            command=(
                *(str(_program(place, "llama-server")), "--model", str(model)),
                *("--alias", served_as, "--host", HOST, "--port", str(port)),
                *("--parallel", str(_SLOTS), "--ctx-size", str(_CONTEXT_TOKENS)),
                *("--threads", str(threads), "--threads-batch", str(threads)),
            ),
            environment={} if key is None else {"LLAMA_API_KEY": key},
            ready_path="/health",
            ready_s=_READY_S,
        )


def _unpacked(workshop: Workshop) -> Path:
    """The source of llama.cpp itself, downloaded unless it is there."""
    root = workshop.place.root
    directory = root / f"llama_cpp_python-{_VERSION}"
    source = directory / "vendor" / "llama.cpp"
    if source.exists():
        return source
    workshop.pip(
        *("download", f"{_PACKAGE}=={_VERSION}", "--no-deps", "--no-binary", _PACKAGE),
        *("--dest", root),
    )
    archive = directory.with_name(f"{directory.name}.tar.gz")
    half = root / "unpacking"
    with tarfile.open(archive) as sdist:
        sdist.extractall(half, filter="data")
    (half / directory.name).rename(directory)
    half.rmdir()
    archive.unlink()
    if not source.exists():
        raise PeerError(f"{directory}: there is no vendor/llama.cpp in this sdist")
    return source


def _build(place: Place) -> Path:
    return place.root / "build"


def _program(place: Place, name: str) -> Path:
    return _build(place) / "bin" / name


LLAMA_CPP = LlamaCpp("llama.cpp", bfloat16=False)
LLAMA_CPP_BF16 = LlamaCpp("llama.cpp-bf16", bfloat16=True)
