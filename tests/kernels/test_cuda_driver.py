"""The calls into the CUDA driver, tested with a stand-in that records the calls."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from onlinesoftmax.kernels.cuda import driver


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
    ("status", "then", "called"),
    [
        # A thread that has not used the device yet: the context is made current, and the launch repeated.
        (driver.INVALID_CONTEXT, 0, ["retain 3", "current 1234", "launch"]),
        (driver.INVALID_CONTEXT, driver.INVALID_CONTEXT, ["retain 3", "current 1234", "launch"]),
        # Any other status is returned as it is.
        (700, 700, []),
    ],
)
def test_a_launch_without_a_context_is_made_again_with_one(
    status: int, then: int, called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Driver(then)
    monkeypatch.setattr(driver, "library", lambda: fake)
    assert driver.retry_with_context(status, (), 3) == then
    assert fake.called == called


def test_addresses_reach_the_driver_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without argument types, ctypes passes the lower 32 bits of a plain integer.
    passed: list[Any] = []

    class Recorder(Driver):
        def cuLaunchKernelEx(self, *arguments: Any) -> int:  # noqa: N802  the driver's own name
            passed.extend(arguments)
            return super().cuLaunchKernelEx()

    monkeypatch.setattr(driver, "library", lambda: Recorder(0))
    kernel = 0x7F69_74FF_96C0
    arguments = driver.Arguments(bytes(16), driver.launch_config(1, 1, 32, 0, 1, False), kernel)
    driver.launch(arguments, 0, "launching a kernel")
    assert all(type(argument) is ctypes.c_void_p for argument in passed)
    assert [argument.value for argument in passed[:2]] == [ctypes.addressof(arguments.config), kernel]


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
