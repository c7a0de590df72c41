"""Uses the library in a process that looks like Windows, and lacks the packages that macOS lacks.

Call: python tests/package/other_system.py FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

UNIX_MODULES = ("fcntl", "grp", "pwd", "resource", "termios")
UNIX_NAMES = (
    "chown", "fchmod", "fchown", "fork", "getegid", "geteuid", "getgid", "getuid", "register_at_fork",
    "sched_getaffinity", "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK",
)  # fmt: skip
NOT_THERE = ("triton", "cuda.core", "cuda")
"""Packages that have no wheels for macOS."""


def main(folder: Path) -> None:
    # The frameworks have code of their own for each system, and are imported as on this one.
    import numpy as np
    import torch

    for name in (*UNIX_MODULES, *NOT_THERE):
        sys.modules[name] = None  # type: ignore[assignment]  # an import then fails
    for name in UNIX_NAMES:
        if hasattr(os, name):
            delattr(os, name)
    sys.platform = "win32"
    os.environ["ONLINESOFTMAX_CACHE"] = str(folder / "cache")

    import onlinesoftmax as osm
    from onlinesoftmax.core import cache, cache_size
    from onlinesoftmax.kernels import registry

    for name in sorted({*osm.__all__, *dir(osm)} - {"distributed", "jax"}):
        assert getattr(osm, name) is not None, name
    x = torch.randn(4, 6, requires_grad=True)
    osm.cross_entropy(x, torch.zeros(4, dtype=torch.long)).backward()
    assert torch.equal(osm.softmax(x, -1), x.softmax(-1))
    assert osm.sample(x.detach(), seed=0, top_p=0.9).token.shape == (4,)
    assert osm.route(x, 2).weights.shape == (4, 2)
    with osm.override() as mode:
        x.softmax(-1)
    assert mode.report().left
    assert osm.explain((64, 50257), device="h100").plan.backend == "cuda"

    np.save(folder / "x.npy", x.detach().numpy())
    osm.apply_file(folder / "x.npy", folder / "y.npy", axis=-1)
    np.testing.assert_allclose(np.load(folder / "y.npy"), x.softmax(-1).detach().numpy(), rtol=1e-6)
    entry = f"{0:032x}.cubin"
    cache.store_entry(entry, b"code")
    assert cache.load_entry(entry) == b"code"
    assert [item.path.name for item in cache_size.clear(folder / "cache")] == [entry]
    missing = dict(registry.missing())
    assert missing["triton"] == "triton is not installed: pip install 'onlinesoftmax[triton]'"
    assert missing["cuda"] == "cuda.core is not installed: pip install 'onlinesoftmax[cuda]'"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
