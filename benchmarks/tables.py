"""Write every table, figure and measured number of README.md and docs from the records in benchmarks/results.

python benchmarks/tables.py            # or: make tables
python benchmarks/tables.py --check    # writes nothing; the exit code is 1 if a file would change

A page has a line `<!-- generated: NAME -->` before the text of the block NAME, and a line `<!-- end -->` after it.
`pages` has a function for each name, and a function for each chart in docs/charts.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from pages import BLOCKS, CHARTS
from pages.records import Records

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"^(<!-- generated: (\w+) -->)\n.*?^(<!-- end -->)$", re.MULTILINE | re.DOTALL)


def main() -> int:
    """Write the files that change, and name them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file would change")
    check, records = parser.parse_args().check, Records(RESULTS)
    stale = {path: text for path, text in generated(records).items() if _text(path) != text}
    for path, text in stale.items():
        print(path.relative_to(ROOT), "differs from the records" if check else "written")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return int(check and bool(stale))


def generated(records: Records, root: Path = ROOT) -> dict[Path, str]:
    """Every generated file, and every page with generated blocks, as these records make them."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    found = {path: filled(path.read_text(encoding="utf-8"), records) for path in pages}
    return found | {root / "docs" / "charts" / f"{name}.svg": chart(records) for name, chart in CHARTS.items()}


def filled(text: str, records: Records) -> str:
    """A page with its blocks as these records make them.

    Raises:
        ValueError: a block has no function, or its markers are no pair.
    """

    def block(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name not in BLOCKS:
            raise ValueError(f"no function makes the block {name}; there are: {', '.join(BLOCKS)}")
        return f"{begin}\n\n{BLOCKS[name](records)}\n\n{end}"

    result, pairs = BLOCK.subn(block, text)
    for marker in ("<!-- generated: ", "<!-- end -->"):
        if text.count(marker) != pairs:
            raise ValueError(f"{text.count(marker)} markers {marker!r} for {pairs} blocks")
    return result


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
