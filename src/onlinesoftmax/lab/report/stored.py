"""Answers that an earlier report computed, kept in the cache folder until the planner or a table changes."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...core.cache import UnusableError, cache_folder, load_entry, read_private, report_unused, store_entry
from ...core.cache_size import ANSWERS
from ...core.device import known
from ...planner.measured import slug
from ..bench.record_file import sources
from .combinations import Combination
from .lengths import KINDS


def own_table(gpu: str) -> Path:
    """The table that `onlinesoftmax tune` makes on this machine for a GPU; it need not exist."""
    return cache_folder() / f"{slug(known(gpu).name)}.json"


def load() -> dict[str, Any]:
    """The stored answers by the keys of their combinations; empty where there are none."""
    content = load_entry(ANSWERS)
    if content is None:
        return {}
    try:
        found: dict[str, Any] = json.loads(gzip.decompress(content))
        # Another version may have kept answers for other kinds of rows.
        found = {key: answers for key, answers in found.items() if {*answers} == {*KINDS}}
    except (OSError, EOFError, zlib.error, ValueError, TypeError, AttributeError, RecursionError) as error:
        report_unused(cache_folder() / ANSWERS, error, "the answers are computed again")
        return {}
    return found


def store(answers: dict[str, Any]) -> None:
    """Replace the stored answers by these, and drop those of other sources of this package."""
    answers = {key: answer for key, answer in answers.items() if key.endswith(sources())}
    store_entry(ANSWERS, gzip.compress(json.dumps(answers, separators=(",", ":")).encode(), compresslevel=3))


def keys(combinations: Sequence[Combination]) -> list[str]:
    """A key for each combination, which changes with the sources of this package and with the tables of its GPU."""
    own = {gpu: _digest(own_table(gpu).name) for gpu in {combination.gpu for combination in combinations}}
    return [f"{' '.join(map(str, each))} {own[each.gpu]} {sources()}" for each in combinations]


def _digest(name: str) -> str:
    """A digest of a file of the cache folder; of no bytes where the planner does not read it."""
    try:
        content = read_private(name)
    except UnusableError:
        content = None
    return hashlib.sha256(content or b"").hexdigest()[:16]
