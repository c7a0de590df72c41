"""Any strides as rows: compared with indexing, element by element."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onlinesoftmax.core.task import Task, task_of
from onlinesoftmax.core.view import View, power_of_two_divisor
from onlinesoftmax.ops import OPERATIONS


def two(shape: tuple[int, ...], axis: int, x: tuple[int, ...], y: tuple[int, ...]) -> Task:
    """The softmax of an input and an output with these strides."""
    views = {"x": View(x, "float32"), "y": View(y, "float32")}
    return task_of(OPERATIONS["softmax"], ("y",), shape, axis, views)


def offsets(task: Task, name: str) -> np.ndarray:
    """Offset of each element, as the kernels count: the first size is the fastest."""
    starts, view = [], task.tensors[name]
    for row in range(task.rows):
        start, rest = 0, row
        for size, stride in zip(task.sizes, view.outer, strict=True):
            start += rest % size * stride
            rest //= size
        starts.append(start)
    return np.add.outer(np.array(starts, dtype=int), np.arange(task.cols) * view.col)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_every_element_is_visited_once_and_x_meets_its_y(shape: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    dim = data.draw(st.integers(0, len(shape) - 1))
    storage = np.arange(int(np.prod(shape))).reshape([shape[i] for i in order])
    x = storage.transpose(np.argsort(order))
    y = np.arange(x.size).reshape(x.shape)
    task = two(x.shape, dim, tuple(s // x.itemsize for s in x.strides), tuple(s // y.itemsize for s in y.strides))
    x_offsets, y_offsets = (offsets(task, name) for name in ("x", "y"))
    assert sorted(x_offsets.ravel()) == list(range(x.size))
    where_in_y = dict(zip(x.ravel().tolist(), y.ravel().tolist(), strict=True))
    assert all(where_in_y[a] == b for a, b in zip(x_offsets.ravel().tolist(), y_offsets.ravel().tolist(), strict=True))


@pytest.mark.parametrize("dim", range(4))
def test_dense_tensors_need_two_outer_dimensions_at_most(dim: int) -> None:
    shape = (3, 4, 5, 6)
    for order in itertools.permutations(range(4)):
        strides, step = [0] * 4, 1
        for i in reversed(order):
            strides[i] = step
            step *= shape[i]
        assert len(two(shape, dim, tuple(strides), tuple(strides)).sizes) <= 2


def test_expanded_rows_are_one_dimension_of_stride_zero() -> None:
    task = two((6, 50), 1, (0, 1), (50, 1))
    assert (task.sizes, task.tensors["x"].outer, task.tensors["y"].outer) == ((6,), (0,), (50,))


def test_units() -> None:
    def units(cols: int, x: int, y: int) -> tuple[int, int, int]:
        task = two((4, cols), 1, (x, 1), (y, 1))
        return task.tensors["x"].unit, task.tensors["y"].unit, task.cols_unit

    assert units(1000, 1000, 1000) == (8, 8, 8)
    assert units(50257, 50257, 50257) == (1, 1, 1)
    assert units(90, 96, 90) == (16, 2, 2)
    assert power_of_two_divisor(0) == 16


def test_adjacent() -> None:
    assert two((8, 100, 32), 1, (3200, 32, 1), (3200, 32, 1)).adjacent == 32
    assert two((8, 100), 1, (100, 1), (100, 1)).adjacent == 1
    assert two((8, 100, 32), 1, (6400, 64, 2), (3200, 32, 1)).adjacent == 1
