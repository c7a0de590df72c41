"""The few calls into the CUDA driver that a launch needs, through ctypes.

cuda.core compiles kernels, but its import takes 0.3 s and its launch some microseconds.  A kernel from the cache needs
neither.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from functools import cache, partial
from typing import Any


class DriverError(RuntimeError):
    """A call that the CUDA driver refused; the message has the driver's reason."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, padded to 8 bytes, and a union of 64 bytes."""

    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_uint * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3), ("block", c_uint * 3), ("shared_memory", c_uint), ("stream", c_void_p),
        ("attributes", POINTER(_Attribute)), ("count", c_uint),
    )  # fmt: skip


class Arguments:
    """The arguments of one launch, in memory that the driver reads; used by one thread at a time.

    Args:
        values: The kernel's only parameter, a struct of 64-bit fields.
        config: The launch configuration, still without a stream.
        kernel: Handle of the kernel.
        of: The library that launches; by default `library`.
        index: Number of the device.

    Attributes:
        fields: The kernel's parameter as 64-bit fields.
        config: The launch configuration.
        launch: The function without arguments that launches, and returns the driver's status.
    """

    def __init__(self, values: bytes, config: LaunchConfig, kernel: int, of: Any = None, index: int = 0) -> None:
        self.fields = (ctypes.c_uint64 * (len(values) // 8)).from_buffer_copy(values)
        self.config, self.index = config, index
        self._parameters = (c_void_p * 1)(ctypes.addressof(self.fields))
        addresses = (ctypes.addressof(config), kernel, ctypes.addressof(self._parameters), None)
        # A plain integer would be passed as a C int, which cuts off the upper half of an address.  ctypes passes on the
        # results of from_param as they are; of an object it would make them in every launch.
        self.launch = partial((of or library()).cuLaunchKernelEx, *map(c_void_p.from_param, addresses))


COOPERATIVE, CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION = 2, 4, 6
"""CUlaunchAttributeID."""

MAX_DYNAMIC_SHARED_SIZE_BYTES, NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 8, 14
"""CUfunction_attribute."""

PORTABLE_CLUSTER = 8
"""Largest number of blocks of a cluster that every device with clusters supports."""


@cache
def library() -> Any:
    """The driver's library, with the argument types of the functions that are called.

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
    cuda.cuDevicePrimaryCtxGetState.argtypes = (c_int, POINTER(c_uint), POINTER(c_int))
    cuda.cuCtxSetCurrent.argtypes = (c_void_p,)
    cuda.cuCtxPushCurrent_v2.argtypes = (c_void_p,)
    cuda.cuCtxPopCurrent_v2.argtypes = (POINTER(c_void_p),)
    cuda.cuDeviceGetCount.argtypes = (POINTER(c_int),)
    cuda.cuMemsetD8Async.argtypes = (c_uint64, c_ubyte, c_size_t, c_void_p)
    cuda.cuKernelGetFunction.argtypes = (POINTER(c_void_p), c_void_p)
    cuda.cuGetErrorString.argtypes = (c_int, POINTER(c_char_p))
    return cuda


@cache
def library_for_xla() -> Any:
    """The same for launches by a thread of XLA; with one GPU, they keep Python's lock.

    To release the lock and to take it again is most of the time of a launch, and takes milliseconds beside a thread
    that runs Python.  Hazard: a launch waits while its stream's queue is full.  With several GPUs, work in the queue
    may wait for a kernel of another GPU, whose launch needs the lock.
    """
    if device_count() > 1:
        return library()
    cuda = ctypes.PyDLL("libcuda.so.1")
    cuda.cuMemsetD8Async.argtypes = library().cuMemsetD8Async.argtypes
    return cuda


@cache
def device_count() -> int:
    """Number of the GPUs that this process sees."""
    number = c_int()
    check(library().cuDeviceGetCount(byref(number)), "counting the GPUs")
    return number.value


def used_devices() -> list[int]:
    """Numbers of the GPUs that this process uses: those with a primary context; none where it uses no driver."""
    found, flags, active = [], c_uint(), c_int()
    with suppress(OSError, DriverError):
        for device in range(device_count()):
            library().cuDevicePrimaryCtxGetState(device, byref(flags), byref(active))
            if active.value:
                found.append(device)
    return found


def version() -> tuple[int, int]:
    """The newest CUDA that the driver supports, as (major, minor)."""
    number = c_int()
    check(library().cuDriverGetVersion(byref(number)), "asking for the driver's version")
    return number.value // 1000, number.value % 1000 // 10


def check(status: int, doing: str) -> None:
    """Raise an error unless a call succeeded.

    Raises:
        DriverError: the call failed.
    """
    if status:
        message = c_char_p()
        library().cuGetErrorString(status, byref(message))
        raise DriverError(f"{doing}: {(message.value or b'unknown error').decode()} (CUDA error {status})")


INVALID_CONTEXT = 201
"""Status of a launch in a thread that has not used the device yet, such as the threads of PyTorch's autograd."""


def make_current(device: int) -> None:
    """Use a device's primary context, which PyTorch uses too, in this thread."""
    context = c_void_p()
    check(library().cuDevicePrimaryCtxRetain(byref(context), device), "finding the device's context")
    check(library().cuCtxSetCurrent(context), "making the device's context current")


def launch_again(arguments: Arguments, status: int, index: int, doing: str) -> None:
    """Launch once more where a launch failed with a status because the thread is new to the device; else raise.

    Args:
        arguments: The arguments of the launch.
        status: Its status.
        index: Number of the device.
        doing: "launching ..." for the error.

    Raises:
        DriverError: the driver refused the launch.
    """
    if status == INVALID_CONTEXT:
        make_current(index)
        status = arguments.launch()
    check(status, doing)


def load_kernel(cubin: bytes, name: str) -> int:
    """The handle of a kernel in a cubin, for every device of its architecture; the cubin stays loaded."""
    loaded, kernel = c_void_p(), c_void_p()
    check(library().cuLibraryLoadData(byref(loaded), cubin, None, None, 0, None, None, 0), f"loading {name}")
    check(library().cuLibraryGetKernel(byref(kernel), loaded, name.encode()), f"finding {name}")
    assert kernel.value is not None
    return kernel.value


@cache
def load_function(cubin: bytes, name: str, device: int, dynamic: int, cluster: int) -> int:
    """The handle of a kernel in a cubin, loaded for one device; threads that use another device can launch it too.

    Args:
        cubin, name: The machine code, and the kernel's name there.
        device: Number of the device.
        dynamic, cluster: Bytes of dynamic shared memory and blocks of a cluster that a launch takes.
    """
    kernel = load_kernel(cubin, name)
    allow(kernel, device, dynamic, cluster)
    context, function, before = c_void_p(), c_void_p(), c_void_p()
    check(library().cuDevicePrimaryCtxRetain(byref(context), device), "finding the device's context")
    check(library().cuCtxPushCurrent_v2(context), "making the device's context current")
    try:
        check(library().cuKernelGetFunction(byref(function), kernel), f"loading {name}")
    finally:
        check(library().cuCtxPopCurrent_v2(byref(before)), "making the context before current")
    assert function.value is not None
    return function.value


def allow(kernel: int, device: int, dynamic: int, cluster: int) -> None:
    """Allow launches of a kernel with these bytes of dynamic shared memory and blocks of a cluster."""
    if dynamic:
        set_attribute(kernel, MAX_DYNAMIC_SHARED_SIZE_BYTES, dynamic, device)
    if cluster > PORTABLE_CLUSTER:
        set_attribute(kernel, NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, device)


def set_attribute(kernel: int, attribute: int, value: int, device: int) -> None:
    """Allow a kernel more of a resource than the portable limit."""
    check(library().cuKernelSetAttribute(attribute, value, kernel, device), "setting a kernel's attribute")


def launch_config(
    teams: int, team: int, threads: int, shared_memory: int, cluster: int, cooperative: bool, early: bool = False
) -> LaunchConfig:
    """The configuration of a launch of teams × team blocks, still without a stream.

    An `early` kernel may begin before the kernel before it on the stream has ended, and waits for that kernel itself.
    """
    attributes = []
    if cooperative:
        attributes.append(_Attribute(COOPERATIVE, 0, (c_uint * 16)(1)))
    if cluster > 1:
        attributes.append(_Attribute(CLUSTER_DIMENSION, 0, (c_uint * 16)(cluster, 1, 1)))
    if early:
        attributes.append(_Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, (c_uint * 16)(1)))
    array = (_Attribute * max(1, len(attributes)))(*attributes)
    return LaunchConfig((teams, team, 1), (threads, 1, 1), shared_memory, None, array, len(attributes))
