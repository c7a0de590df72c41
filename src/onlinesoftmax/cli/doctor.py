"""`onlinesoftmax doctor`: the backends that can run here, the versions of packages, and the hardware."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

from . import output
from .options import AS_JSON

if TYPE_CHECKING:
    from ..core.device import Device

PACKAGES = ("numpy", "torch", "triton", "jax", "cuda-core", "safetensors")

MODULES = {"cuda": ("torch", "cuda.core"), "triton": ("torch", "triton")}
"""Modules without which a backend is not installed."""


def doctor(as_json: bool = AS_JSON) -> None:
    """Show the backends, the versions, this machine's device and the devices known by name.

    \b
    Example:
      onlinesoftmax doctor
    """  # noqa: D301  \b is typer's mark for lines that it does not wrap
    from .. import __version__
    from ..core.device import KNOWN
    from ..kernels import registry
    from ..lab.bench.record_file import versions_of

    here, error = _device_here()
    backends = [_backend(name) for name in (*registry.BACKENDS, "pallas")]
    python = f"{platform.python_version()} ({platform.system()} {platform.machine()})"
    versions = {"onlinesoftmax": __version__, "python": python, **versions_of(PACKAGES)}
    gpus = {key: known for key, known in KNOWN.items() if known.kind == "cuda"}
    if as_json:
        output.print_json({
            "backends": backends, "versions": versions, "device": here and device_record(here), "device_error": error,
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
    header = ("name", "device", "arch", "multiprocessors", "bandwidth")
    known = [(key, d.name, d.arch, str(d.multiprocessors), f"{d.bandwidth:.0f} GB/s") for key, d in gpus.items()]
    output.table(header, known, right=header[-2:])


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


def _backend(name: str) -> dict[str, Any]:
    """Name, state and reason of a backend."""
    try:
        usable, state, why = _state(name)
    except Exception as error:  # a broken installation must not stop the diagnosis
        usable, state, why = False, "not usable", f"cannot be imported: {type(error).__name__}: {error}"
    return {"name": name, "usable": usable, "state": state, "why": why}


def _state(name: str) -> tuple[bool, str, str]:
    """(True where the kernels of a backend can be called here, its state, the reason)."""
    from ..jax.device import from_jax
    from ..kernels import registry
    from ..lab.verify import unavailable
    from ..torch.device import here

    if name == "eager":
        return True, "usable", "runs the framework's own operations, on every device"
    has_gpu = here().kind == "cuda"
    reason = unavailable(name, here().kind)
    if reason is not None:
        if name == "pallas" or any(registry.module_missing(module, name) for module in MODULES[name]):
            return False, "not usable", reason
        if name == "cuda":
            return False, "not usable", f"{reason} here; explain compiles the kernels for any GPU"
        if has_gpu:
            return False, "not usable", reason
        verified = "verify runs the kernels in Triton's interpreter, explain compiles them for any GPU"
        return False, "interpreter only", f"no NVIDIA GPU here; {verified}"
    if name == "cuda":
        return True, "usable", f"kernels run on {here().name}; {_source_of_plans(here())}"
    if name == "triton" and (not has_gpu or registry.load("triton").interpreted()):
        slow = "kernels run slowly in Triton's interpreter, and are not compiled"
        return True, "interpreter only", f"TRITON_INTERPRET=1 is set: {slow}"
    if not has_gpu:
        own = "JAX runs XLA's own operations, and backend='pallas' runs the kernels in an interpreter"
        return True, "interpreter only", f"no NVIDIA GPU here; {own}"
    kernels = f"kernels run on {here().name}" if name == "triton" else f"JAX's kernels run on {from_jax().name}"
    return True, "usable", kernels


def _source_of_plans(machine: Device) -> str:
    from ..planner.measured import table_for

    if table := table_for(machine):
        return f"plans use the times measured on {table.device} ({table.source})"
    return "`onlinesoftmax tune` measures better plans"


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
    first, last = [("name", device.name), ("kind", device.kind)], ("source", device.source)
    return [*first, *middle, ("bandwidth", f"{device.bandwidth:.0f} GB/s"), last]
