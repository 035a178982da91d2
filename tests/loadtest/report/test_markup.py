"""Elements: what is escaped and what is left out."""

from __future__ import annotations

import pytest

from loadtest.report.blocks import table
from loadtest.report.markup import element, joined, raw
from loadtest.tables import Table


def test_text_and_attributes_are_escaped_and_elements_are_not() -> None:
    inner = element("b", "<i>&")
    assert inner == "<b>&lt;i&gt;&amp;</b>"
    outer = element("p", inner, '"', class_='a"b')
    assert outer == '<p class="a&quot;b"><b>&lt;i&gt;&amp;</b>&quot;</p>'
    assert joined(["<", inner]) == "&lt;<b>&lt;i&gt;&amp;</b>"


def test_attributes() -> None:
    assert element("p", a=None, b=False, c=True, stroke_width=1.5) == '<p c stroke-width="1.5"></p>'
    assert element("p", x=0.001, y=-0.001, z=12.345) == '<p x="0" y="0" z="12.35"></p>'


def test_void_elements_have_no_children() -> None:
    assert element("br") == "<br>"
    with pytest.raises(ValueError, match="no children"):
        element("br", "x")


def test_a_style_cannot_close_its_element() -> None:
    assert raw("a > b") == "a > b"
    with pytest.raises(ValueError, match="closing tag"):
        raw("</style><script>")


def test_a_long_table_says_what_it_leaves_out() -> None:
    html = table(Table(("a", "b"), tuple((str(n), "x") for n in range(130))), "many", ["there"])
    assert html.count("<tr>") == 101
    assert "many (30 more rows are left out)" in html
    assert '<a href="#there">0</a>' in html
