"""Measure the memory and the time that `onlinesoftmax.apply_file` takes for a file of several gigabytes.

The script writes a float32 .npy file of random numbers to a temporary folder.  It applies softmax to the file, in a
fresh process for each case, and writes the measurements to a JSON file.  Run it from the repository:

    PYTHONPATH=src python benchmarks/stream_memory.py --gigabytes 4
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

COLUMNS = 4096
CASES = {
    "short rows": (lambda n: (n // COLUMNS, COLUMNS), -1),
    "one row": (lambda n: (n,), -1),
    "axis 0": (lambda n: (COLUMNS, n // COLUMNS), 0),
}
"""For each case: the shape of a file of n elements, and the axis of the softmax."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4, help="size of the file, in 2^30 bytes (default 4)")
    parser.add_argument(
        "--chunk-mib", type=float, default=None, help="chunk_bytes, in 2^20 bytes (default: the default of apply_file)"
    )
    parser.add_argument("--threads", type=int, default=None, help="number of torch threads (default: torch's default)")
    parser.add_argument("--folder", default=None, help="temporary folder; it needs twice --gigabytes")
    parser.add_argument("--output", type=Path, default=None, help="JSON file (default: results/files/cpu.json)")
    parser.add_argument("--measure", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure)
        return
    # The processes that measure do not import the benchmark, whose memory would count.
    from onlinesoftmax.lab.bench.record_file import git_state, processor, versions

    now, git = datetime.now(timezone.utc), git_state()
    output = options.output or Path(__file__).parent / "results" / "files" / "cpu.json"
    record = {
        "date": now.isoformat(timespec="seconds"),
        "commit": git["commit"],
        "uncommitted_changes": git["dirty"],
        "versions": versions(),
        "machine": {
            "cpu": processor(), "cores": os.cpu_count(), "load_at_start": os.getloadavg()[0],
            "system": platform.platform(),
        },
        "threads": options.threads,
        "cases": [],
    }  # fmt: skip
    elements = int(options.gigabytes * 2**30) // 4 // COLUMNS * COLUMNS
    chunk_bytes = "" if options.chunk_mib is None else str(int(options.chunk_mib * 2**20))
    with tempfile.TemporaryDirectory(prefix="onlinesoftmax-", dir=options.folder) as folder:
        source, target = Path(folder, "x.npy"), Path(folder, "y.npy")
        for name, (shape_of, axis) in CASES.items():
            make(source, shape_of(elements))
            case = run_case(source, target, axis, chunk_bytes, options.threads)
            record["cases"].append({"name": name, "shape": shape_of(elements), "axis": axis, **case})
            print(
                f"{name:10} {case['seconds']:6.1f} s  {case['file_mb_per_s']:6.0f} MB/s of file  "
                f"{case['moved_mb_per_s']:6.0f} MB/s moved  peak {case['peak_rss_mb']:.0f} MB "
                f"(imports take {case['import_rss_mb']:.0f} MB of it)",
                flush=True,
            )
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written: {output}")


def make(path: Path, shape: tuple[int, ...]) -> None:
    """Write a file that repeats the same million random numbers, by plain writes."""
    block = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32)
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
        left = int(np.prod(shape))
        while left:
            file.write(block[:left].data)
            left -= min(left, block.size)
        file.flush()
        os.fsync(file.fileno())


def run_case(source: Path, target: Path, axis: int, chunk_bytes: str, threads: int | None) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", str(source), str(target), str(axis), chunk_bytes]
    result = subprocess.run([*command, str(threads or "")], check=True, stdout=subprocess.PIPE, text=True)
    target.unlink()
    case: dict[str, Any] = json.loads(result.stdout)
    return case


def measure(source: str, target: str, axis: str, chunk_bytes: str, threads: str) -> None:
    """Measure one case in a process of its own, because ru_maxrss is the peak since the process started."""
    from onlinesoftmax.files.apply import CHUNK_BYTES, apply_file

    if importlib.util.find_spec("torch") is not None:
        import torch

        if threads:
            torch.set_num_threads(int(threads))
    imports = peak_rss_mb()
    began = time.process_time()
    chunk = int(chunk_bytes or CHUNK_BYTES)
    report = apply_file(source, target, axis=int(axis), chunk_bytes=chunk)
    size = Path(source).stat().st_size
    case = {
        "bytes": size,
        "chunk_bytes": chunk,
        "bytes_read": report.bytes_read,
        "bytes_written": report.bytes_written,
        "seconds": round(report.seconds, 3),
        "cpu_seconds": round(time.process_time() - began, 3),
        "file_mb_per_s": round(size / report.seconds / 1e6, 1),
        "moved_mb_per_s": round((report.bytes_read + report.bytes_written) / report.seconds / 1e6, 1),
        "peak_rss_mb": round(peak_rss_mb(), 1),
        "import_rss_mb": round(imports, 1),
    }
    print(json.dumps(case))


def peak_rss_mb() -> float:
    """Return the peak resident memory in megabytes (10^6 bytes).  Linux reports KiB, macOS reports bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


if __name__ == "__main__":
    main()
