"""The few calls into the CUDA driver that a launch needs, by ctypes.

cuda.core compiles our kernels, but takes 0.3 s to import and some microseconds a launch; a kernel that is
compiled already needs neither.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_void_p
from functools import cache
from typing import Any


class DriverError(RuntimeError):
    """A call that the CUDA driver refused, with its reason."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, padded to 8 bytes, and a union of 64."""

    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_uint * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3), ("block", c_uint * 3), ("shared_memory", c_uint), ("stream", c_void_p),
        ("attributes", POINTER(_Attribute)), ("count", c_uint),
    )  # fmt: skip


COOPERATIVE, CLUSTER_DIMENSION = 2, 4
"""CUlaunchAttributeID."""

MAX_DYNAMIC_SHARED_SIZE_BYTES, NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 8, 14
"""CUfunction_attribute."""

PORTABLE_CLUSTER = 8
"""Blocks of a cluster that every device with clusters takes."""


@cache
def library() -> Any:
    """The driver's library, with the types of what is called.

    Raises:
        OSError: there is no driver.
    """
    cuda = ctypes.CDLL("libcuda.so.1")
    cuda.cuLibraryLoadData.argtypes = (
        POINTER(c_void_p), c_char_p, c_void_p, c_void_p, c_uint, c_void_p, c_void_p, c_uint
    )  # fmt: skip
    cuda.cuLibraryGetKernel.argtypes = (POINTER(c_void_p), c_void_p, c_char_p)
    cuda.cuKernelSetAttribute.argtypes = (c_int, c_int, c_void_p, c_int)
    cuda.cuDriverGetVersion.argtypes = (POINTER(c_int),)
    cuda.cuDevicePrimaryCtxRetain.argtypes = (POINTER(c_void_p), c_int)
    cuda.cuCtxSetCurrent.argtypes = (c_void_p,)
    cuda.cuGetErrorString.argtypes = (c_int, POINTER(c_char_p))
    return cuda


def version() -> tuple[int, int]:
    """The newest CUDA that the driver supports, as (major, minor)."""
    number = c_int()
    check(library().cuDriverGetVersion(byref(number)), "asking for the driver's version")
    return number.value // 1000, number.value % 1000 // 10


def check(status: int, doing: str) -> None:
    """Raise what the driver says, unless it says nothing.

    Raises:
        DriverError: the call failed.
    """
    if status:
        message = c_char_p()
        library().cuGetErrorString(status, byref(message))
        raise DriverError(f"{doing}: {(message.value or b'unknown error').decode()} (CUDA error {status})")


INVALID_CONTEXT = 201
"""What a launch says in a thread that has not used the device yet, as those are in which PyTorch runs gradients."""


def make_current(device: int) -> None:
    """Use a device's primary context, that of PyTorch, in this thread."""
    context = c_void_p()
    check(library().cuDevicePrimaryCtxRetain(byref(context), device), "finding the device's context")
    check(library().cuCtxSetCurrent(context), "making the device's context current")


def load_kernel(cubin: bytes, name: str) -> int:
    """The handle of a kernel in a cubin, for every device of its architecture; it stays loaded."""
    loaded, kernel = c_void_p(), c_void_p()
    check(library().cuLibraryLoadData(byref(loaded), cubin, None, None, 0, None, None, 0), f"loading {name}")
    check(library().cuLibraryGetKernel(byref(kernel), loaded, name.encode()), f"finding {name}")
    assert kernel.value is not None
    return kernel.value


def set_attribute(kernel: int, attribute: int, value: int, device: int) -> None:
    """Allow a kernel more than every device gives."""
    check(library().cuKernelSetAttribute(attribute, value, kernel, device), "setting a kernel's attribute")


def launch_config(
    teams: int, team: int, threads: int, shared_memory: int, cluster: int, cooperative: bool
) -> LaunchConfig:
    """A launch of teams × team blocks, but for its stream."""
    attributes = []
    if cooperative:
        attributes.append(_Attribute(COOPERATIVE, 0, (c_uint * 16)(1)))
    if cluster > 1:
        attributes.append(_Attribute(CLUSTER_DIMENSION, 0, (c_uint * 16)(cluster, 1, 1)))
    array = (_Attribute * max(1, len(attributes)))(*attributes)
    return LaunchConfig((teams, team, 1), (threads, 1, 1), shared_memory, None, array, len(attributes))
