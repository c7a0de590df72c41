"""The calls into the CUDA driver, tested with a stand-in that records the calls."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cuda_simulator import launch_multiply
from onlinesoftmax.kernels.cuda import driver, multiply


class Driver:
    """A stand-in that answers launches with `statuses` in turn, and records the names of the calls."""

    def __init__(self, *statuses: int) -> None:
        self.statuses, self.called = list(statuses), list[str]()

    def cuLaunchKernelEx(self, *_: Any) -> int:  # noqa: N802  the driver's own name
        self.called.append("launch")
        return self.statuses.pop(0)

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:  # noqa: N802
        self.called.append(f"retain {device}")
        ctypes.cast(context, ctypes.POINTER(ctypes.c_void_p))[0] = ctypes.c_void_p(1234)
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:  # noqa: N802
        self.called.append(f"current {context.value}")
        return 0

    def cuGetErrorString(self, status: int, message: Any) -> int:  # noqa: N802
        ctypes.cast(message, ctypes.POINTER(ctypes.c_char_p))[0] = b"what the driver says"
        return 0


@pytest.mark.parametrize(
    ("statuses", "called"),
    [
        ((0,), ["launch"]),
        # A thread that has not used the device yet: the context is made current, and the launch repeated.
        ((driver.INVALID_CONTEXT, 0), ["launch", "retain 3", "current 1234", "launch"]),
        ((driver.INVALID_CONTEXT, driver.INVALID_CONTEXT), ["launch", "retain 3", "current 1234", "launch"]),
        # Any other status is an error.
        ((700,), ["launch"]),
    ],
)
def test_a_launch_without_a_context_is_made_again_with_one(
    statuses: tuple[int, ...], called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Driver(*statuses)
    monkeypatch.setattr(driver, "library", lambda: fake)
    arguments = driver.Arguments(bytes(16), driver.launch_config(1, 1, 32, 0, 1, False), 1)
    with pytest.raises(driver.DriverError, match="launching a kernel") if statuses[-1] else nullcontext():
        if status := arguments.launch():
            driver.launch_again(arguments, status, 3, "launching a kernel")
    assert fake.called == called


def test_addresses_reach_the_driver_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without argument types, ctypes passes the lower 32 bits of a plain integer.
    passed: list[Any] = []
    function = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(lambda *given: passed.extend(given) or 0)
    # A function of C, like the driver's, without argument types.
    launch = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.cast(function, ctypes.c_void_p).value or 0)
    monkeypatch.setattr(driver, "library", lambda: SimpleNamespace(cuLaunchKernelEx=launch))
    kernel = 0x7F69_74FF_96C0
    arguments = driver.Arguments(bytes(16), driver.launch_config(1, 1, 32, 0, 1, False), kernel)
    arguments.launch()
    assert [passed[0], passed[1], passed[3]] == [ctypes.addressof(arguments.config), kernel, None]
    assert ctypes.c_void_p.from_address(passed[2]).value == ctypes.addressof(arguments.fields)


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16", "float32"), ("float32", "float16", "float32")], ids=str)
@pytest.mark.parametrize("count", [5, 70001])
def test_a_prepared_product_passes_what_the_kernel_reads(
    dtypes: tuple[str, str, str], count: int, folder: Path, launch_on_host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch for a GPU, with a driver that runs the kernel on the host; its second call passes other tensors."""

    def run(parameter: int, blocks: int) -> None:
        assert blocks == (1 if count == 5 else 2)
        launch_multiply(dtypes, parameter, blocks, folder)

    launch_on_host(run)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=2))
    dtype, result, wide = (getattr(torch, name) for name in dtypes)
    product = None
    for factor in (-2.5, 1.0):
        # Rows of 16 bytes; what follows the last element stays.
        memory = torch.randn(count + 8).to(dtype)
        x, number, before = memory[:count], torch.tensor(factor, dtype=wide), memory.clone()
        out = x if result == dtype else torch.full_like(memory, 7, dtype=result)[:count]
        product = product or multiply.bind(x, number, out)
        product(x, number, out)
        assert torch.equal(out, (factor * before[:count].to(wide)).to(result))
        assert torch.equal(memory[count:], before[count:])


def test_a_refusal_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "library", Driver)
    driver.check(0, "launching cuda/row")
    with pytest.raises(driver.DriverError, match=r"launching cuda/row: what the driver says \(CUDA error 700\)"):
        driver.check(700, "launching cuda/row")


def test_a_launch_lies_in_memory_as_the_driver_reads_it() -> None:
    # Sizes and offsets of CUlaunchConfig and CUlaunchAttribute in cuda.h.
    assert ctypes.sizeof(driver.LaunchConfig) == 56
    offsets = {name: getattr(driver.LaunchConfig, name).offset for name, _ in driver.LaunchConfig._fields_}
    assert offsets == {"grid": 0, "block": 12, "shared_memory": 24, "stream": 32, "attributes": 40, "count": 48}
    config = driver.launch_config(7, 1, 256, 1024, 4, False)
    assert (list(config.grid), list(config.block), config.shared_memory, config.count) == (
        [7, 1, 1],
        [256, 1, 1],
        1024,
        1,
    )
    attribute = config.attributes[0]
    assert ctypes.sizeof(attribute) == 72
    assert (attribute.id, list(attribute.value[:3])) == (driver.CLUSTER_DIMENSION, [4, 1, 1])
    cooperative = driver.launch_config(3, 44, 256, 0, 1, True)
    assert list(cooperative.grid) == [3, 44, 1]
    assert (cooperative.count, cooperative.attributes[0].id, cooperative.attributes[0].value[0]) == (1, 2, 1)
    assert driver.launch_config(7, 1, 256, 0, 1, False).count == 0


def test_numbers_are_those_of_the_driver() -> None:
    cuda = pytest.importorskip("cuda.bindings.driver", reason="cuda.bindings is not installed")
    assert cuda.CUresult.CUDA_ERROR_INVALID_CONTEXT == driver.INVALID_CONTEXT
    functions, launches = cuda.CUfunction_attribute, cuda.CUlaunchAttributeID
    assert functions.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES == driver.MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert functions.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED == driver.NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    assert launches.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION == driver.CLUSTER_DIMENSION
    assert launches.CU_LAUNCH_ATTRIBUTE_COOPERATIVE == driver.COOPERATIVE
