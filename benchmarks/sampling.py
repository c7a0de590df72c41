"""Time the way from logits to tokens beside one read of the logits, PyTorch's operations, and FlashInfer if installed.

    python benchmarks/sampling.py -o sampling.json          # on a GPU, in two minutes
    python benchmarks/sampling.py --quick                   # small shapes, also on a CPU

Each line is the median time in microseconds: of the device on a GPU, with the L2 cache flushed before each call.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import onlinesoftmax as osm
from onlinesoftmax.lab.bench.timing import Flush, Times, clock_for

SHAPES = ((1, 128256), (8, 128256), (64, 128256), (512, 128256), (64, 32000))
QUICK = ((2, 1000),)

FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "both, min-p, top 20": {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "top_logprobs": 20},
}

PEAKED = 12.0
"""Number that is added to one logit of a peaked row, so that its token has nearly all probability."""


def by_pytorch(x: torch.Tensor, filters: dict[str, Any]) -> Callable[[], Any]:
    """PyTorch's operations: Gumbel noise without a filter; else a sort or top-k, and multinomial."""

    def gumbel() -> torch.Tensor:
        return (x.float().softmax(-1) / torch.empty_like(x, dtype=torch.float32).exponential_()).argmax(-1)

    def filtered() -> torch.Tensor:
        k, p = filters.get("top_k"), filters.get("top_p")
        values, tokens = x.float().topk(k, -1) if k else x.float().sort(dim=-1, descending=True)
        probabilities = values.softmax(-1)
        if p is not None:
            probabilities = probabilities.where(probabilities.cumsum(-1) - probabilities < p, 0.0)
        return tokens.gather(-1, torch.multinomial(probabilities, 1))

    return filtered if filters else gumbel


def by_flashinfer(x: torch.Tensor, filters: dict[str, Any]) -> Callable[[], Any]:
    """FlashInfer's softmax and its sampler."""
    import flashinfer

    k, p = filters.get("top_k"), filters.get("top_p")

    def call() -> Any:
        probabilities = flashinfer.sampling.softmax(x)
        if k and p:
            return flashinfer.sampling.top_k_top_p_sampling_from_probs(probabilities, k, p)
        if k:
            return flashinfer.sampling.top_k_sampling_from_probs(probabilities, k)
        if p:
            return flashinfer.sampling.top_p_sampling_from_probs(probabilities, p)
        return flashinfer.sampling.sampling_from_probs(probabilities)

    return call


def calls_of(x: torch.Tensor, filters: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """The calls of a case by name; "one read" is our logsumexp."""
    seed = torch.arange(len(x), device=x.device)
    calls = {
        "one read": lambda: osm.logsumexp(x, -1),
        "ours": lambda: osm.sample(x, seed=seed, **filters),
        "torch": by_pytorch(x, filters),
    }
    if importlib.util.find_spec("flashinfer") is not None and x.is_cuda and x.dtype == torch.float32:
        calls["flashinfer"] = by_flashinfer(x, filters)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few small cases")
    parser.add_argument("-o", "--out", type=Path, help="JSON file to write")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock, found = clock_for(device, 4), []
    for rows, tokens in QUICK if given.quick else SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            for peaked in (False, True):
                x = torch.randn(rows, tokens, device=device, generator=torch.Generator(device).manual_seed(0))
                x[:, 7] += PEAKED * peaked
                for name, filters in FILTERS.items():
                    calls = calls_of(x.to(dtype), filters)
                    samples = clock.measure(calls, 10 if given.quick else 50, Flush(clean=calls))
                    times = {who: round(Times.of(each).median_us, 2) for who, each in samples.items()}
                    case = {"rows": rows, "tokens": tokens, "dtype": str(dtype), "peaked": peaked, "filters": name}
                    found.append({**case, "median_us": times})
                    shown = "  ".join(f"{who} {us:.1f}" for who, us in times.items())
                    kind = "peaked" if peaked else "normal"
                    print(f"{rows:4} x {tokens:6}  {dtype}  {kind}  {name:20} {shown}", flush=True)
    if given.out:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        given.out.write_text(json.dumps({"device": name, "torch": torch.__version__, "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
