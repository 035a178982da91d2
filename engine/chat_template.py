"""Messages to token ids through the model's own jinja2 template.

Control tokens in user text stay text. Whoever types "<|im_end|>" into a message must not end the
turn, and must not have the text changed either. So every occurrence in a message's strings gets a
mark (one private-use character found nowhere else) put inside before rendering; afterwards only
the template's own control tokens are intact, they alone become control ids, and the marks are
taken out of the text between them before it is encoded.

The environment is the one that checkpoints are written for: immutable sandbox, trim_blocks,
lstrip_blocks, break and continue, `tojson` without HTML escapes, `raise_exception`,
`strftime_now`, and a transparent `generation` block. The clock is an argument, so that rendering
is a function of its inputs; a template that prints the time still changes its prefix whenever the
printed time does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import ModelLoadError, TemplateError
from engine.tokenizer import Tokenizer

NO_TEMPLATE = "this model has no chat template; use /v1/completions"
MAX_RENDERED_CHARACTERS = 32 << 20
_PRIVATE_USE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class ChatTemplate:
    """One model's template, compiled once. Safe to use from several threads."""

    def __init__(self, source: str | None, tokenizer: Tokenizer) -> None:
        """Raises TemplateError for None (the model has no template) and for a syntax error."""
        if source is None:
            raise TemplateError(NO_TEMPLATE)
        self._template = _compile(source)
        self._source = source
        self._tokenizer = tokenizer

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        now: datetime,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of a conversation.

        `messages` are plain JSON values; keys with null are left out. Ids in the result that are
        control tokens were written by the template. Raises TemplateError when the template
        refuses or fails.
        """
        present = [
            {key: value for key, value in message.items() if value is not None}
            for message in messages
        ]
        texts = [*_strings(present), *_strings(tools)]
        mark = None
        if any(map(self._needs_mark, texts)):
            mark = _unused_character([self._source, *texts])
            present = self._marked(present, mark)
            tools = self._marked(tools, mark)
        rendered = self._render(present, tools, now, add_generation_prompt)
        if mark is None:
            return self._tokenizer.encode(rendered, control_tokens=True)
        rendered = rendered.replace(_escaped(mark), mark)  # a template may print JSON as ASCII
        return self._tokenizer.encode_marked(rendered, mark)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        now: datetime,
        add_generation_prompt: bool,
    ) -> str:
        pieces, size = [], 0
        try:
            for piece in self._template.generate(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                strftime_now=now.strftime,
                **self._tokenizer.named_tokens,
            ):
                size += len(piece)
                if size > MAX_RENDERED_CHARACTERS:
                    _raise(f"the rendered prompt exceeds {MAX_RENDERED_CHARACTERS} characters")
                pieces.append(piece)
        except jinja2.TemplateError as error:
            raise TemplateError(_one_line(error)) from error
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise TemplateError(f"the chat template failed: {_one_line(error)}") from error
        except RecursionError as error:
            raise TemplateError("the chat template failed: too deeply nested") from error
        return "".join(pieces)

    def _needs_mark(self, text: str) -> bool:
        """Whether `text` spells a control token, or ends in the beginning of one, which what the
        template prints next might complete."""
        return bool(self._spelled.search(text)) or self._begun(text) > 0

    def _marked(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return self._marked_text(value, mark)
        if isinstance(value, Mapping):
            return {
                self._marked(key, mark): self._marked(each, mark) for key, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._marked(each, mark) for each in value]
        return value

    def _marked_text(self, text: str, mark: str) -> str:
        """A mark after the first character of every spelling of a control token."""

        def broken(match: re.Match[str]) -> str:
            return match[0][0] + mark + match[0][1:]

        if begun := self._begun(text):
            at = len(text) - begun + 1
            text = text[:at] + mark + text[at:]
        # Breaking one spelling leaves another that overlapped it, hence the loop; a spelling of one
        # character cannot be broken, only marked, hence the pattern that ignores marked ones.
        pattern = re.compile(f"(?:{self._spelled.pattern})(?!{re.escape(mark)})")
        while pattern.search(text):
            text = pattern.sub(broken, text)
        return text

    def _begun(self, text: str) -> int:
        """Length of the longest proper beginning of a control token that `text` ends with."""
        longest = min(len(text), self._longest - 1)
        return next((n for n in range(longest, 0, -1) if text[-n:] in self._beginnings), 0)

    @cached_property
    def _spelled(self) -> re.Pattern[str]:
        return re.compile(self._tokenizer.control_pattern)

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._tokenizer.control_token_strings), default=1)

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(
            text[:length]
            for text in self._tokenizer.control_token_strings
            for length in range(1, len(text))
        )


def check_template(source: str, path: Path) -> None:
    """Raise ModelLoadError, naming the file, unless `source` is a template that compiles."""
    try:
        _compile(source)
    except TemplateError as error:
        raise ModelLoadError(f"{path}: {error}") from error


def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise TemplateError(f"the chat template is malformed: {_one_line(error)}") from error


class _GenerationBlock(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares a plain set

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _strings(key)
            yield from _strings(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)


def _unused_character(texts: Iterable[str]) -> str:
    """A private-use character that occurs in none of the texts, neither plain nor escaped."""
    together = "\n".join(texts)
    used = set(together)
    for code in (code for codes in _PRIVATE_USE for code in codes):
        if chr(code) not in used and _escaped(chr(code)) not in together:
            return chr(code)
    raise TemplateError("the messages use every private-use character there is")


def _escaped(character: str) -> str:
    return json.dumps(character)[1:-1]
