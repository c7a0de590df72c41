"""The program of one fresh process of the suite `cold`: it imports, calls for the first time, and writes the times.

python cold_worker.py REQUEST, where REQUEST is JSON: the imports to time, the device, the process that asks, the file
for the answer, and the work: the peer, our library and the cases by the name of the call, pickled, because nothing of
this package may be imported before the clock of the import.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
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
    answer |= _calls(bytes.fromhex(request["work"]), device, times)
    Path(request["answer"]).write_text(json.dumps(answer), encoding="utf-8")


def _end_after(parent: int) -> None:
    """End this process at most a second after the process that started it, which may be killed."""
    while sys.platform == "win32" or os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _calls(work: bytes, device: Any, times: dict[str, float]) -> dict[str, Any]:
    """Time the calls one after the other; then compare the result of the first with float64."""
    import torch

    from onlinesoftmax.lab.bench.check import Reference
    from onlinesoftmax.lab.bench.inputs import make_inputs, rounded
    from onlinesoftmax.lab.bench.measure import Judge
    from onlinesoftmax.lab.bench.peers import first_line

    peer, ours, cases = pickle.loads(work)
    function, first, notes = None, None, dict[str, str]()
    for name, case in cases.items():
        inputs = make_inputs(case, device) if peer.ours else rounded(case, make_inputs(case, device))
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
        # Autograd's record of the call is not needed.
        first = first or (case, tuple(t.detach() for t in inputs), result)
    assert first is not None
    case, inputs, result = first
    judge = Judge(case, Reference(case, *inputs), inputs, (ours.yardstick if peer.ours else ours.own)(case))
    verdict = judge.verdict(result, peer.ours)
    return {"wrong": verdict.wrong, "error": verdict.error, "allowed": judge.allowed[0], "notes": notes}


def _since(start: int) -> float:
    return (perf_counter_ns() - start) / 1e3


if __name__ == "__main__":
    main()
