"""Programs of XLA with the CUDA kernels: in CUDA graphs, and kept on disk."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("jaxlib", reason="jax is not installed")

import jax

import onlinesoftmax as osm
import onlinesoftmax.jax as osj
from onlinesoftmax.kernels.cuda import xla_handler

REPLAYS = 100_000


@pytest.mark.gpu
def test_replays_of_a_graph_beside_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels whose blocks wait for each other, in a CUDA graph of XLA, beside the same kernels in PyTorch's stream."""
    rows = {"row": (64, 199), "looped": (64, 5000), "cluster": (16, 40000), "grid": (4, 1 << 18)}
    given = {name: np.random.default_rng(3).normal(size=shape).astype(np.float32) for name, shape in rows.items()}
    calls, where = [0], xla_handler.Handler._where

    def counted(handler: xla_handler.Handler, frame: Any) -> tuple[int, int]:
        calls[0] += 1
        return where(handler, frame)

    monkeypatch.setattr(xla_handler.Handler, "_where", counted)

    # Memory that is donated stays in its place, so that XLA need not record the graph again.
    @partial(jax.jit, donate_argnums=0)
    def program(arrays: Any) -> Any:
        for _ in range(2):
            arrays = {name: osj.log_softmax(x, -1, backend="cuda", strategy=name) for name, x in arrays.items()}
        return arrays

    ended, rounds = threading.Event(), [0]

    def work() -> None:
        tensors = {name: torch.from_numpy(x).cuda() for name, x in given.items()}
        with torch.cuda.stream(torch.cuda.Stream()):
            while not ended.is_set():
                for name, x in tensors.items():
                    osm.log_softmax(x, -1, backend="cuda", strategy=name, out=x)
                torch.cuda.current_stream().synchronize()
                rounds[0] += 1

    arrays = jax.device_put(given)
    right = {name: jax.nn.log_softmax(x) for name, x in arrays.items()}
    # A hang ends the process.
    faulthandler.dump_traceback_later(90, exit=True)
    try:
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(work)
            try:
                for i in range(REPLAYS):
                    arrays = program(arrays)
                    if i % 1000 == 0:
                        jax.block_until_ready(arrays)
            finally:
                ended.set()
            other.result()
    finally:
        faulthandler.cancel_dump_traceback_later()
    for name, y in arrays.items():
        np.testing.assert_allclose(y, right[name], rtol=1e-5, atol=1e-5)
    assert rounds[0] > 1000, "the other stream had little to do"
    assert calls[0] < REPLAYS * len(rows) / 100, "XLA does not replay the graph"


OF_KEPT_PROGRAMS = """
import os
import jax, jax.numpy as jnp
import onlinesoftmax.jax as osj

x = jax.random.normal(jax.random.key(0), (64, 5000))

@jax.jit
def program(x):
    dx = {s: jax.grad(lambda x: osj.softmax(x, backend="cuda", strategy=s)[:, 0].sum())(x) for s in STRATEGIES}
    return dx, osj.sample(jax.random.key(1), x, top_k=3).kept

STRATEGIES = "row", "looped", "cluster", "grid"
found, kept = program(x)
p = jax.nn.softmax(x)
dx = p * ((jnp.arange(5000) == 0) - p[:, :1])
assert all(jnp.allclose(found[s], dx, atol=1e-6) for s in STRATEGIES) and (kept == 3).all()
print(sorted(name for name in os.listdir(os.environ["JAX_COMPILATION_CACHE_DIR"]) if "program" in name))
"""


@pytest.mark.gpu
def test_a_program_that_jax_keeps_on_disk(tmp_path: Path) -> None:
    """A later process loads the program with its kernels from JAX's own cache."""
    kept = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    command = [sys.executable, "-c", OF_KEPT_PROGRAMS]
    runs = [
        subprocess.run(command, env={**os.environ, **kept}, capture_output=True, text=True, check=False, timeout=120)
        for _ in range(2)
    ]
    assert [done.returncode for done in runs] == [0, 0], runs
    assert "jit_program" in runs[0].stdout
    assert runs[0].stdout == runs[1].stdout
