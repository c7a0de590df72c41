"""The program of one fresh process of the suite `cold`: it imports, calls for the first time, and writes the times.

python cold_worker.py REQUEST, where REQUEST is JSON: the peer, the cases by the name of the call, the device, the plan
that is forced, the process that asks, and the file for the answer.  Nothing of this package may be imported before the
clock of the import.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from time import perf_counter_ns
from typing import Any


def main() -> None:
    """Answer the request of the command line."""
    # Python looks here first for modules, so that check.py of this folder would be imported for another "check".
    folder = str(Path(__file__).parent)
    sys.path[:] = [path for path in sys.path if path != folder]
    request = json.loads(sys.argv[1])
    threading.Thread(target=_end_after, args=(request["parent"],), daemon=True).start()
    times: dict[str, float] = {}
    answer: dict[str, Any] = {"times": times}
    start = perf_counter_ns()
    torch = importlib.import_module("torch")
    times["import torch"] = _since(start)
    device = torch.device(request["device"])
    if device.type == "cuda":
        start = perf_counter_ns()
        torch.cuda.set_device(device)
        torch.empty(1, device=device).zero_()
        torch.cuda.synchronize(device)
        times["start GPU"] = _since(start)
    if request["module"] != "torch":
        start = perf_counter_ns()
        # The function is looked up too, because this package imports its functions when they are first named.
        getattr(importlib.import_module(request["module"]), request["function"], None)
        times["import library"] = _since(start)
    if request["in_jax"]:
        from onlinesoftmax.lab import jax_on_torch

        start = perf_counter_ns()
        jax_on_torch.on_tensors(lambda x: x)(torch.zeros(1, device=device))
        times["start JAX"] = _since(start)
    answer |= _calls(request, device, times)
    Path(request["answer"]).write_text(json.dumps(answer), encoding="utf-8")


def _end_after(parent: int) -> None:
    """End this process at most a second after the process that started it, which may be killed."""
    while sys.platform == "win32" or os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _calls(request: dict[str, Any], device: Any, times: dict[str, float]) -> dict[str, Any]:
    """Time the calls one after the other; then compare the result of the first with float64."""
    import torch

    from onlinesoftmax.lab.bench.cases import Case
    from onlinesoftmax.lab.bench.inputs import make_inputs
    from onlinesoftmax.lab.bench.peers import first_line

    peer, function, first = _peer(request, device), None, None
    notes: dict[str, str] = {}
    for name, recorded in request["cases"].items():
        case = Case(**{**recorded, "shape": tuple(recorded["shape"])})
        inputs = peer.takes(case, make_inputs(case, device))
        arguments = peer.arguments(case, inputs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = perf_counter_ns()
        try:
            # A user makes a function once, and calls it with every shape.
            function = function or peer.prepare(case)
            result = function(*arguments)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as error:  # a library may refuse a later shape in any way
            if first is None:
                raise
            notes[name] = first_line(error)
            continue
        times[name] = _since(start)
        first = first or (case, inputs, result)
    assert first is not None
    return {**_verdict(*first, _ours(request, device), request["peer"] == "ours"), "notes": notes}


def _peer(request: dict[str, Any], device: Any) -> Any:
    from onlinesoftmax.lab.bench.jax_peers import JaxNN
    from onlinesoftmax.lab.bench.libraries import PEERS
    from onlinesoftmax.lab.bench.peers import Compiled

    if request["peer"] == "ours":
        return _ours(request, device)
    peer = {**PEERS, JaxNN.name: JaxNN}[request["peer"]](device.type)
    if isinstance(peer, Compiled):
        # The default of torch.compile: a second shape compiles for every further shape.
        peer.dynamic = None
    return peer


def _ours(request: dict[str, Any], device: Any) -> Any:
    """Our library for the framework of the request."""
    from onlinesoftmax.lab.bench.jax_peers import OursInJax
    from onlinesoftmax.lab.bench.peers import Ours

    return (OursInJax if request["in_jax"] else Ours)(device.type, request["backend"], request["strategy"])


def _verdict(case: Any, inputs: Any, result: Any, own: Any, ours: bool) -> dict[str, Any]:
    """The error of a result, and the error that is allowed: that of the framework's own function."""
    from onlinesoftmax.lab.bench.check import Reference
    from onlinesoftmax.lab.bench.measure import Judge

    # Autograd's record of the call is not needed.
    inputs = tuple(t.detach() for t in inputs)
    judge = Judge(case, Reference(case, *inputs), inputs, (own.yardstick if ours else own.own)(case))
    verdict = judge.verdict(result, ours)
    return {"wrong": verdict.wrong, "error": verdict.error, "allowed": judge.allowed[0]}


def _since(start: int) -> float:
    return (perf_counter_ns() - start) / 1e3


if __name__ == "__main__":
    main()
