"""Checks of the handler of CUDA kernels on two devices, which XLA simulates; test_jax_sharded.py runs this file.

XLA runs the program of each device in a thread of its own, as it does for GPUs.  A kernel is a function of Python here.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from onlinesoftmax.jax import cuda_call
from onlinesoftmax.kernels.cuda.driver import DriverError
from onlinesoftmax.kernels.cuda.xla_handler import Handler, Launch, Start

SIZE = 8


class Machine:
    """Loads a kernel that adds 1, for devices that are simulated.

    Attributes:
        known: Numbers of the devices for which a program is compiled.
        loaded: Number of the device of each load.
        at_load, at_launch: Called by each load, and by each launch.
    """

    def __init__(self) -> None:
        self.known: list[int] = []
        self.loaded: list[int] = []
        self.at_load: Callable[[], Any] = int
        self.at_launch: Callable[[], Any] = int

    def load(self, launch: Launch, device: int) -> Start:
        self.at_load()
        self.loaded.append(device)

        def start(addresses: Sequence[int], stream: int) -> None:
            self.at_launch()
            x, y = (np.ctypeslib.as_array((ctypes.c_float * SIZE).from_address(address)) for address in addresses)
            y[:] = x + 1

        return start


MACHINE = Machine()
HANDLER = Handler(lambda *launch: MACHINE.load(*launch), has_stream=False, devices=lambda: MACHINE.known)
cuda_call.register_handler(HANDLER, "cpu")
MESH = jax.make_mesh((2,), ("v",), axis_types=(AxisType.Auto,))
X = jax.device_put(jnp.arange(2.0 * SIZE), NamedSharding(MESH, P("v")))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(sys.modules[__name__], "MACHINE", made)
    return made


def add_one(x: Any, name: str) -> Any:
    """Add 1 by a kernel; each name is one more kernel to load."""
    call = jax.ffi.ffi_call(cuda_call.TARGET, jax.ShapeDtypeStruct((SIZE,), jnp.float32))
    return call(x, launch=Launch(name, (0, 1), (), (1, 1, 32, 0, 1, False), b"", b"").text())


def on_both(function: Callable[[Any], Any]) -> Any:
    """The program of a function of the part of each device."""
    return jax.jit(jax.shard_map(function, mesh=MESH, in_specs=P("v"), out_specs=P("v"), check_vma=False))


def test_no_device_waits_for_the_load_or_the_launch_of_the_other(machine: Machine) -> None:
    """Both meet: it would be an error after some seconds if one came after the other."""
    machine.at_load = machine.at_launch = threading.Barrier(2, timeout=20).wait
    np.testing.assert_array_equal(on_both(lambda x: add_one(x, "meets"))(X), X + 1)
    assert sorted(machine.loaded) == [0, 1]


def test_kernels_are_loaded_when_a_program_is_compiled(machine: Machine) -> None:
    machine.known = [0, 1]
    program = on_both(lambda x: add_one(x, "compiled")).lower(X).compile()
    assert sorted(machine.loaded) == [0, 1]
    np.testing.assert_array_equal(program(X), X + 1)
    assert sorted(machine.loaded) == [0, 1]


def test_a_device_that_cannot_load_a_kernel(machine: Machine) -> None:
    """It may have another architecture: a program that does not run there is compiled, and runs."""

    def fail() -> None:
        raise DriverError("no kernel image is available for execution on the device")

    machine.known, machine.at_load = [0, 1], fail
    program = on_both(lambda x: add_one(x, "other architecture")).lower(X).compile()
    with pytest.raises(jax.errors.JaxRuntimeError, match="DriverError: no kernel image"):
        jax.block_until_ready(program(X))


@pytest.fixture
def busy() -> Iterator[None]:
    """A thread that runs Python all the time, and hands over the lock often."""
    ended, before = threading.Event(), sys.getswitchinterval()

    def work() -> None:
        while not ended.is_set():
            sum(range(100))

    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=work)
    thread.start()
    yield
    ended.set()
    thread.join()
    sys.setswitchinterval(before)


def test_kernels_between_collective_operations(machine: Machine, busy: None) -> None:
    """Each device waits for the other between two kernels, beside programs of one device in another thread."""

    def exchange(x: Any) -> Any:
        for _ in range(4):
            x = jax.lax.pmean(add_one(x, "between"), "v")
        return x

    program, single = on_both(exchange), jax.jit(lambda x: add_one(x, "between"))
    wrong = []

    def work() -> None:
        parts = [jax.device_put(jnp.arange(float(SIZE)), device) for device in MESH.devices]
        for i in range(300):
            wrong.extend(jnp.flatnonzero(single(parts[i % 2]) != parts[i % 2] + 1))

    right = (X + 4).reshape(2, SIZE).mean(axis=0)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(work)
        for _ in range(300):
            np.testing.assert_array_equal(program(X).reshape(2, SIZE), [right, right])
        other.result()
    assert not wrong
