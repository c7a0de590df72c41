"""Backends by name: imported when first used, and why one cannot be."""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

from ..core.declaration import Operation

BACKENDS = {
    "cuda": f"{__package__}.cuda",
    "triton": f"{__package__}.triton",
    "eager": "",
}
"""Module of each backend's kernels; empty for the framework's own operations, which are always there."""

LOADING = threading.RLock()
"""Held while a compiler or another optional dependency is imported or starts.

Their modules import each other in circles.  Python then gives a thread that imports at the same time as another one a
module that lacks names.  Hazard: code that runs when a module of this package is imported must not take the lock.
"""


@cache
def load(name: str) -> ModuleType:
    """The module of a backend with kernels of ours: it has `unavailable`, `prepare` and `compile_request`.

    Raises:
        ValueError: there is no such backend, or it has no kernels of ours.
    """
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; backends: {', '.join(BACKENDS)}")
    if not BACKENDS[name]:
        raise ValueError(f"backend {name!r} has no module of kernels: the framework's own operations run")
    with LOADING:
        return importlib.import_module(BACKENDS[name])


@cache
def small_kernels(backend: str, name: str) -> ModuleType:
    """The module of a backend with the small kernels beside the passes over the logits.

    multiply     bind(x, factor, out) gives multiply(x, factor, out): a contiguous tensor times one of one element
    reduction    bind(reduction) gives run(out, tensors), which reduces the rows of a loss
    merge        bind(kernel, rows) gives run(tensors) of the kernel "merge" or "incoming" of sharded rows
    """
    with LOADING:
        return importlib.import_module(f"{BACKENDS[backend]}.{name}")


@cache
def kernels_of(operation: Operation, backend: str, strategy: str) -> ModuleType | None:
    """The module of an operation's own kernels for a strategy, named after the backend; None where it has none."""
    if all(row[:2] != (backend, strategy) for row in operation.own_strategies):
        return None
    with LOADING:
        return importlib.import_module(f"{operation.kernels}.{backend}")


def strategy_module(operation: Operation, backend: str, strategy: str) -> ModuleType:
    """The module of a strategy, of a backend that has one for each: the operation's own, or the backend's."""
    own = kernels_of(operation, backend, strategy)
    with LOADING:
        return own or importlib.import_module(f"{__package__}.{backend}.{strategy}")


def has_nvidia_gpu() -> bool:
    """True where PyTorch sees a GPU of NVIDIA.  In PyTorch for ROCm, a GPU of AMD has the device type "cuda" too."""
    import torch

    return torch.cuda.is_available() and torch.version.hip is None


@cache
def unavailable(name: str) -> str | None:
    """Why this backend cannot be used on this machine, in one sentence; None when it can."""
    if name in BACKENDS and not BACKENDS[name]:
        return None
    with LOADING:
        reason: str | None = load(name).unavailable()
    return reason


def missing() -> tuple[tuple[str, str], ...]:
    """(name, reason) of every backend that cannot be used on this machine."""
    return tuple((name, reason) for name in BACKENDS if (reason := unavailable(name)))


@contextmanager
def needing(package: str, who: str) -> Iterator[None]:
    """Say what to install if the block imports a package that is missing.

    Args:
        package: The package, which is also the extra of this one that installs it.
        who: The subject of the sentence.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        sentence = f"{who} needs {package}, which is not installed: pip install 'onlinesoftmax[{package}]'"
        raise ModuleNotFoundError(sentence, name=package) from None


def module_missing(module: str, extra: str) -> str | None:
    """Return a sentence that says what to install if a module is missing, or None if it is installed.

    Args:
        module: Full name of the module, such as "cuda.core".
        extra: Name of the extra of this package that installs the module.
    """
    try:
        with LOADING:
            found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that should hold the module is missing
        found = False
    return None if found else f"{module} is not installed: pip install 'onlinesoftmax[{extra}]'"
