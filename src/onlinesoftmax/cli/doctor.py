"""`onlinesoftmax doctor`: the backends that can run here, the versions of packages, and the hardware."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import TYPE_CHECKING, Any

import typer

from . import output

if TYPE_CHECKING:
    from ..core.device import Device

PACKAGES = ("numpy", "torch", "triton", "jax", "cuda-core", "safetensors")


def doctor(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Show the backends, the versions, this machine's device and the devices known by name.

    \b
    Example:
      onlinesoftmax doctor
    """  # noqa: D301  \b is typer's mark for lines that it does not wrap
    from ..core.device import KNOWN

    here, error = _device_here()
    backends, versions = _backends(), _versions()
    gpus = {key: known for key, known in KNOWN.items() if known.kind == "cuda"}
    if as_json:
        output.print_json({
            "backends": backends,
            "versions": versions,
            "device": here and device_record(here),
            "device_error": error,
            "known": [{"key": key, **device_record(known)} for key, known in gpus.items()],
        })  # fmt: skip
        return
    output.heading("Backends", first=True)
    output.table(("backend", "state", "why"), [(b["name"], b["state"], b["why"]) for b in backends])
    output.heading("Versions")
    output.facts([(name, version or "not installed") for name, version in versions.items()])
    output.heading("This machine's device")
    if here is None:
        output.note(f"  {error}")
    else:
        output.facts(device_facts(here))
    output.heading("Known devices, for explain --device")
    output.table(
        ("name", "device", "arch", "multiprocessors", "bandwidth"),
        [
            (key, known.name, known.arch, str(known.multiprocessors), f"{known.bandwidth:.0f} GB/s")
            for key, known in gpus.items()
        ],
        right=("multiprocessors", "bandwidth"),
    )


def _device_here() -> tuple[Device | None, str | None]:
    """The device of this machine, or the reason why it cannot be described."""
    from ..torch.device import here

    try:
        return here(), None
    except Exception as error:  # a broken installation must not stop the diagnosis
        return None, f"the device cannot be described: {type(error).__name__}: {error}"


def device_record(device: Device) -> dict[str, Any]:
    """A device's attributes for JSON; "arch" is None for a CPU."""
    return {**vars(device), "arch": device.arch if device.kind == "cuda" else None}


def _backends() -> list[dict[str, Any]]:
    """Name, state and reason of every backend."""
    from ..kernels import registry

    found = []
    for name in (*registry.BACKENDS, "pallas"):
        try:
            reason = _unavailable(name)
            state, why = STATES[name](reason)
        except Exception as error:  # a broken installation must not stop the diagnosis
            reason = why = f"cannot be imported: {type(error).__name__}: {error}"
            state = "not usable"
        found.append({"name": name, "usable": reason is None, "state": state, "why": why})
    return found


def _unavailable(name: str) -> str | None:
    """The reason why a backend's kernels cannot be called here; None when they can."""
    from ..kernels import registry
    from ..lab import bridge
    from ..torch.device import here

    return bridge.unavailable(here().kind) if name == "pallas" else registry.unavailable(name)


def _eager(_: str | None) -> tuple[str, str]:
    return "usable", "runs the framework's own operations, on every device"


def _cuda(reason: str | None) -> tuple[str, str]:
    from ..kernels import registry
    from ..planner import measured
    from ..torch.device import here

    if reason is not None:
        missing = any(registry.module_missing(module, "cuda") for module in ("torch", "cuda.core"))
        return "not usable", reason if missing else f"{reason} here; explain compiles the kernels for any GPU"
    machine = here()
    table = measured.table_for(machine)
    source = (
        f"plans use the times measured on {table.device} ({table.source})"
        if table
        else "`onlinesoftmax tune` measures better plans"
    )
    return "usable", f"kernels run on {machine.name}; {source}"


def _triton(reason: str | None) -> tuple[str, str]:
    """The state of Triton: a GPU runs its kernels; without one there are its interpreter and its compiler."""
    from ..kernels import registry

    if reason is not None and any(registry.module_missing(module, "triton") for module in ("torch", "triton")):
        return "not usable", reason
    import torch

    if torch.cuda.is_available() and not registry.load("triton").interpreted():
        return "usable", f"kernels run on {torch.cuda.get_device_name()}"
    if reason is None:
        return (
            "interpreter only",
            "TRITON_INTERPRET=1 is set: kernels run slowly in Triton's interpreter, and are not compiled",
        )
    if torch.cuda.is_available():
        return "not usable", reason
    return "interpreter only", (
        "no NVIDIA GPU here; verify runs the kernels in Triton's interpreter, explain compiles them for any GPU"
    )


def _pallas(reason: str | None) -> tuple[str, str]:
    """The state of JAX's kernels."""
    from ..jax.device import from_jax
    from ..torch.device import here

    if reason is not None:
        return "not usable", reason
    if here().kind == "cpu":
        return "interpreter only", (
            "no NVIDIA GPU here; JAX runs XLA's own operations, and backend='pallas' runs the kernels in an interpreter"
        )
    return "usable", f"JAX's kernels run on {from_jax().name}"


STATES = {"eager": _eager, "cuda": _cuda, "triton": _triton, "pallas": _pallas}
"""For each backend, the function (reason why it cannot be used here, or None) that returns its state and why."""


def _versions() -> dict[str, str | None]:
    from .. import __version__

    versions: dict[str, str | None] = {
        "onlinesoftmax": __version__,
        "python": f"{platform.python_version()} ({platform.system()} {platform.machine()})",
    }
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def device_facts(device: Device) -> list[tuple[str, str]]:
    """A device's attributes with their units, in reading order, without those that a CPU does not have."""
    if device.kind == "cpu":
        middle = [("cores", str(device.multiprocessors)), ("cache", f"{device.l2 / 2**20:.0f} MiB")]
    else:
        major, minor = device.compute_capability
        middle = [
            ("compute capability", f"{major}.{minor} ({device.arch})"),
            ("multiprocessors", str(device.multiprocessors)),
            ("shared memory", f"{device.shared_memory / 2**10:.0f} KiB for one block"),
            ("registers", f"{device.registers} of 32 bits per multiprocessor"),
            ("threads", f"{device.threads} resident on one multiprocessor"),
            ("L2 cache", f"{device.l2 / 2**20:.0f} MiB"),
        ]
    return [
        ("name", device.name),
        ("kind", device.kind),
        *middle,
        ("bandwidth", f"{device.bandwidth:.0f} GB/s"),
        ("source", device.source),
    ]
