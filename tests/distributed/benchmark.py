"""`onlinesoftmax bench --suite distributed`, in processes with the variables that torchrun sets."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from onlinesoftmax.cli import main
from onlinesoftmax.lab.bench import tables
from onlinesoftmax.lab.bench.cases import Case
from onlinesoftmax.lab.bench.result import CANNOT
from onlinesoftmax.lab.bench.sharded import peers
from onlinesoftmax.lab.bench.sharded.measure import run
from onlinesoftmax.lab.bench.sharded.peers import collectives_of
from onlinesoftmax.lab.bench.sharded.team import GroupClock, Team
from onlinesoftmax.lab.bench.timing import Times

SMALL = ("--shape", "6x135", "--dtype", "bfloat16", "--device", "cpu", "--repeat", "1")
OURS = ("ours", "without-shards", "dtensor", "one-process")


def command(*arguments: str, suite: str = "distributed") -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the command."""
    sys.argv = ["onlinesoftmax", "bench", "--suite", suite, *arguments]
    code: Any = 0
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as end:
            code = end.code
    return code or 0, out.getvalue(), err.getvalue()


def the_record(folder: Path) -> None:
    """Process 0 prints and writes for all; bytes are those of the formula; unequal shards are measured too."""
    path = folder / "record.json"
    code, out, err = command(*SMALL, "--out", str(path), "--json")
    assert code == 0, err
    assert bool(out) == (rank() == 0)
    if not out:
        return
    record = json.loads(path.read_text())
    assert json.loads(out) == record
    assert record["processes"] == {"count": 2, "backend": "gloo"}
    assert record["options"]["out"] == "record.json"
    assert record["measures"] == "sharded time"
    again = tables.read_cases(record)
    assert [case.as_dict() for case in again] == record["cases"]
    assert "all-reduce of rows" in {row[3] for row in tables.table_of(again, record).rows}
    found = {case["operation"]: case for case in record["cases"]}
    assert list(found) == ["cross_entropy", "softmax", "token_logprobs"]
    for case in found.values():
        assert case["processes"] == 2
        assert case["all_reduce"]["median_us"] > 0
        results = {result["who"]: result for result in case["results"]}
        assert set(results) == {"ours", *peers.PEERS}
        assert all(results[name]["times"]["median_us"] > 0 for name in OURS), results
        assert "equal shards only" in results["all-gather"]["reason"]
        for name in ("ours", "without-shards", "dtensor"):
            assert results[name]["sent_row_bytes"] == results[name]["formula_row_bytes"]
            assert results[name]["collectives"] == 1
    assert found["cross_entropy"]["results"][3]["times"]["median_us"] > 0
    assert [found[name]["results"][0]["sent_row_bytes"] for name in found] == [12, 8, 16]


def heads_with_sharded_classes(folder: Path) -> None:
    """Every way is right and timed, beside the bare products; the table has the speed-up."""
    path = folder / "record.json"
    shape = "--shape", "9x5x1003", "--dtype", "float32", "--device", "cpu", "--repeat", "1"
    code, out, err = command(*shape, "--out", str(path), suite="distributed-heads")
    assert code == 0, err
    if rank() != 0:
        return
    record = json.loads(path.read_text())
    assert [case["operation"] for case in record["cases"]] == ["linear_cross_entropy", "linear_token_logprobs"]
    assert [case.as_dict() for case in tables.read_cases(record)] == record["cases"]
    for case in record["cases"]:
        found = {result["who"]: result for result in case["results"]}
        assert list(found) == ["ours", "collective", "one-process"]
        assert all(0 < each["error"] < 1e-5 and each["times"]["median_us"] > 0 for each in found.values()), found
        assert case["three_products"]["median_us"] > 0
    assert out.count("2 processes have") == 2


def a_record_that_is_continued(folder: Path) -> None:
    """Process 0 reads the file; all processes leave out its cases, or end with the same sentence."""
    path = folder / "record.json"
    asked = ("--op", "logsumexp", "--peers", "one-process", "--out", str(path))
    code, _, err = command(*SMALL, *asked)
    assert code == 0, err
    if rank() == 0:
        # Process 1 waits for this one in the next command.
        whole = json.loads(path.read_text())
        path.write_text(json.dumps({**whole, "cases": whole["cases"][:1]}))
    code, out, err = command(*SMALL, *asked, "--resume", "--json")
    assert code == 0, err
    if rank() == 0:
        found = json.loads(out)
        assert [case["operation"] for case in found["cases"]] == [case["operation"] for case in whole["cases"]]
        same = [a == b for a, b in zip(found["cases"], whole["cases"], strict=True)]
        assert same == [True] + [False] * (len(same) - 1)
    code, out, err = command(*SMALL[:-1], "2", *asked, "--resume")
    assert (code, out) == (2, "")
    assert "field options.repeat: the file has 1, and this run has 2" in err


def other_options(_: Path) -> None:
    """Gradients of a result per element, another dimension, losses of rows, even shards, the table."""
    arguments = ("--op", "log_softmax", "--dim", "0", "--with-gradient", "--peers", "all-gather")
    code, out, err = command(*SMALL, *arguments)
    assert code == 0, err
    if rank() == 0:
        assert "2 processes over gloo" in out
        line = next(line.split() for line in out.splitlines() if " ours " in line)
        assert line[-3:-1] == ["2", "16"]
        all_gather = next(line.split() for line in out.splitlines() if " all-gather " in line)
        # Forward sends 3 bfloat16 numbers per row, and backward the gradient of a whole row.
        assert all_gather[-3:-1] == ["2", "18"]
    code, out, err = command(*SMALL[2:], "--shape", "6x134", "--op", "cross_entropy", "--reduction", "none")
    assert code == 0, err
    assert CANNOT not in out


def options_that_do_not_fit(_: Path) -> None:
    for arguments, message in (
        (("--framework", "jax"), "leave out --framework jax"),
        (("--fused", "scale"), "--fused does not go with"),
        (("--peers", "apex"), "unknown peer 'apex'; there are: without-shards, collective, dtensor"),
        (("--device", "cuda:1"), "each process has a GPU of its own"),
        (("--device", "cuda"), "2 processes need as many GPUs"),
        ((), "2 processes need as many GPUs"),
        (("--strategy", "square"), "unknown strategy 'square'"),
        (("--op", "softmax_backward"), "softmax_backward is itself a gradient"),
    ):
        if arguments in (("--device", "cuda"), ()) and torch.cuda.device_count() >= 2:
            continue
        code, out, err = command(*arguments)
        assert (code, out) == (2, ""), arguments
        assert message in err, err


class Wrong(peers.OursSharded):
    """Wrong in the last element of the last process."""

    name = "wrong"

    def prepare(self, case: Case) -> Any:
        function = super().prepare(case)

        def wrong(*tensors: Any) -> Any:
            y = function(*tensors).clone()
            if self.team.rank == self.team.size - 1:
                y.view(-1)[-1] = 0.5
            return y

        return wrong


def wrong_results(_: Path) -> None:
    """A wrong shard of one process is a wrong result on all, and gets no time; the others are timed."""
    team = Team.begin("cpu")
    case = Case("softmax", (3, 17), 1, "bfloat16")
    (found,) = run([case], [Wrong(team), peers.OursSharded(team)], team, 1)
    wrong, right = found.results
    assert wrong.failed
    assert wrong.times is None
    assert not right.failed
    assert right.times is not None
    the_clock(team)
    collectives_are_counted(team)
    dist.destroy_process_group()


def the_clock(team: Team) -> None:
    """Every process repeats a call as often as the others, and has the same times: those of the slowest."""
    late = team.rank == 1
    calls = []

    def call() -> None:
        calls.append(None)
        if late:
            torch.rand(300, 300).matmul(torch.rand(300, 300))

    times = Times.of(GroupClock(team).measure({"": call}, 1)[""])
    number, median = len(calls), times.median_us
    assert team.largest(number, -number, median, -median) == [number, -number, median, -median]


def collectives_are_counted(team: Team) -> None:
    """Collectives in forward and in backward, of each kind that the peers use."""
    x = torch.zeros(3, 4, requires_grad=True)

    def call() -> None:
        y = peers._Gathered.apply(x, team, 1, True)
        dist.all_reduce(torch.zeros(5, dtype=torch.float64))
        torch.autograd.grad(y.sum(), x)
        dist.barrier()

    assert tuple(collectives_of(call)) == (3, 48 + 40 + 48 * team.size, False, ())


def rank() -> int:
    """Number of this process; the command has ended its group."""
    return int(os.environ["RANK"])
