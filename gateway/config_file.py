"""From a YAML file, the environment and flags to validated `Settings`.

Later sources win: file (or the embedded default), then `FOREBAY_SECTION__KEY` variables, then
flags. Every mistake of every source is reported at once, one line each.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from gateway.config_tree import items_at, unset_keys, value_at
from gateway.routing_policies import policy_names
from gateway.settings import Settings
from gateway.settings_errors import (
    ConfigError,
    UnreadableConfigError,
    describe,
    did_you_mean,
    locate,
    nearest,
    shown_key,
)
from gateway.settings_errors import Path as KeyPath
from gateway.settings_section import Section
from gateway.settings_unbuilt import take_out_unbuilt, unbuilt_keys
from gateway.state_dir import StateDir
from gateway.tenants import hash_key

VARIABLE_PREFIX = "FOREBAY_"
_FLAGS: Mapping[str, KeyPath] = {
    "--host": ("server", "host"),
    "--port": ("server", "port"),
    "--log-format": ("server", "log_format"),
    "--log-level": ("server", "log_level"),
}
_LARGEST_PREFIX_BYTES = 16 << 20
_TAB = r"found character '\t' that cannot start any token"
_MISINDENTED = frozenset(
    f"expected <block end>, but found '{found}'"
    for found in ("<block mapping start>", "<block sequence start>", "-", "?")
)
BUNDLED_MODEL_NAME = "smollm2-135m-instruct"
DEMO_TENANT = "demo"


def load_settings(
    path: Path | None,
    environ: Mapping[str, str],
    flags: Mapping[str, str] | None = None,
) -> Settings:
    """Read, merge and validate everything; raises ConfigError.

    With all of these mistakes it says which variables for keys are not set; of a configuration
    without any others, `gateway.credentials` says that.

    `path` None is the embedded default: the bundled model and one demo tenant, whose key is made in
    the state directory if it is not there. `flags` maps `--host`, `--port`, `--log-format`,
    `--log-level` or `--model` (a path that replaces the models) to what was given.
    """
    flags = flags or {}
    source = "default configuration" if path is None else str(path)
    tree = _default_tree(StateDir.open(environ)) if path is None else read_yaml(path)
    origins: dict[KeyPath, str] = {}
    mistakes: list[str] = []

    if "--model" in flags:
        tree["models"] = [_model_from_flag(flags["--model"])]
        origins["models",] = "--model"
    for variable, text in sorted(environ.items()):
        if message := _apply_variable(tree, origins, variable, text):
            mistakes.append(f"{variable}: {message}")
    for flag, key in _FLAGS.items():
        if flag in flags:
            _put(tree, key, flags[flag])
            origins[key] = flag

    mistakes += [
        f"{variable}: {message}"
        for variable, message in _unknown_sections(environ).items()
        if variable not in named_variables(tree)
    ]
    mistakes += [
        f"{locate(source, origins, key)}: {message}"
        for key, message in (*take_out_unbuilt(tree), *_read_prefix_files(tree))
    ]
    try:
        settings = Settings.model_validate(tree)
    except ValidationError as error:
        causes = _causes(error)
        mistakes += [_line(source, origins, item) for item in causes]
        wrong = [item["loc"] for item in causes]
        settings = None
    else:
        wrong = []
    mistakes += [
        f"{locate(source, origins, key)}: {message}"
        for key, message in (*_missing_files(tree), *_strange_policy(tree))
        if not _follows(key, wrong)
    ]
    if settings is None or mistakes:
        unset = [message for key, message in unset_keys(tree, environ) if not _follows(key, wrong)]
        raise ConfigError([*mistakes, *unset])
    return settings


def read_yaml(path: Path) -> dict[str, Any]:
    """The file's tree, its relative paths anchored at its own directory; raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such file"]) from None
    except UnicodeDecodeError:
        raise ConfigError([f"{path}: is not UTF-8 text"]) from None
    except OSError as error:
        raise UnreadableConfigError([f"{path}: cannot be read ({error.strerror})"]) from None
    try:
        tree = yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError([f"{place}: {_without_content(error.problem)}"]) from None
    except yaml.YAMLError:
        raise ConfigError([f"{path}: has characters that YAML does not allow"]) from None
    except RecursionError:
        raise ConfigError([f"{path}: is nested too deeply"]) from None
    except (ValueError, OverflowError, LookupError):  # the parser's own, for 2024-99-99 or !!int x
        raise ConfigError([f"{path}: has a value that is none of its type"]) from None
    if not isinstance(tree, dict):
        raise ConfigError([f"{path}: must be a mapping with the keys server, models, tenants"])
    _anchor_paths(tree, path.resolve().parent)
    return tree


class _StrictLoader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice, where YAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{shown_key(key.value)} is given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _without_content(problem: str | None) -> str:
    """YAML's complaint with quoted pieces of the file taken out, for they might be secrets."""
    if problem is None:
        return "is not valid YAML"
    if problem == _TAB:
        return "a tab; YAML is indented by spaces"
    said = re.sub(
        r"'([^']*)'",
        lambda quoted: quoted[0] if len(quoted[1]) < 2 or quoted[1][0] == "<" else "(...)",
        problem,
    )
    return f"{said} (look at the indentation)" if problem in _MISINDENTED else said


def _default_tree(state: StateDir) -> dict[str, Any]:
    return {
        "models": [{"name": BUNDLED_MODEL_NAME, "path": "bundled"}],
        "tenants": [{"id": DEMO_TENANT, "keys": [{"hash": hash_key(state.demo_key())}]}],
    }


def _model_from_flag(given: str) -> dict[str, Any]:
    if given == "bundled":
        return {"name": BUNDLED_MODEL_NAME, "path": given}
    path = _expanded(given).absolute()
    stem = path.stem if path.suffix == ".gguf" else path.name
    name = re.sub(r"[^A-Za-z0-9._:@+-]", "-", stem).lstrip("-._:@+")[:128]
    return {"name": name or "model", "path": str(path)}


def _anchor_paths(tree: dict[str, Any], base: Path) -> None:
    models = tree.get("models")
    for model in models if isinstance(models, list) else []:
        for key in ("path", "tokenizer"):
            if isinstance(model, dict) and model.get(key) != "bundled":
                _anchor(model, key, base)
    prefixes = tree.get("shared_prefixes")
    for prefix in prefixes if isinstance(prefixes, list) else []:
        if isinstance(prefix, dict):
            _anchor(prefix, "file", base)
    server = tree.get("server")
    if isinstance(server, dict) and isinstance(server.get("tls"), dict):
        _anchor(server["tls"], "cert", base)
        _anchor(server["tls"], "key", base)
    if isinstance(redis := tree.get("redis"), dict):
        _anchor(redis, "tls_ca", base)


def _anchor(holder: dict[str, Any], key: str, base: Path) -> None:
    value = holder.get(key)
    if isinstance(value, str) and value:
        holder[key] = str(base / _expanded(value))


def _expanded(given: str) -> Path:
    """With the home directory for `~`; as it is, and so not there, where that is not known."""
    try:
        return Path(given).expanduser()
    except RuntimeError:
        return Path(given)


def _read_prefix_files(tree: dict[str, Any]) -> list[tuple[KeyPath, str]]:
    """Put each shared prefix's file into the tree as its text; returns what is wrong with files."""
    mistakes: list[tuple[KeyPath, str]] = []
    prefixes = tree.get("shared_prefixes")
    for index, prefix in enumerate(prefixes if isinstance(prefixes, list) else []):
        if not isinstance(prefix, dict) or not isinstance(prefix.get("file"), str):
            continue
        if any(prefix.get(other) is not None for other in ("text", "messages")):
            continue  # one too many, which validation says
        try:
            prefix["text"] = _text_of(Path(prefix.pop("file")))
        except ValueError as error:
            mistakes.append((("shared_prefixes", index, "file"), str(error)))
            prefix["text"] = "unread"  # so that validation does not miss it as well
    return mistakes


def _text_of(path: Path) -> str:
    """A file's text as it is, line ends included; raises ValueError saying why there is none."""
    try:
        if not path.is_file():
            raise ValueError(f"no such file: {path}")
        if path.stat().st_size > _LARGEST_PREFIX_BYTES:
            raise ValueError(f"is larger than {_LARGEST_PREFIX_BYTES >> 20} MiB: {path}")
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        raise ValueError(f"is not UTF-8 text: {path}") from None
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror}): {path}") from None
    if not text:
        raise ValueError(f"is empty: {path}")
    return text


def _apply_variable(
    tree: dict[str, Any], origins: dict[KeyPath, str], variable: str, text: str
) -> str | None:
    """Put one variable's value into the tree if it names a key; returns what is wrong, if it is."""
    key = _key_of(variable)
    if key is None or (len(key) > 1 and key[0] not in keys_at(())):
        return None
    for depth, part in enumerate(key):
        known = keys_at(key[:depth])
        if isinstance(part, str) and part not in known:
            return "names no setting" + _variable_meant(key, depth, known)
    try:
        value = yaml.load(text, Loader=_StrictLoader) if text[:1] in ("[", "{") else text
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError, LookupError):
        return "is not a valid list or mapping in YAML"
    if not _put(tree, key, None if text in ("null", "~") else value):
        return "names an item that is not there; the next index may be added, no later one"
    origins[key] = variable
    return None


def _key_of(variable: str) -> KeyPath | None:
    """FOREBAY_MODELS__0__DTYPE -> ("models", 0, "dtype"); None if it cannot be a setting's."""
    if not variable.startswith(VARIABLE_PREFIX):
        return None
    parts = variable[len(VARIABLE_PREFIX) :].lower().split("__")
    if len(parts) == 1 and parts[0] not in keys_at(()):
        return None
    return tuple(int(part) if part.isdecimal() else part for part in parts)


def _unknown_sections(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that look like overrides of a section that does not exist."""
    known = keys_at(())
    unknown = {}
    for variable in sorted(environ):
        key = _key_of(variable)
        if key is not None and key[0] not in known:
            unknown[variable] = "names no setting" + _variable_meant(key, 0, known)
    return unknown


def _variable_meant(key: KeyPath, depth: int, known: list[str]) -> str:
    """`; did you mean FOREBAY_SERVER__PORT?`, or nothing when no `known` name is close to the
    key's part at `depth`."""
    close = nearest(key[depth], known)
    if close is None:
        return ""
    name = "__".join(str(part).upper() for part in (*key[:depth], close, *key[depth + 1 :]))
    return f"; did you mean {VARIABLE_PREFIX}{name}?"


def named_variables(tree: dict[str, Any]) -> set[str]:
    """Variables that the configuration itself refers to; any spelling is theirs to choose."""
    names = set()
    stack: list[Any] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            names |= {
                value
                for key, value in node.items()
                if isinstance(value, str) and (key == "env" or str(key).endswith("_env"))
            }
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)
    return names


def _put(tree: dict[str, Any], key: KeyPath, value: Any) -> bool:
    """Set the value at `key`, making sections and one next list item; False if it cannot be."""
    node: Any = tree
    for part, following in zip(key, (*key[1:], None), strict=True):
        fresh: Any = value if following is None else [] if isinstance(following, int) else {}
        if isinstance(part, int):
            if not isinstance(node, list) or part > len(node):
                return False
            if part == len(node):
                node.append(fresh)
        else:
            if not isinstance(node, dict):
                return False
            if node.get(part) is None:
                node[part] = fresh
        if following is None:
            node[part] = value
        else:
            node = node[part]
    return True


def keys_at(path: KeyPath) -> list[str]:
    """The names of all keys, built or not, in the section at `path`."""
    section: type[Section] | None = Settings
    for part in path:
        if isinstance(part, str):
            fields = section.model_fields.items() if section else ()
            field = next((each for name, each in fields if (each.alias or name) == part), None)
            section = _section_in(field.annotation) if field else None
    named = section.model_fields.items() if section else ()
    return [*(field.alias or name for name, field in named), *unbuilt_keys(path)]


def _section_in(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    found = [_section_in(argument) for argument in get_args(annotation)]
    return next((section for section in found if section), None)


def _causes(error: ValidationError) -> list[Mapping[str, Any]]:
    """The mistakes without those that only follow from others: a list whose items are all wrong
    is not empty."""
    found: list[Mapping[str, Any]] = [dict(item) for item in error.errors(include_url=False)]
    parents = {item["loc"][:length] for item in found for length in range(len(item["loc"]))}
    return [item for item in found if item["type"] != "too_short" or item["loc"] not in parents]


def _line(source: str, origins: Mapping[KeyPath, str], error: Mapping[str, Any]) -> str:
    path: KeyPath = error["loc"]
    known = keys_at(path[:-1])
    shown = path
    if error["type"] in ("extra_forbidden", "invalid_key"):
        shown = (*path[:-1], shown_key(path[-1]))
    return f"{locate(source, origins, shown)}: {describe(error, known)}"


def _follows(key: KeyPath, wrong: Iterable[KeyPath]) -> bool:
    """Whether what is said of a key is said already, of itself or of what it lies in. Such a value
    may be anything, a secret even, and is not to be looked at."""
    return any(key[: len(each)] == each for each in wrong)


def _missing_files(tree: object) -> list[tuple[KeyPath, str]]:
    """Paths that lead nowhere, of a tree that may be wrong elsewhere."""
    named: list[tuple[KeyPath, object]] = [
        (("models", index, key), model.get(key))
        for index, model in items_at(tree, "models")
        for key in ("path", "tokenizer")
        if model.get(key) != "bundled"
    ]
    named += [
        (key, value_at(tree, *key))
        for key in (("server", "tls", "cert"), ("server", "tls", "key"), ("redis", "tls_ca"))
    ]
    return [
        (key, f"no such file or directory: {path}")
        for key, path in named
        if isinstance(path, str | Path) and str(path) and not Path(path).exists()
    ]


def _strange_policy(tree: object) -> list[tuple[KeyPath, str]]:
    policies, key = policy_names(), ("routing", "policy")
    wanted = value_at(tree, *key)
    if not isinstance(wanted, str) or wanted in policies:
        return []
    return [(key, f"is none of {', '.join(policies)}{did_you_mean(wanted, policies)}")]
