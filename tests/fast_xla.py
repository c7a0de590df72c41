"""Settings with which JAX compiles small programs for the CPU in less than half the time.

The programs of the tests are small, or interpreted kernels: XLA takes longer to compile them than they take to run.
This file imports neither JAX nor torch, so that processes without conftest.py can use it.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

FLAGS = ("--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1")
"""One code generator instead of two, and one piece of code for each program."""

FIRST_UNKNOWN = (0, 11)
"""First version of jaxlib for which nobody has checked that XLA knows FLAGS: an unknown flag ends the process."""


def environment(devices: int = 1) -> dict[str, str]:
    """Environment variables of a process that runs JAX on the CPU.

    Args:
        devices: Number of devices that the process has.
    """
    flags = [f"--xla_force_host_platform_device_count={devices}"] if devices > 1 else []
    try:
        known = tuple(map(int, version("jaxlib").split(".")[:2])) < FIRST_UNKNOWN
    except PackageNotFoundError:
        known = False
    return {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": " ".join([*flags, *(FLAGS if known else ())])}
