"""JAX's functions on PyTorch's tensors, and bench, verify and explain by them."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

pytest.importorskip("torch", reason="the functions are of jax, the tensors of torch")
pytest.importorskip("jaxlib", reason="the functions are of jax, the tensors of torch")
pytest.importorskip("typer", reason="bench, verify and explain are commands")

import jax.numpy as jnp
import torch
from typer.testing import CliRunner

import onlinesoftmax as osm
from onlinesoftmax import explanation
from onlinesoftmax.cli import build
from onlinesoftmax.core.device import known
from onlinesoftmax.jax import functions
from onlinesoftmax.lab import jax_on_torch
from onlinesoftmax.lab import verify as verification
from onlinesoftmax.lab.bench.cases import Case
from onlinesoftmax.lab.bench.inputs import make_inputs
from onlinesoftmax.lab.bench.jax_peers import JaxNN, OursInJax
from onlinesoftmax.lab.bench.measure import CaseResult, planned, run
from onlinesoftmax.lab.bench.timing import CpuClock
from onlinesoftmax.ops import OPERATIONS
from pairs import rest_exhaustive

CPU = torch.device("cpu")
FORWARD = ("softmax", "log_softmax", "logsumexp")


def cli(*arguments: str) -> Any:
    return CliRunner().invoke(build(), list(arguments))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_memory_goes_over_and_back(dtype: torch.dtype) -> None:
    x = torch.arange(6, dtype=dtype).view(2, 3)
    y = jax_on_torch.on_tensors(lambda a, b: a + b)(x, x.t().contiguous().t())
    assert y.dtype == dtype
    assert torch.equal(y, 2 * x)


@pytest.mark.parametrize(("name", "dim"), rest_exhaustive(itertools.product(FORWARD, (0, 1))))
def test_autograd_knows_the_functions(name: str, dim: int) -> None:
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: jax_on_torch.forward(name)(x, dim), x)
    torch.testing.assert_close(jax_on_torch.forward(name)(x, dim), getattr(torch, name)(x, dim))


def test_why_jax_cannot() -> None:
    assert jax_on_torch.unavailable("cpu") is None
    if not torch.cuda.is_available():
        assert "no support for this GPU" in str(jax_on_torch.unavailable("cuda"))


# bench

CASES = [
    *(Case(f"{name}{suffix}", (6, 5, 33), 1, "float32") for name in FORWARD for suffix in ("", "_backward")),
    Case("softmax", (8, 40), 1, "bfloat16", ("scale", "softcap", "bias", "mask")),
    Case("token_logprobs", (6, 33, 5), 1, "bfloat16", with_gradient=True),
    Case("cross_entropy", (6, 33), 1, "bfloat16"),
    *(
        Case("cross_entropy", (6, 33), 1, dtype, with_gradient=True, reduction=reduction)
        for dtype, reduction in (("bfloat16", "mean"), ("float32", "none"), ("float64", "mean"))
    ),
    *(Case(name, (6, 33), 1, "bfloat16", with_gradient=True) for name in FORWARD),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.operation}-{case}")
def test_ours_and_theirs_are_right(case: Case) -> None:
    [found] = run([case], [OursInJax("cpu"), JaxNN("cpu")], CPU, 1, CpuClock())
    ours, theirs = found.results
    assert (ours.who, theirs.who) == ("ours", "jax.nn")
    assert (ours.status, theirs.status) == ("ok", "ok"), (ours.reason, theirs.reason)
    assert ours.plan is not None
    assert ours.plan.backend == "eager"
    assert ours.of_copy is not None
    assert found.within_cpu_bound is None


def test_bench_measures_a_mean_by_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, cross_entropy = [], functions.cross_entropy

    def spy(*arrays: Any, **more: Any) -> Any:
        asked.append(more["reduction"])
        return cross_entropy(*arrays, **more)

    monkeypatch.setattr(functions, "cross_entropy", spy)
    monkeypatch.setattr(explanation, "from_jax", lambda: known("h200"))
    for reduction in ("mean", "none"):
        case = Case("cross_entropy", (8, 40), 1, "float32", with_gradient=True, reduction=reduction)
        inputs = make_inputs(case, CPU)
        OursInJax("cpu").prepare(case)(*inputs)
        assert asked.pop() == reduction
    case = Case("cross_entropy", (8192, 32000), 1, "bfloat16", with_gradient=True)
    found = planned(case, (), OursInJax("cuda"))
    assert (found.plan.backend, found.plan.reads, found.task.outputs) == ("cuda", 1, ("loss", "y", "m", "l"))
    assert found.plan.bytes_moved == pytest.approx(case.bytes, rel=1e-3)


def test_what_is_wrong_in_jax_gets_no_time() -> None:
    class Wrong(OursInJax):
        def prepare(self, case: Case) -> Any:
            return jax_on_torch.on_tensors(lambda x: 1.001 * x / x.sum(case.dim, keepdims=True))

    [found] = run([Case("softmax", (4, 8), 1, "float32")], [Wrong("cpu")], CPU, 1, CpuClock())
    assert isinstance(found, CaseResult)
    assert (found.results[0].status, found.results[0].times) == ("wrong", None)


def test_a_wrong_gradient_in_jax_gets_no_time() -> None:
    class Wrong(OursInJax):
        def prepare(self, case: Case) -> Any:
            function = super().prepare(case)
            return lambda *tensors: (1.001 * function(*tensors)[0], *function(*tensors)[1:])

    [found] = run([Case("cross_entropy", (4, 8), 1, "float32", with_gradient=True)], [Wrong("cpu")], CPU, 1, CpuClock())
    assert (found.results[0].status, found.results[0].times) == ("wrong", None)
    assert str(found.results[0].reason).startswith("gradient: error")


def test_bench_measures_jax() -> None:
    small = ("--device", "cpu", "--shape", "4x8", "--dtype", "float32", "--repeat", "1")
    record = json.loads(cli("bench", "--framework", "jax", *small, "--json").stdout)
    assert [result["who"] for result in record["cases"][0]["results"]] == ["ours", "jax.nn"]
    assert record["versions"]["jax"]
    assert (record["options"]["framework"], record["options"]["peers"]) == ("jax", "jax")
    refused = cli("bench", "--framework", "jax", "--backend", "pallas", *small)
    if not torch.cuda.is_available():
        assert refused.exit_code == 2
        assert "Pallas kernels need an NVIDIA GPU" in refused.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bench", "--framework", "jax", "--suite", "host"), "--suite host measures calls of PyTorch"),
        (("bench", "--framework", "flax"), "unknown framework 'flax'; there are: torch, jax"),
        (("bench", "--framework", "jax", "--peers", "quack"), "unknown peer 'quack'; there are: jax, torch"),
        (("bench", "--framework", "jax", "--backend", "triton"), "'triton' needs the framework 'torch'; there are"),
        (("explain", "4x8", "--framework", "flax"), "unknown framework 'flax'; there are: torch, jax"),
    ],
)
def test_what_the_commands_refuse(arguments: tuple[str, ...], message: str) -> None:
    result = cli(*arguments)
    assert result.exit_code == 2
    assert message in result.output


# verify, explain, doctor


def test_a_wrong_kernel_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    right = jax_on_torch.forward
    monkeypatch.setattr(
        jax_on_torch, "forward", lambda name: lambda x, dim, **how: 1.00001 * right(name)(x, dim, **how)
    )
    [cell] = verification.verify(
        backends=["pallas"], strategies=["row"], operations=["softmax"], dtypes=["float32"], quick=True
    )
    assert cell.result == "fail"


@pytest.mark.gpu
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("strategy", ["row", "cluster", "looped", "split"])
def test_the_contract_on_a_gpu(strategy: str, operation: str) -> None:
    cells = verification.verify(
        backends=["pallas"], strategies=[strategy], operations=[operation], device="cuda", quick=True
    )
    assert [failure for cell in cells for failure in cell.failures] == []


def test_explain_plans_for_arrays() -> None:
    found = osm.explain((4096, 32768), dtype="bfloat16", device="h200", framework="jax")
    assert (found.plan.backend, found.plan.strategy) == ("cuda", "cluster")
    assert {option.backend for option in found.others} == {"cuda", "pallas", "eager"}
    # The axis is brought to the end.
    assert osm.explain((7, 5), 0, framework="jax", device="h200").problem.rows == 5
    forced = osm.explain((4096, 32768), dtype="bfloat16", device="h200", framework="jax", backend="pallas")
    assert forced.plan.splits == 2
    with pytest.raises(RuntimeError, match="XLA compiles Pallas kernels"):
        forced.compile()
    command = ("explain", "4096x32768", "--dtype", "bfloat16", "--device", "h200", "--framework", "jax")
    assert "cuda/cluster" in cli(*command, "--no-compile").output
    shown = cli(*command, "--backend", "pallas")
    assert "pallas/cluster" in shown.output
    assert "not compiled: XLA compiles" in shown.output


def test_explain_takes_an_array() -> None:
    here = osm.explain(jnp.ones((3, 4), jnp.bfloat16), 0)
    assert (here.problem.rows, here.problem.cols, here.problem.dtype) == (4, 3, "bfloat16")
    if not torch.cuda.is_available():
        assert here.plan.backend == "eager"


def test_doctor_knows_pallas() -> None:
    backends = {b["name"]: b for b in json.loads(cli("doctor", "--json").stdout)["backends"]}
    state = "usable" if torch.cuda.is_available() else "interpreter only"
    assert backends["pallas"]["state"] == state
