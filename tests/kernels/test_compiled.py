"""CUDA kernels compiled by NVRTC for GPUs that are not here, and errors where a compiler is missing."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import onlinesoftmax as osm
from cuda_algebra import FORMS, PAIRS, Form, algebra_source
from cuda_targets import may_spill
from onlinesoftmax.core import device as devices
from onlinesoftmax.explanation import Explanation
from onlinesoftmax.kernels import registry
from onlinesoftmax.kernels.cuda import source
from onlinesoftmax.kernels.cuda.source import kernel_file
from onlinesoftmax.kernels.report import Kernel, cuobjdump, find_cuobjdump, occupancy
from onlinesoftmax.ops import OPERATIONS
from pairs import rest_exhaustive

NOT_INSTALLED = registry.module_missing("cuda.core", "cuda")
needs_nvrtc = pytest.mark.skipif(NOT_INSTALLED is not None, reason=str(NOT_INSTALLED))

SHAPES = {"row": (4096, 1000), "cluster": (64, 1 << 17), "grid": (1, 1 << 24), "looped": (4096, 1 << 18)}
PLANS = [("a100", "row"), *(("h200", strategy) for strategy in ("grid", "row", "cluster", "looped"))]


def explained(strategy: str, device: str = "h200", dtype: str = "float32", operation: str = "softmax") -> Explanation:
    shape = SHAPES[strategy]
    return osm.explain(shape, operation=operation, dtype=dtype, device=device, backend="cuda", strategy=strategy)


def only(explanation: Explanation) -> Kernel:
    [kernel] = explanation.compile()
    return kernel


@needs_nvrtc
@pytest.mark.parametrize(("device", "strategy"), rest_exhaustive(PLANS, lambda cell: cell[:1]))
def test_cuda_plans_compile(device: str, strategy: str) -> None:
    explanation = explained(strategy, device, "bfloat16" if device == "h200" else "float32")
    kernel, arch = only(explanation), explanation.device.arch
    assert kernel.name == f"{kernel_file(explanation.plan)}_kernel"
    assert kernel.warps == explanation.plan.warps
    assert 0 < kernel.registers <= 255
    assert 0 < kernel.occupancy <= 1
    assert strategy != "row" or kernel.spills == 0
    assert f"{kernel.name}(" in kernel.listings["cuda"]
    assert f".target {arch}\n" in kernel.listings["ptx"]
    assert f".entry {kernel.name}(" in kernel.listings["ptx"]
    assert ("sass" in kernel.listings) == (find_cuobjdump() is not None)
    assert f"code for {arch}" in kernel.listings.get("sass", f"code for {arch}")
    assert set(kernel.as_dict()) == set(vars(kernel)) - {"listings"}


@needs_nvrtc
@pytest.mark.parametrize("operation", [pytest.param("softmax", marks=pytest.mark.exhaustive), "softmax_backward"])
def test_dynamic_shared_memory_counts(operation: str) -> None:
    """Each thread keeps three chunks of 16 bytes of every input in shared memory, and four in registers."""
    explanation = explained("grid", operation=operation)
    plan = replace(explanation.plan, block=4 * 4096, warps=32, depth=4, lanes=1024, resident=1, shared=3)
    kernel = only(replace(explanation, plan=plan))
    dynamic = 3 * 16 * 1024 * OPERATIONS[operation].inputs
    assert dynamic < kernel.shared_memory < dynamic + 4096
    assert kernel.occupancy == occupancy(explanation.device, 32, kernel.registers, kernel.shared_memory)


@pytest.mark.parametrize(
    ("device", "warps", "registers", "shared_memory", "expected"),
    [
        ("h200", 4, 32, 0, 1.0),
        ("h200", 4, 33, 0, 0.75),  # 40 registers are given
        ("h200", 4, 128, 0, 0.25),
        ("h200", 32, 64, 0, 0.5),
        ("h200", 1, 32, 0, 0.5),  # 32 blocks are the most
        ("h200", 8, 32, 100 << 10, 0.25),
        ("h200", 8, 32, 227 << 10, 0.125),  # the most that one block may ask for
        ("h200", 32, 32, 114 << 10, 0.5),
        ("a100", 16, 32, 82 << 10, 0.25),  # two of them are asked for, but each takes 1 KiB for itself
        ("rtx4090", 32, 32, 0, 2 / 3),  # 1536 threads
    ],
)
def test_occupancy(device: str, warps: int, registers: int, shared_memory: int, expected: float) -> None:
    assert occupancy(devices.known(device), warps, registers, shared_memory) == pytest.approx(expected)


def test_eager_has_no_kernels() -> None:
    assert osm.explain((4, 5), device="h200", backend="eager").compile() == []


def test_a_missing_compiler_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert registry.module_missing("no_such_package.core", "cuda") is not None
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(RuntimeError, match=r"^cuda\.core is not installed: pip install 'onlinesoftmax\[cuda\]'$"):
        explained("row").compile()


def test_a_missing_disassembler_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match=r"pip install 'onlinesoftmax\[triton\]'"):
        cuobjdump("-sass", b"")


@pytest.mark.skipif(find_cuobjdump() is None, reason="there is no cuobjdump")
def test_what_is_no_machine_code_is_a_sentence() -> None:
    with pytest.raises(RuntimeError, match="cuobjdump -sass: "):
        cuobjdump("-sass", b"nothing")


@needs_nvrtc
def test_numbers_need_no_disassembler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    kernel = only(explained("row"))
    assert kernel.registers > 0
    assert set(kernel.listings) == {"cuda", "ptx"}


@needs_nvrtc
def test_why_the_cuda_backend_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from onlinesoftmax.kernels import cuda
    from onlinesoftmax.kernels.cuda import compile, driver

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda.unavailable() == "no NVIDIA GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(compile, "nvrtc_version", lambda: "13.5.37")
    for supported, reason in (((13, 0), None), ((14, 1), None), ((12, 8), "this one supports 12.8: update the driver")):
        monkeypatch.setattr(driver, "version", lambda supported=supported: supported)
        assert cuda.unavailable() is reason if reason is None else reason in str(cuda.unavailable())

    def absent() -> str:
        raise RuntimeError("no libnvrtc")

    monkeypatch.setattr(compile, "nvrtc_version", absent)
    assert cuda.unavailable() == "NVRTC cannot be loaded (no libnvrtc): pip install 'onlinesoftmax[cuda]'"


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_gpu_of_amd_has_no_kernels(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch for ROCm says that CUDA is available."""
    torch = pytest.importorskip("torch")
    triton = pytest.importorskip("triton")
    pytest.importorskip("cuda.core")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    assert str(registry.load(backend).unavailable()).startswith("no NVIDIA GPU")


def test_a_backend_without_a_module_of_kernels_is_named() -> None:
    with pytest.raises(ValueError, match="unknown backend 'opencl'; backends: cuda, triton, eager"):
        registry.load("opencl")
    with pytest.raises(ValueError, match="backend 'eager' has no module of kernels"):
        registry.load("eager")
    assert registry.unavailable("eager") is None


@needs_nvrtc
@pytest.mark.parametrize(
    ("arch", "dtype"),
    rest_exhaustive(itertools.product(("sm_80", "sm_90", "sm_100"), ("float16", "bfloat16", "float32", "float64"))),
)
def test_the_multiplication_of_a_gradient_compiles_without_spills(dtype: str, arch: str, log_of: Any) -> None:
    from onlinesoftmax.kernels.cuda.compile import usage
    from onlinesoftmax.kernels.cuda.multiply import THREADS, source

    wide = "float64" if dtype == "float64" else "float32"
    for out, factor in {(dtype, dtype), (dtype, wide), ("bfloat16", wide)}:
        found = usage(log_of(source(dtype, out, factor), arch))
        # A block fits beside blocks of another kernel that still run.
        assert found["registers"] * THREADS <= 40 * 1024
        assert not found.get("spills") or may_spill(arch)


@needs_nvrtc
@pytest.mark.parametrize(("form", "pair"), [*itertools.product(FORMS, PAIRS)], ids=str)
def test_the_algebra_of_states_compiles(
    form: Form, pair: tuple[str, str], check_in_compiler: Callable[[str], None], log_of: Any
) -> None:
    """The kernels that test_law runs, each pair of dtypes with machine code once."""
    text, turn = algebra_source(form, *pair), PAIRS.index(pair)
    if turn % len(FORMS) == FORMS.index(form):
        assert log_of(text, ("sm_80", "sm_90", "sm_100")[turn // 2])
    else:
        check_in_compiler(text)


@pytest.mark.parametrize("name", [*source.FILES, *sorted({n for names in source.KERNEL_FILES.values() for n in names})])
def test_no_lambda_is_generic(name: str) -> None:
    """NVRTC 13.0 takes a lambda whose parameters are `auto` for a function of the host, and refuses it."""
    assert not re.search(r"\[[&=]?\]\([^)]*\bauto\b", source.text(f"{name}.cuh"))
