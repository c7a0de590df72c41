"""Tasks: what follows from a declaration and from descriptions of tensors."""

from __future__ import annotations

import itertools
import pickle

import pytest

from onlinesoftmax.core.options import SCORE_OPTIONS
from onlinesoftmax.core.problem import Problem
from onlinesoftmax.core.task import Flags, Task, one_row_as_many, operand_views, task_of
from onlinesoftmax.core.view import View, contiguous_view, row_view
from onlinesoftmax.ops import OPERATIONS


def softmax_of(
    shape: tuple[int, ...], x: tuple[int, ...] | None = None, y: tuple[int, ...] | None = None, **more: View
) -> Task:
    like = contiguous_view(shape, "bfloat16")
    tensors = {"x": like._replace(strides=x or like.strides), "y": like._replace(strides=y or like.strides), **more}
    return task_of(OPERATIONS["softmax"], ("y",), shape, len(shape) - 1, tensors)


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=str)
def test_declarations_are_consistent(operation: object) -> None:
    operation = OPERATIONS[str(operation)]
    assert pickle.loads(pickle.dumps(operation)) is operation
    assert operation.element_operands[0] == "x"
    assert sum(output.kind == "element" for output in operation.outputs) <= 1
    assert set(operation.options) <= set(SCORE_OPTIONS)
    sums = {sum_.name for sum_ in operation.accumulators}
    assert all(set(output.needs) <= sums for output in operation.outputs)
    names = {operand.name for operand in operation.operands} | {output.name for output in operation.outputs}
    assert set(operation.saved) <= names
    assert operation.backward == (operation.gradient_name == "")
    assert operation.backward or OPERATIONS[operation.gradient_name].forward is operation


def test_outputs_on_request_bring_their_sums() -> None:
    softmax = OPERATIONS["softmax"]
    assert [sum_.name for sum_ in softmax.summed(("y",))] == ["l"]
    assert [sum_.name for sum_ in softmax.summed(("y", "entropy"))] == ["l", "zl"]
    shape = (4, 1000)
    tensors = {name: row_view(shape, 1, "float32") for name in ("lse", "entropy")}
    task = task_of(
        softmax, ("y", "lse", "entropy"), shape, 1,
        {"x": contiguous_view(shape, "bfloat16"), "y": contiguous_view(shape, "bfloat16"), **tensors},
    )  # fmt: skip
    assert task.writes_elements
    assert task.row_outputs == ("lse", "entropy")
    assert (task.tensors["lse"].outer, task.tensors["lse"].col) == ((1,), 0)
    problem = Problem.of(task)
    assert (problem.read_bytes, problem.write_bytes) == (8000, 8000 + 2 * 4 * 4)


def test_a_result_per_row_writes_no_elements() -> None:
    shape = (4, 1000)
    tensors = {"x": contiguous_view(shape, "float32"), "y": row_view(shape, 1, "float32")}
    task = task_of(OPERATIONS["logsumexp"], ("y",), shape, 1, tensors)
    assert (task.writes_elements, task.row_outputs) == (False, ("y",))
    assert Problem.of(task).write_bytes == 16


def test_congruent_rows_begin_alike_in_every_tensor_that_is_moved_with_x() -> None:
    assert softmax_of((4, 50257)).congruent
    assert not softmax_of((4, 100), x=(101, 1)).congruent
    assert not softmax_of((4, 100), y=(1, 4)).congruent
    gradient, shape = OPERATIONS["softmax_backward"], (4, 101)
    like = contiguous_view(shape, "float32")
    for strides, congruent in (((101, 1), True), ((102, 1), False), ((0, 0), True), ((0, 1), False)):
        tensors = {"x": like, "y": like, "dy": like._replace(strides=strides)}
        assert task_of(gradient, ("y",), shape, 1, tensors).congruent == congruent


def test_the_unit_is_the_least_of_all_that_is_moved_with_x() -> None:
    assert softmax_of((4, 1000)).unit == 8
    assert softmax_of((4, 90), x=(96, 1)).unit == 2
    assert Problem.of(softmax_of((4, 1000))).unit == 8


def test_an_unaligned_tensor_has_no_unit_and_is_not_peeled() -> None:
    shape = (4, 1000)
    like = contiguous_view(shape, "bfloat16")
    task = task_of(OPERATIONS["softmax"], ("y",), shape, 1, {"x": like._replace(aligned=False), "y": like})
    problem = Problem.of(task)
    assert (problem.unit, problem.can_peel) == (1, False)


@pytest.mark.parametrize("name", ["bias", "mask"])
@pytest.mark.parametrize("broadcast", list(itertools.product((False, True), repeat=3)))
def test_bytes_of_what_is_read_beside_count_each_element_once(name: str, broadcast: tuple[bool, ...]) -> None:
    shape = (3, 5, 64)
    own = tuple(1 if is_broadcast else size for is_broadcast, size in zip(broadcast, shape, strict=True))
    steps = contiguous_view(own, "float32").strides
    strides = tuple(0 if size == 1 else step for size, step in zip(own, steps, strict=True))
    task = softmax_of(shape, **{name: View(strides, "bool" if name == "mask" else "float32")})
    problem = Problem.of(task)
    nbytes = own[0] * own[1] * own[2] * (1 if name == "mask" else 4)
    assert problem.read_bytes == Problem.of(softmax_of(shape)).read_bytes + nbytes
    assert (problem.fused, problem.masked, problem.bias_bytes) == (True, name == "mask", 4 * (name == "bias"))


def test_bytes_that_are_read_are_those_of_the_operands_that_are_given() -> None:
    # x and dy, the target, m and l of every row.
    required = 1000 * (2 + 2 + 8 + 4 + 4)
    assert Problem("token_logprobs_backward", 1000, 1, "bfloat16").read_bytes == required
    with_entropy = Problem("token_logprobs_backward", 1000, 1, "bfloat16", given=("entropy",))
    assert with_entropy.read_bytes == required + 1000 * 4
    for name, operation in OPERATIONS.items():
        shape = (7, 64)
        tensors = {"x": contiguous_view(shape, "bfloat16"), **operand_views(operation, shape, 1, "bfloat16")}
        problem = Problem.of(task_of(operation, operation.always, shape, 1, tensors))
        assert problem.read_bytes == Problem(name, *shape, "bfloat16").read_bytes
        assert problem.for_rows(14).read_bytes == 2 * problem.read_bytes


def test_bytes_that_are_read_follow_dtypes_and_strides() -> None:
    shape = (7, 64)
    operation = OPERATIONS["softmax_backward"]
    like = contiguous_view(shape, "bfloat16")

    def read(dy: View, **more: View) -> int:
        return Problem.of(task_of(operation, ("y",), shape, 1, {"x": like, "dy": dy, **more})).read_bytes

    whole = 7 * 64 * 2
    assert read(like) == 2 * whole
    assert read(contiguous_view(shape, "float32")) == 3 * whole
    assert read(View((0, 0), "bfloat16")) == whole + 2
    assert read(like, logits=like) == 3 * whole


def test_a_causal_mask_follows_the_query() -> None:
    shape = (2, 3, 5)
    like = contiguous_view(shape, "float32")
    task = task_of(OPERATIONS["softmax"], ("y",), shape, 2, {"x": like, "y": like}, Flags(causal=True))
    assert task.diagonal == 3
    assert task.fused
    positions = [row % task.sizes[0] * task.query.outer[0] for row in range(3)]
    assert positions == [0, 1, 2]
    with pytest.raises(ValueError, match="causal needs a dimension of queries before dim"):
        task_of(OPERATIONS["softmax"], ("y",), shape, 0, {"x": like, "y": like}, Flags(causal=True))


def test_one_row_is_read_as_one_of_many_where_bits_must_not_depend_on_their_number() -> None:
    assert softmax_of((1, 50257)).unit == 1
    assert one_row_as_many(softmax_of((1, 1000))).unit == one_row_as_many(softmax_of((2, 1000))).unit == 8
    wide = one_row_as_many(softmax_of((1, 1000), x=(4096, 1)))
    assert wide.tensors["x"].outer == (1000,)


def test_a_number_is_a_row_of_one_element() -> None:
    scalar = View((), "float32")
    for name, writes in (("softmax", True), ("logsumexp", False)):
        task = task_of(OPERATIONS[name], ("y",), (), 0, {"x": scalar, "y": scalar})
        assert (task.rows, task.cols, task.writes_elements) == (1, 1, writes)
