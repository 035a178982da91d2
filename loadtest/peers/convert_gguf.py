"""A GGUF file as a directory in Hugging Face's form: weights in bfloat16, and the tokenizer.

    python convert_gguf.py MODEL.gguf DIRECTORY

A script for another environment's Python, which has transformers and nothing of ours; here, where
transformers may be missing, it can still be imported.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path


def convert(gguf: Path, directory: Path) -> None:
    """Write `directory`. Whatever transformers raises is raised."""
    torch, transformers = import_module("torch"), import_module("transformers")
    of = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **of,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    model.save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(**of).save_pretrained(directory)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
