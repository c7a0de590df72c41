"""Script: the first calls of a process, from 16 threads at once.  Its argument is the module of the functions to call.

    python tests/first_calls.py torch    kernels on a GPU; elsewhere Triton's interpreter and NVRTC
    python tests/first_calls.py jax      Pallas kernels, interpreted on a CPU

The script prints the errors of the threads.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

import onlinesoftmax as osm

THREADS = 16
X, TARGET = np.random.default_rng(0).standard_normal((6, 130)), np.arange(6)
LSE = np.log(np.exp(X).sum(-1))
PROBABILITIES = np.exp(X - LSE[:, None])
LOSS_GRADIENT = PROBABILITIES - np.eye(130)[TARGET]

Calls = list[tuple[Callable[[], Any], Any]]
"""Functions without arguments, and their results in float64."""


def torch_calls() -> Calls:
    """Calls on tensors: kernels, gradients, and the compiler of CUDA C++."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    how: dict[str, Any] = {} if device == "cuda" else {"backend": "triton"}
    x, target = torch.tensor(X, dtype=torch.float32, device=device), torch.tensor(TARGET, device=device)
    leaf = x.clone().requires_grad_()

    def compiled() -> list[int]:
        from onlinesoftmax.kernels.cuda.compile import build

        code, _, _ = build('extern "C" __global__ void nothing() {}', "sm_90")
        return [len(code) > 0]

    def softmax_gradient() -> Any:
        return torch.autograd.grad(osm.softmax(leaf, **how)[:, 0].sum(), leaf)[0]

    def loss_gradient() -> Any:
        return torch.autograd.grad(osm.cross_entropy(leaf, target, reduction="sum", **how), leaf)[0]

    first = PROBABILITIES[:, :1]
    return [
        (lambda: osm.softmax(x, **how), PROBABILITIES),
        (lambda: osm.log_softmax(x, 0, **how), X - np.log(np.exp(X).sum(0))),
        (lambda: osm.logsumexp(x, (0, 1), **how), np.log(np.exp(X).sum())),
        (lambda: osm.token_logprobs(x, target, **how).logprob, (X - LSE[:, None])[TARGET, TARGET]),
        (softmax_gradient, first * (np.eye(130)[0] - PROBABILITIES)),
        (loss_gradient, LOSS_GRADIENT),
        (compiled, [1]),
        (lambda: osm.logsumexp(X), LSE),
    ]


def jax_calls() -> Calls:
    """Calls on NumPy arrays by JAX, which the first call imports."""

    def loss_gradient() -> Any:
        import jax

        return jax.grad(lambda x: osm.jax.cross_entropy(x, TARGET, reduction="sum", backend="pallas"))(X)

    return [
        (lambda: osm.jax.softmax(X), PROBABILITIES),
        (lambda: osm.jax.log_softmax(X, backend="pallas", strategy="looped"), X - LSE[:, None]),
        (lambda: osm.jax.logsumexp(X, -1, backend="pallas", strategy="row"), LSE),
        (loss_gradient, LOSS_GRADIENT),
    ]


def main(module: str) -> int:
    """Run the calls at once; the number of errors."""
    calls = {"torch": torch_calls, "jax": jax_calls}[module]()
    begin, errors = threading.Barrier(THREADS), []
    # Threads then change places inside of imports too.
    sys.setswitchinterval(1e-6)

    def run(call: Callable[[], Any], want: Any) -> None:
        begin.wait()
        try:
            found = call()
            found = found.detach().cpu() if hasattr(found, "detach") else found
            np.testing.assert_allclose(np.asarray(found), want, rtol=2e-5, atol=1e-6)
        except BaseException:
            errors.append(traceback.format_exc())

    threads = [threading.Thread(target=run, args=calls[i % len(calls)]) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.stdout.write("\n".join(errors))
    return len(errors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
