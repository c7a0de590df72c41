"""An operation that JAX does not have: its declared formula is a primitive with every derivative."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import numpy as np
from onlinesoftmax.ops import also_declared
from sparsemax.declare import BACKWARD, FORWARD

# The primitives are made when the module is imported.
with also_declared(FORWARD, BACKWARD):
    import jax
    import fast_xla
    from jax.test_util import check_grads
    from onlinesoftmax import explain
    from onlinesoftmax.core.call import Call, Settings
    from onlinesoftmax.core.task import Choice
    from onlinesoftmax.jax.prepare import options_of, rows_of
    from onlinesoftmax.jax.run import result
    from onlinesoftmax.numpy.run import run

    fast_xla.share_context()
    jax.config.update("jax_enable_x64", True)
    x = np.random.default_rng(0).standard_normal((9, 3))
    where = np.ones((9, 1), bool)
    where[2] = False

    def sparsemax(x, softcap=None, choice=Choice()):
        rows = rows_of("sparsemax", x, 0, options_of("sparsemax", 2.0, softcap, None, where))
        return rows.back(result(rows, "sparsemax", choice))

    expected = run(Call(FORWARD, np.where(where, 2 * x, -np.inf), Settings(0)))
    np.testing.assert_allclose(jax.jit(sparsemax)(x), expected, atol=1e-15)
    check_grads(lambda x: sparsemax(x, 3.0), (x,), 2, modes=["fwd", "rev"])
    assert "not pallas/row: cannot: sparsemax has no such kernel; it has cuda/row, eager/row" in str(
        explain((9, 3), operation="sparsemax", framework="jax")
    )
    try:
        sparsemax(x, choice=Choice("pallas"))
    except ValueError as error:
        assert "pallas/row: sparsemax has no such kernel; it has eager/row" in str(error)
    else:
        raise AssertionError("a kernel that does not exist has run")
"""


@pytest.mark.early
def test_jax_runs_the_formula_of_a_declaration() -> None:
    tests = Path(__file__).parents[1]
    paths = os.pathsep.join([str(tests.parent / "src"), str(tests)])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
