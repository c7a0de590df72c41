"""Settings with which JAX compiles small programs for the CPU in less than half the time.

The programs of the tests are small, or interpreted kernels: XLA takes longer to compile them than they take to run.
This file imports neither JAX nor torch at once, so that processes without conftest.py can use it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

FLAGS = ("--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1")
"""No second code generator for fusions, and one piece of machine code for each program."""

CHECKED = "0.10."
"""Beginning of the versions of jaxlib that are known to have FLAGS: elsewhere an unknown flag would end the process."""


def is_checked() -> bool:
    """True where this file knows the installed version of jaxlib."""
    try:
        return version("jaxlib").startswith(CHECKED)
    except PackageNotFoundError:
        return False


def environment(devices: int = 1) -> dict[str, str]:
    """Environment variables of a process that runs JAX on the CPU.

    Args:
        devices: Number of devices that the process has.
    """
    flags = [f"--xla_force_host_platform_device_count={devices}"] if devices > 1 else []
    return {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        # No line of Python for each operation of a program: nothing reads them.
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
        "XLA_FLAGS": " ".join([*flags, *(FLAGS if is_checked() else ())]),
    }


def share_context() -> None:
    """Let all programs of this process share an MLIR context; to make one takes a fourth of a small program's time.

    The types and constants of all programs then stay in memory.
    """
    if is_checked():
        from jax._src.interpreters import mlir

        mlir.make_ir_context = cache(mlir.make_ir_context)


def name_partitions() -> None:
    """Let later runs find partitioned programs in the folder of compiled programs.

    A partitioned program holds the address of a Python callback, which is another one in every process.  Here it holds
    a name, which changes with the package: functions of the package run in the callback.
    """
    if is_checked():
        from jax._src import custom_partitioning

        import onlinesoftmax

        package = Path(onlinesoftmax.__file__).parent
        code = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(package.rglob("*.py")))).hexdigest()
        numbers: Counter[str] = Counter()

        def name_of(_: object) -> str:
            test = os.environ["PYTEST_CURRENT_TEST"]
            numbers[test] += 1
            return f"{code} {test} {numbers[test]}"

        custom_partitioning.id = name_of


def check(names: Sequence[str], environment: dict[str, str], marks: str = "") -> None:
    """Run files of checks in with_jax/ in a process of their own, because JAX counts its devices once.

    Args:
        names: Names of the files.
        environment: Environment variables of the process.
        marks: Marks of the checks that run, as pytest's option -m takes them; "" runs all.
    """
    # The files of the options and of the fixtures are not needed, and would import torch.
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-m", marks]
    command += ["-p", "no:cacheprovider", "-p", "no:randomly"]
    paths = [str(Path(__file__).with_name("with_jax") / name) for name in names]
    done = subprocess.run(
        [*command, *paths], env=os.environ | environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
