"""What several files compare with and takes seconds to make."""

from __future__ import annotations

import warnings

import pytest
import transformers

from engine.bundled_model import bundled_model_path
from engine.text_side import TextSide, load_text_side


@pytest.fixture(scope="session")
def bundled_text() -> TextSide:
    """The bundled model's tokenizer and template."""
    return load_text_side(bundled_model_path(), name="bundled")


@pytest.fixture(scope="session")
def bundled_reference() -> transformers.PreTrainedTokenizerBase:
    """Transformers' tokenizer for the same file; not to be changed."""
    path = bundled_model_path()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
