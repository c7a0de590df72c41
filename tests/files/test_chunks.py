"""Chunks that do not belong together, and second passes with other chunks than the first."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from onlinesoftmax.files.chunks import softmax_chunks, state_of_chunks

torch = pytest.importorskip("torch", reason="chunks may be tensors")


@pytest.mark.parametrize(
    "chunks",
    [
        lambda x: (lambda once: lambda: once)(iter(x)),
        lambda x: (lambda once: lambda: (t for t in once))(iter(x)),
        lambda x: (lambda calls: lambda: x if next(calls) == 0 else x[:2])(itertools.count()),
        lambda x: (lambda calls: lambda: x if next(calls) == 0 else [*x, x[0]])(itertools.count()),
        lambda x: (lambda calls: lambda: x if next(calls) == 0 else [])(itertools.count()),
    ],
    ids=["one iterator", "used up", "fewer", "more", "none"],
)
@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
def test_chunks_of_the_second_pass_must_be_those_of_the_first(chunks: Any, kind: Any) -> None:
    with pytest.raises(ValueError, match=r"softmax_chunks: .*chunks\(\) returned"):
        list(softmax_chunks(chunks([kind([1.0, 2.0]), kind([3.0]), kind([4.0])])))


def test_chunks_of_other_shapes_and_dtypes() -> None:
    def of(*shapes: tuple[int, ...]) -> list[np.ndarray]:
        return [np.zeros(shape, np.float32) for shape in shapes]

    for chunks, dim in ((of((2, 3), (1, 3)), 1), (of((2, 3), (3,)), -1), (of((2, 3), (2, 4)), 0)):
        with pytest.raises(ValueError, match=r"chunk 1 of shape .* does not fit .* shape \((2, 1|1, 3)\)"):
            state_of_chunks(chunks, dim)
    with pytest.raises(ValueError, match=r"chunk 2 of shape \(2,\) and dtype float64 does not fit"):
        state_of_chunks([*of((2,), (2,)), np.zeros(2)])
    assert state_of_chunks([*of((2,)), np.zeros(2, np.float16)]).l == 4
    with pytest.raises(TypeError, match="chunks must be a function that returns the chunks, not list"):
        next(softmax_chunks(of((2,))))  # type: ignore[arg-type]  # the mistake itself
    with pytest.raises(TypeError, match="masked array"):
        list(softmax_chunks(lambda: [np.ma.array([1.0, 2.0], mask=[True, False])]))


def test_chunks_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="empty"):
        state_of_chunks([])
    with pytest.raises(ValueError, match="'logsumexp'"):
        next(softmax_chunks(lambda: [np.zeros(3)], operation="logsumexp"))
    with pytest.raises(TypeError):
        state_of_chunks([np.zeros(3, int)])
