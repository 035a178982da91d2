"""Figures as a reader likes them: with their unit, no more digits than they are worth."""

from __future__ import annotations

from datetime import datetime

NONE = "–"
_GAP = "\u00a0"  # A figure and its unit stay on one line.


def count(value: float) -> str:
    """A whole number with thousands separators."""
    return f"{value:,.0f}"


def counted(value: int, one: str, many: str | None = None) -> str:
    """`1 request`, `2,000 requests`."""
    return f"{count(value)}{_GAP}{one if value == 1 else many or one + 's'}"


def figure(value: float | None) -> str:
    """Three significant digits, and all digits before the point."""
    if value is None:
        return NONE
    magnitude = float(f"{abs(value):.3g}")  # As it will read, which may be the next power of ten.
    if magnitude >= 100 or magnitude == 0:
        return f"{value:,.0f}"
    if magnitude >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if magnitude >= 1 else f"{value:.2g}"


def duration(ms: float | None) -> str:
    """Milliseconds below a second, seconds below two minutes, then minutes or hours."""
    if ms is None:
        return NONE
    if abs(ms) < 999.5:
        return f"{figure(ms)}{_GAP}ms"
    seconds = ms / 1e3
    if seconds < 119.5:
        return f"{figure(seconds)}{_GAP}s"
    if seconds < 2 * 3600:
        return f"{figure(seconds / 60)}{_GAP}min"
    return f"{figure(seconds / 3600)}{_GAP}h"


def percent(share: float | None) -> str:
    """A share of 0 to 1, with one decimal. What is not quite all or nothing never looks like it."""
    if share is None:
        return NONE
    if 0.9995 <= share < 1:
        return f">{_GAP}99.9{_GAP}%"
    if 0 < share < 0.0005:
        return f"<{_GAP}0.1{_GAP}%"
    text = f"{share:.1%}".removesuffix("%")
    return f"{text.removesuffix('.0') if share in (0, 1) else text}{_GAP}%"


def tick(value: float) -> str:
    """A figure beside an axis: without zeros that say nothing."""
    return _without_zeros(figure(value))


def tick_duration(ms: float) -> str:
    """As `duration`, for an axis."""
    if ms == 0:
        return "0"
    number, _, unit = duration(ms).partition(_GAP)
    return f"{_without_zeros(number)}{_GAP}{unit}"


def tick_percent(share: float) -> str:
    """As `percent`, for an axis."""
    return f"{share * 100:.4g}{_GAP}%"


def target(share: float) -> str:
    """A share that was asked for: `95 %`, `99.9 %`."""
    return f"{share * 100:.6g}{_GAP}%"


def percent_range(low: float, high: float) -> str:
    """`92.8–95.4 %`."""
    return f"{low * 100:.1f}–{high * 100:.1f}{_GAP}%"


def per_second(value: float | None) -> str:
    """A rate."""
    return NONE if value is None else f"{figure(value)}/s"


def usd(value: float | None) -> str:
    """US dollars with three significant digits, at least cents."""
    if value is None:
        return NONE
    if value == 0 or abs(value) >= 1:
        return f"${value:,.2f}"
    return f"${value:.3g}" if abs(value) >= 1e-4 else f"${value:.2e}"


def size(value: float | None) -> str:
    """Bytes in binary units."""
    if value is None:
        return NONE
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{figure(value)}{_GAP}{unit}"
        value /= 1024
    return f"{figure(value)}{_GAP}TiB"


def moment(began_at: str) -> str:
    """`2026-03-01 14:05:09 UTC` for an ISO 8601 time; any other text as it is."""
    try:
        when = datetime.fromisoformat(began_at)
    except ValueError:
        return began_at
    zone = when.tzname() or ""
    return f"{when:%Y-%m-%d %H:%M:%S} {zone}".strip()


def _without_zeros(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text
