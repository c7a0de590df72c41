"""The mixture of experts in PyTorch learns, and balances its experts by a loss or without one."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

for name in ("torch", "typer", "sklearn"):
    # importorskip would import them in every process that collects tests.
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"the example needs {name}", allow_module_level=True)


@pytest.mark.early
def test_the_script_as_a_user_runs_it(example: ModuleType) -> None:
    from typer.testing import CliRunner

    def largest(*options: str) -> float:
        """The largest share of the training images in the last epoch, in percent; even use is 25."""
        result = CliRunner().invoke(example.app, ["--epochs", "6", *options])
        assert result.exit_code == 0, result.output
        first, *rest = result.output.splitlines()
        assert first.startswith("1437 training images, 360 test images; Config(experts=8, ")
        assert float(rest[-1].split()[2].rstrip("%")) > 90
        shares = [float(line.split()[1].rstrip("%")) for line in rest[rest.index("") + 2 :][:8]]
        assert sum(shares) == pytest.approx(200, abs=0.5)
        return float(rest[5].split(" to ")[1].split("%")[0])

    by_loss, by_bias, by_nothing = largest(), largest("--balance", "0", "--correct", "0.01"), largest("--balance", "0")
    assert by_bias < 35 < by_loss < by_nothing - 20
