"""Answers that an earlier report computed, kept in the cache folder until the planner or a table changes."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..bench.record import sources
from ..core.cache import cache_folder, load_entry, store_entry
from ..core.device import known
from ..planner.measured import slug
from .combinations import Combination

ENTRY = "report-plans.json.gz"
"""Name of the entry of the cache folder: there is one, which every report replaces, so that it does not grow."""


def own_table(gpu: str) -> Path:
    """The table that `onlinesoftmax tune` makes on this machine for a GPU; it need not exist."""
    return cache_folder() / f"{slug(known(gpu).name)}.json"


def load() -> dict[str, Any]:
    """The stored answers by the keys of their combinations; empty where there are none."""
    content = load_entry(ENTRY)
    if content is None:
        return {}
    found: dict[str, Any] = json.loads(gzip.decompress(content))
    return found


def store(answers: dict[str, Any]) -> None:
    """Replace the stored answers by these, and drop those of other sources of this package."""
    answers = {key: answer for key, answer in answers.items() if key.endswith(sources())}
    store_entry(ENTRY, gzip.compress(json.dumps(answers, separators=(",", ":")).encode(), compresslevel=3))


def keys(combinations: Sequence[Combination]) -> list[str]:
    """A key for each combination, which changes with the sources of this package and with the tables of its GPU."""
    own = {gpu: _digest(own_table(gpu)) for gpu in {combination.gpu for combination in combinations}}
    return [f"{' '.join(map(str, each))} {own[each.gpu]} {sources()}" for each in combinations]


def _digest(path: Path) -> str:
    """A digest of a file; of no bytes where there is none."""
    return hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest()[:16]
