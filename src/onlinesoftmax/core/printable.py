"""Text of files, devices and the environment as it may be shown: on a terminal, in a sentence, and on a page."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""A text in which every character that cannot be printed is an escape sequence of Python.

    Control characters can move the cursor, rename the window or hide text; some formatting characters turn the
    direction of writing around, and halves of surrogate pairs cannot be encoded.

    >>> printable("naïve \x1b[2J\n")
    'naïve \\x1b[2J\\n'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
