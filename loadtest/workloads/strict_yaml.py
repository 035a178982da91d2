"""YAML whose names are texts, each given once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


class _StrictLoader(yaml.SafeLoader):
    """A key that comes twice is a mistake, not the later one's victory."""


def _mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    mapping: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str) or key in mapping:
            wrong = f"{key} is given twice" if isinstance(key, str) else "a name must be text"
            raise yaml.constructor.ConstructorError(None, None, wrong, key_node.start_mark)
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_tree(path: Path) -> object:
    """What is in a YAML file. Raises ValueError with one line that names the file and, where it is
    known, the place."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ValueError(f"{place}: {error.problem}") from None
    except yaml.YAMLError:
        raise ValueError(f"{path}: has characters that YAML does not allow") from None
    except (ValueError, RecursionError):  # the parser's own, for 2024-99-99 or a thousand brackets
        raise ValueError(f"{path}: has a value that YAML cannot read") from None
