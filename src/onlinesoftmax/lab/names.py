"""Names and shapes that a user writes: they are checked, or read, with an error that quotes them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod

from ..core.wrong_calls import unknown

Shape = tuple[int, ...]

MOST_ELEMENTS = 1 << 60
"""Number of elements that no input has: in float64, their bytes do not fit a signed integer of 64 bits."""


def check_names(what: str, names: Iterable[str], table: Iterable[str]) -> None:
    """Raise a ValueError that lists the table for the first name that is not in it."""
    known = tuple(dict.fromkeys(table))
    for name in names:
        if name not in known:
            raise ValueError(unknown(what, name, known))


def parse_shape(text: str) -> Shape:
    """The shape that a text describes: sizes with x, X, × or * between them; a size may be a power, as in 2^20.

    Raises:
        ValueError: the text describes no shape; the message quotes it.

    Example:
        >>> parse_shape("4096x50257"), parse_shape("1*2^20")
        ((4096, 50257), (1, 1048576))
    """
    sizes = []
    for part in re.split(r"[xX×*]", text.strip()):
        match = re.fullmatch(r"\s*(\d{1,99})(?:\^(\d{1,2}))?\s*", part, re.ASCII)
        if not match:
            raise ValueError(f"shape {text!r}: expected sizes with x between them, as in 4096x50257")
        base = int(match[1])
        # Python's 0^0 is 1.
        if not base:
            raise ValueError(f"shape {text!r}: every size must be at least 1")
        sizes.append(base ** int(match[2] or 1))
    if prod(sizes) >= MOST_ELEMENTS:
        raise ValueError(f"shape {text!r}: more elements than any memory holds")
    return tuple(sizes)


UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
"""Bytes of a unit by its name."""


def parse_bytes(text: str) -> int:
    """The bytes that --memory names: a number, and a unit of UNITS in upper or lower case where it is not bytes.

    Raises:
        ValueError: the text describes no positive number of bytes; the message quotes it.

    Example:
        >>> parse_bytes("600MB"), parse_bytes("1.5 GiB"), parse_bytes("4096")
        (600000000, 1610612736, 4096)
    """
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([a-zA-Z]*)\s*", text, re.ASCII)
    unit = {known.lower(): factor for known, factor in UNITS.items()}.get((match[2] or "B").lower()) if match else None
    found = int(float(match[1]) * unit) if match and unit else 0
    if not 0 < found < 1 << 62:
        raise ValueError(f"--memory {text!r}: expected a positive number of bytes, as in 600MB or 1.5GiB")
    return found
