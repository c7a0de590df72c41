"""Build hook: adds the commit and a few records to the package, which in a checkout stand elsewhere."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

RECORDS = ("h200-cross-entropy.json", "h200-rows1024.json", "h200-token-logprobs.json")
"""Records that `onlinesoftmax report` shows outside a checkout."""


class Hook(BuildHookInterface):
    """Fills the archives.  The wheel of an sdist takes both from the sdist, which has neither history nor records."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files."""
        if version == "editable":
            return
        root, inside = Path(self.root), "src/onlinesoftmax" if self.target_name == "sdist" else "onlinesoftmax"
        added = build_data["force_include"]
        for name in RECORDS:
            if (path := root / "benchmarks" / "results" / name).is_file():
                added[str(path)] = f"{inside}/lab/report/shipped/{name}"
        if commit := commit_of(root):
            self.folder = tempfile.TemporaryDirectory()
            (path := Path(self.folder.name) / "commit.txt").write_text(commit)
            added[str(path)] = f"{inside}/commit.txt"


def commit_of(root: Path) -> str | None:
    """The commit of a checkout, followed by "dirty" where its package differs; None without its history."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An sdist may be unpacked inside another project's checkout.
    if git("ls-files", "--error-unmatch", "src/onlinesoftmax/__init__.py") is None:
        return None
    return f"{git('rev-parse', 'HEAD')}{' dirty' if git('status', '--porcelain', '--', 'src') else ''}\n"
