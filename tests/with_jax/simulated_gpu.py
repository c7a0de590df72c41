"""A GPU that is simulated on the host, in the place of XLA's CPU: it runs the sources of the kernels of a program."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import kept
from cuda_machine import load_kernel
from cuda_simulator import simulated_own_source, simulated_source
from onlinesoftmax.core.device import known
from onlinesoftmax.jax import cuda_call, custom_op, kernel_or_formula
from onlinesoftmax.kernels.cuda import compile, source, xla_handler
from onlinesoftmax.kernels.cuda.arguments import OwnKernel, OwnLaunch
from onlinesoftmax.kernels.cuda.xla_handler import Launch
from onlinesoftmax.kernels.request import Request


class Host:
    """The sources that programs may run, by what stands for their machine code."""

    def __init__(self) -> None:
        self.folder = Path()
        self.sources: dict[bytes, Callable[[], str]] = {}

    def load(self, launch: Launch, device: int) -> xla_handler.Start:
        """Compile the source of a launch for the host."""
        kernel = load_kernel(self.sources[launch.cubin](), self.folder)
        teams, team, _, _, cluster, together = launch.config

        def start(addresses: Sequence[int], stream: int) -> None:
            if launch.mail:
                ctypes.memset(addresses[-1], launch.empty, launch.mail_bytes)
            values = np.frombuffer(bytearray(launch.values), np.uint64)
            values[list(launch.fields)] = launch.with_mail(addresses)
            kernel.run(ctypes.c_void_p(values.ctypes.data), teams, team, teams * team if together else cluster)

        return start

    def launch(self, make: Any, request: Request, *more: Any) -> Launch:
        """The launch of a request."""
        code = code_of(source.source(request))
        self.sources[code] = partial(simulated_source, request)
        found: Launch = make(request, *more)
        return found._replace(cubin=code)

    def own_launch(self, make: Any, kernel: OwnKernel, shape: Any, *more: Any) -> OwnLaunch:
        """The launch of a kernel that an operation brings."""
        found: OwnLaunch = make(kernel, shape, *more)
        self.sources[code_of(found.text)] = partial(simulated_own_source, kernel, shape)
        return found


def code_of(text: str, _: str = "") -> bytes:
    """A number of a source, in the place of its machine code."""
    return hashlib.sha256(text.encode()).digest()


HOST = Host()
HANDLER = xla_handler.Handler(HOST.load, has_stream=False, devices=list)


@cache
def register() -> None:
    """Register the handler of the simulated GPU, which XLA allows once."""
    cuda_call.register_handler(HANDLER, "cpu")


@contextmanager
def simulated_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plan for an H100, and run its kernels on the host."""
    register()
    HOST.folder = kept.for_kernels(request.config, request.getfixturevalue("tmp_path_factory"))
    plan, run, device = custom_op.kernel_plan, kernel_or_formula.run, known("h100")
    monkeypatch.setattr(custom_op, "kernel_plan", lambda platform, *call: plan("cuda", *call))
    monkeypatch.setattr(kernel_or_formula, "run", lambda platform, *call: run("cuda", *call))
    for module in (custom_op, kernel_or_formula):
        monkeypatch.setattr(module, "to_lower_for", lambda: device)
    monkeypatch.setattr(cuda_call, "_launch", partial(HOST.launch, cuda_call._launch))
    monkeypatch.setattr(compile, "cubin", code_of)
    make = OwnKernel.launch
    monkeypatch.setattr(OwnKernel, "launch", lambda *given: HOST.own_launch(make, *given))
    with jax.default_device(jax.devices("cpu")[0]):
        yield
    # Programs with kernels that only this fixture runs.
    jax.clear_caches()
