"""Where the files of a configured model or tokenizer lie."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from engine.bundled_model import bundled_model_path


def model_files(path: Path | Literal["bundled"]) -> Path:
    """What `path` in the configuration stands for. Raises ModelLoadError if it is the bundled model
    and that is not installed."""
    return bundled_model_path() if path == "bundled" else path
