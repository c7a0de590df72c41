"""Uses an installed onlinesoftmax where NumPy is the only other package: every public name, and each kind of data file.

`make release-check` runs this file in an environment that has nothing but the wheel:

    python tests/package/numpy_alone.py
"""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path


def main() -> None:
    import numpy as np

    import onlinesoftmax as osm
    from onlinesoftmax.kernels.cuda import source

    distribution = importlib.metadata.distribution("onlinesoftmax")
    home = Path(osm.__file__).resolve().parent
    assert home == Path(str(distribution.locate_file("onlinesoftmax"))).resolve(), f"{home} is not installed"
    assert distribution.version == osm.__version__

    installed = {found.metadata["Name"].lower() for found in importlib.metadata.distributions()}
    assert installed <= {"onlinesoftmax", "numpy", "pip", "setuptools"}, f"not NumPy alone: {sorted(installed)}"

    names = sorted({*osm.__all__, *dir(osm), "jax", "reference"})
    for name in names:
        assert getattr(osm, name) is not None, name

    x = np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 6)
    np.testing.assert_allclose(osm.softmax(x).sum(-1), 1, rtol=1e-6)
    np.testing.assert_allclose(osm.State.of(x, dim=1).logsumexp(), osm.logsumexp(x, 1), rtol=1e-6)

    # The plan comes from a table of measured times (.json), and the kernel is made from CUDA C++ (.cuh).
    explained = osm.explain((4096, 50257), dtype="bfloat16", device="h200")
    assert explained.plan.backend == "cuda"
    files = ["numeric/numbers", *source.FILES, *(name for names in source.KERNEL_FILES.values() for name in names)]
    assert all(source.text(f"{name}.cuh") for name in files)
    print(f"{len(names)} names, Python {platform.python_version()}, NumPy {np.__version__}, {home}")  # noqa: T201  for the log


if __name__ == "__main__":
    main()
