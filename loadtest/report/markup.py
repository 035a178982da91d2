"""HTML and SVG elements whose text is escaped, because names and reasons come from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_VOID = frozenset({"br", "hr", "meta", "wbr"})

Attribute = str | int | float | bool | None


class Html(str):
    """Text that is markup already. Plain `str` is escaped wherever it meets it."""

    __slots__ = ()


def element(tag: str, /, *children: str, **attributes: Attribute) -> Html:
    """One element. A trailing underscore of an attribute's name is dropped and others become
    hyphens (`class_`, `stroke_width`); None and False leave it out, True has no value, and numbers
    keep two decimals. Raises ValueError for children of an element that can have none."""
    opening = f"<{tag}{''.join(_attribute(*each) for each in attributes.items())}>"
    if tag in _VOID:
        if children:
            raise ValueError(f"<{tag}> has no children")
        return Html(opening)
    return Html(f"{opening}{joined(children)}</{tag}>")


def joined(parts: Iterable[str]) -> Html:
    """Parts behind each other; those that are no markup are escaped."""
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def raw(text: str) -> Html:
    """Our own style or script, which HTML does not unescape. Raises ValueError where it would end
    its element early."""
    if "</" in text:
        raise ValueError("a style or script cannot have a closing tag in it")
    return Html(text)


def coordinate(value: float) -> str:
    """A number for SVG: two decimals at most, no trailing zeros."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _attribute(name: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    written = name.rstrip("_").replace("_", "-")
    if value is True:
        return f" {written}"
    text = coordinate(value) if isinstance(value, float) else str(value)
    return f' {written}="{escape(text)}"'
