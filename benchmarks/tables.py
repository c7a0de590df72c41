"""Print the Markdown tables of docs/performance.md from recorded runs.

python benchmarks/tables.py benchmarks/results/h200-6d83896-softmax.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def main() -> None:
    """Print the tables of each record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", nargs="+", type=Path, help="JSON record written by `onlinesoftmax bench --out`")
    for path in parser.parse_args().record:
        record = json.loads(path.read_text())
        print(_heading(record, path))
        if record.get("measures") in ("host time", "first calls"):
            print(_calls(record["cases"]))
            continue
        for operation, dtype in dict.fromkeys((case["operation"], case["dtype"]) for case in record["cases"]):
            cases = [case for case in record["cases"] if (case["operation"], case["dtype"]) == (operation, dtype)]
            print(_table(operation, dtype, cases))
        if host := record.get("host"):
            print(_host(host))
            # Records from before losses were measured have no key "cross_entropy".
            if "cross_entropy" in host:
                print(_host(host["cross_entropy"]))


def _heading(record: dict[str, Any], path: Path) -> str:
    versions = record["versions"]
    named = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", "jax") if versions.get(name))
    commit, date = record["git"]["commit"][:7], record["date"][:10]
    return f"`{path.name}`: {record['device']['name']}, {named}, commit {commit}, {date}.\n"


def _table(operation: str, dtype: str, cases: list[dict[str, Any]]) -> str:
    peers = list(dict.fromkeys(r["who"] for case in cases for r in case["results"] if r["who"] != "ours"))
    lines = [
        f"{operation}, {dtype}, GB/s:\n",
        f"| rows × cols | copy | ours | strategy | of the copy |{''.join(f' {peer} |' for peer in peers)}",
        f"|---|---|---|---|---|{'---|' * len(peers)}",
    ]
    for case in cases:
        if case["skipped"]:
            continue
        results = {result["who"]: result for result in case["results"]}
        ours = results["ours"]
        others = "".join(f" {_speed(results.get(peer))} |" for peer in peers)
        speed = "WRONG" if ours["status"] == "wrong" else _speed(ours)
        part = f"{ours['of_copy']:.3f}" if ours["of_copy"] else "—"
        lines.append(
            f"| {_shape(case)} | {case['copy_gbps']:.0f} | **{speed}** | {_strategy(ours['plan'])} | {part} |{others}"
        )
    return "\n".join(lines) + "\n"


def _shape(case: dict[str, Any]) -> str:
    shape = " × ".join(str(size) for size in case["shape"])
    if case["dim"] != len(case["shape"]) - 1:
        shape += f", dim {case['dim']}"
    # Older records have no keys for score options, reductions and gradients.
    words = [f"reduction {case['reduction']}"] if case.get("reduction") else []
    words += ["with gradient"] if case.get("with_gradient") else []
    return ", ".join([shape, *case.get("fused", ()), *words])


def _strategy(plan: dict[str, Any] | None) -> str:
    if plan is None:
        return "—"
    # The backend eager runs the framework's own operations, which have no strategy.
    strategy: str = plan["backend"] if plan["backend"] == "eager" else plan["strategy"]
    return strategy


def _speed(result: dict[str, Any] | None) -> str:
    if result is None or result["status"] != "ok":
        return "—"
    speed: float = result["gbps"]
    return f"{speed:.0f}" if speed >= 10 else f"{speed:.1f}"


def _calls(cases: list[dict[str, Any]]) -> str:
    """A column for each kind of call, in microseconds."""
    results = [(case, result) for case in cases for result in case["results"]]
    names = list(dict.fromkeys(name for _, result in results for name in result["calls"]))
    header = "".join(f" {name} |" for name in names)
    lines = [f"| call | library | caches |{header}", "|---|---|---|" + "---|" * len(names)]
    for case, result in results:
        times = (result["calls"].get(name) for name in names)
        shown = "".join(f" {time['median_us']:.1f} |" if time else " — |" for time in times)
        name = f"{case['operation']}, {_shape(case)}, {case['dtype']}"
        lines.append(f"| {name} | {result['who']} | {result['state']} |{shown}")
    return "Microseconds:\n\n" + "\n".join(lines) + "\n"


def _host(host: dict[str, Any]) -> str:
    times = ", ".join(f"{who} {times['median_us']:.1f}" for who, times in host["times"].items())
    shape = " × ".join(str(size) for size in host["shape"])
    return f"Host microseconds of one {host['operation']} call, {shape} {host['dtype']}: {times}.\n"


if __name__ == "__main__":
    main()
