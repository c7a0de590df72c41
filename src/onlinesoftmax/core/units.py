"""Bytes and microseconds as text, in the unit that is easiest to read."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Bytes in the decimal unit that gives one to three digits before the point.

    >>> size(512), size(411_705_344)
    ('512 B', '411.7 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def duration(microseconds: float) -> str:
    """Microseconds in the unit that gives one to three digits before the point.

    >>> duration(3.14159), duration(12_345.6)
    ('3.1 us', '12.3 ms')
    """
    if microseconds < 1:
        return f"{microseconds * 1e3:.0f} ns"
    if microseconds < 1e3:
        return f"{microseconds:.1f} us"
    if microseconds < 1e6:
        return f"{microseconds / 1e3:.1f} ms"
    return f"{microseconds / 1e6:.1f} s"
