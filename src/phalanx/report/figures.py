"""Values from files as numbers that can be drawn, and numbers as words."""

import math
from typing import Any

_LARGEST = 1e18
NOT_MEASURED = "not measured"


def parse_number(value: Any) -> float | None:
    """Return a value as a float, or None when it is no number that can be drawn (NaN, infinity, text)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # compared before it is converted: an integer may be too large for a float
    return float(value) if -_LARGEST < value < _LARGEST and math.isfinite(value) else None


def short_text(value: Any, limit: int = 240) -> str:
    """Return any JSON value as short text."""
    if isinstance(value, str):
        text = value
    elif isinstance(value, list):
        text = ", ".join(short_text(item, limit) for item in value[:32])
    elif isinstance(value, dict):
        text = ", ".join(f"{key} {short_text(item, limit)}" for key, item in list(value.items())[:32])
    elif value is None:
        text = "none"
    elif isinstance(value, float):
        text = f"{value:.6g}"
    elif isinstance(value, int) and abs(value) > _LARGEST:
        text = "a very large integer"
    else:
        text = str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def format_count(value: Any) -> str:
    """Return a whole number with thousands set apart."""
    shown = parse_number(value)
    return NOT_MEASURED if shown is None else f"{shown:,.0f}".replace(",", "\u2009")


def format_amount(value: Any, digits: int = 4) -> str:
    """Return a number with so many significant digits."""
    shown = parse_number(value)
    return NOT_MEASURED if shown is None else f"{shown:.{digits}g}"


def format_size(value: float) -> str:
    """Return bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_duration(value: Any) -> str:
    """Return seconds as seconds, minutes or hours."""
    seconds = parse_number(value)
    if seconds is None:
        return NOT_MEASURED
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def format_plural(value: float, noun: str) -> str:
    """Return ``1 step`` or ``3 steps``."""
    return f"{format_count(value)} {noun}" if value == 1 else f"{format_count(value)} {noun}s"
