"""Description of the device that JAX sees, or lowers a program for, for the planner."""

from __future__ import annotations

from functools import cache
from typing import Any

from ..core.device import KNOWN, Device, generic, model_of

UNNAMED_GPU = generic("NVIDIA GPU of compute capability 9.0, not named", (9, 0), 114)
"""GPU that a program is planned for where JAX has no GPU and the program names none.

JAX itself compiles Pallas kernels for compute capability 9.0 in this case. 114 multiprocessors are those of an
H100 PCIe, the fewest of an H100 or H200 (NVIDIA H100 architecture whitepaper).
"""


@cache
def from_jax() -> Device:
    """Return the first GPU that JAX has, or the CPU where JAX has no GPU."""
    return _gpu() or KNOWN["cpu"]


def is_on(platform: str, x: Any) -> bool:
    """Return True for an array whose devices are all of a platform, "cpu" or "gpu"; a tracer has no devices."""
    import jax

    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        return False
    return all(device.platform == platform for device in x.devices())


def to_lower_for() -> Device:
    """Return the GPU that a program for CUDA is planned for, which need not be present.

    A mesh can name the GPU:
    `jax.sharding.AbstractMesh(..., abstract_device=jax.sharding.AbstractDevice("NVIDIA H200", 132, "cuda"))`.
    A named GPU that is neither present nor of a known model counts as not named. Without a name, the GPU is the
    first one that JAX has, or UNNAMED_GPU where JAX has none.
    """
    name, gpu = _name_in_mesh(), _gpu()
    if name is not None and (gpu is None or gpu.name != name):
        model = model_of(name)
        if model is not None and model.kind == "cuda":
            return model
    return gpu or UNNAMED_GPU


def local_gpus() -> int:
    """Number of GPUs that JAX runs from this process, which may see more of them; 0 where it runs none."""
    import jax

    try:
        return len(jax.local_devices(backend="cuda"))
    except RuntimeError:
        return 0


def _name_in_mesh() -> str | None:
    """Return the name of the device that the mesh in use is made for, or None."""
    import jax

    mesh = jax.sharding.get_abstract_mesh()
    # Older versions of JAX have no abstract devices.
    return getattr(getattr(mesh, "abstract_device", None), "device_kind", None)


@cache
def _gpu() -> Device | None:
    """Return the first GPU that JAX has, or None."""
    import jax

    try:
        gpu = jax.devices("cuda")[0]
    except RuntimeError:
        return None
    # JAX reports the name, the compute capability and the number of multiprocessors, but not their resources.
    major, minor = (int(part) for part in str(gpu.compute_capability).split("."))
    return generic(gpu.device_kind, (major, minor), gpu.core_count)
