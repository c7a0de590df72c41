"""`onlinesoftmax doctor`: what can run here, with which versions, on which hardware."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import typer

from . import output

PACKAGES = ("numpy", "torch", "triton", "jax", "cuda-core", "safetensors")


def doctor(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """What can run here: backends, versions, this machine's device and the devices known by name.

    \b
    Example:
      onlinesoftmax doctor
    """  # noqa: D301  \b is typer's mark for lines that stay as they are
    found = diagnosis()
    if as_json:
        output.print_json(found)
        return
    output.heading("Backends", first=True)
    output.table(("backend", "state", "why"), [(b["name"], b["state"], b["why"]) for b in found["backends"]])
    output.heading("Versions")
    output.facts([(name, version or "not installed") for name, version in found["versions"].items()])
    output.heading("This machine's device")
    if found["device"] is None:
        output.note(f"  {found['device_error']}")
    else:
        output.facts(device_facts(found["device"]))
    output.heading("Known devices, for explain --device")
    output.table(
        ("name", "device", "arch", "multiprocessors", "bandwidth"),
        [
            (d["key"], d["name"], d["arch"], str(d["multiprocessors"]), f"{d['bandwidth']:.0f} GB/s")
            for d in found["known"]
        ],
        right=("multiprocessors", "bandwidth"),
    )


def diagnosis() -> dict[str, Any]:
    """Everything the command prints, for JSON."""
    from ..core.device import KNOWN
    from ..kernels import registry
    from ..torch.device import here as this_device

    here, error = None, None
    try:
        machine = this_device()
        here = {**machine.as_dict(), "arch": machine.arch if machine.kind == "cuda" else None}
    except Exception as reason:  # a broken installation is what a doctor is called for
        error = f"cannot be told: {type(reason).__name__}: {reason}"
    gpus = [(key, known) for key, known in KNOWN.items() if known.kind == "cuda"]
    return {
        "backends": [*(_backend(name) for name in registry.BACKENDS), _pallas()],
        "versions": _versions(),
        "device": here,
        "device_error": error,
        "known": [{"key": key, **known.as_dict(), "arch": known.arch} for key, known in gpus],
    }


def _backend(name: str) -> dict[str, Any]:
    from ..kernels import registry

    try:
        reason = registry.unavailable(name)
        state, why = "usable" if reason is None else "not usable", reason or ""
        if name == "eager":
            why = reason or "the framework's own operations, on every device"
        elif name == "triton" and not any(registry.module_missing(module, "triton") for module in ("torch", "triton")):
            state, why = _triton(reason)
        elif name == "cuda":
            why = _cuda(reason)
    except Exception as error:  # a broken installation is what a doctor is called for
        reason = why = f"cannot be imported: {type(error).__name__}: {error}"
        state = "not usable"
    return {"name": name, "usable": reason is None, "state": state, "why": why}


def _pallas() -> dict[str, Any]:
    """Who runs JAX's kernels."""
    from ..jax import bridge
    from ..jax.device import from_jax
    from ..torch.device import here

    try:
        kind = here().kind
        reason = bridge.unavailable(kind)
        state, why = "usable" if reason is None else "not usable", reason or ""
        if reason is None and kind == "cpu":
            state, why = (
                "interpreter only",
                "of JAX: no NVIDIA GPU here; XLA runs what backend='pallas' does not ask for",
            )
        elif reason is None:
            why = f"of JAX: kernels run on {from_jax().name}"
    except Exception as error:  # a broken installation is what a doctor is called for
        reason = why = f"cannot be told: {type(error).__name__}: {error}"
        state = "not usable"
    return {"name": "pallas", "usable": reason is None, "state": state, "why": why}


def _cuda(reason: str | None) -> str:
    """Who plans these kernels, or why they cannot run."""
    from ..kernels import registry
    from ..planner import measured as tuning
    from ..torch.device import here

    if reason is not None:
        missing = any(registry.module_missing(module, "cuda") for module in ("torch", "cuda.core"))
        return reason if missing else f"{reason} here; explain compiles the kernels for any GPU"
    machine = here()
    table = tuning.table_for(machine)
    planned = f"planned by the table of {table.device} ({table.source})" if table else "onlinesoftmax tune plans better"
    return f"kernels run on {machine.name}; {planned}"


def _triton(reason: str | None) -> tuple[str, str]:
    """Triton is installed: the GPU decides, and without one there is still the interpreter and the compiler."""
    import torch

    from ..kernels import registry

    if torch.cuda.is_available() and not registry.load("triton").interpreted():
        return "usable", f"kernels run on {torch.cuda.get_device_name()}"
    if reason is None:
        return (
            "interpreter only",
            "TRITON_INTERPRET=1 is set: kernels run in Triton's interpreter, slowly; none is compiled",
        )
    if torch.cuda.is_available():
        return "not usable", reason
    return "interpreter only", (
        "no NVIDIA GPU here; verify runs the kernels in Triton's interpreter, explain compiles them for any GPU"
    )


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


def device_facts(device: dict[str, Any]) -> list[tuple[str, str]]:
    """A device's attributes with their units, in reading order; what a CPU does not have is left out."""
    if device["kind"] == "cpu":
        middle = [("cores", str(device["multiprocessors"])), ("cache", f"{device['l2'] / 2**20:.0f} MiB")]
    else:
        major, minor = device["compute_capability"]
        middle = [
            ("compute capability", f"{major}.{minor} ({device['arch']})"),
            ("multiprocessors", str(device["multiprocessors"])),
            ("shared memory", f"{device['shared_memory'] / 2**10:.0f} KiB for one block"),
            ("registers", f"{device['registers']} of 32 bits a multiprocessor"),
            ("threads", f"{device['threads']} resident on a multiprocessor"),
            ("L2 cache", f"{device['l2'] / 2**20:.0f} MiB"),
        ]
    return [
        ("name", device["name"]),
        ("kind", device["kind"]),
        *middle,
        ("bandwidth", f"{device['bandwidth']:.0f} GB/s"),
        ("source", device["source"]),
    ]
