"""Proposals of strategy `row` for the kernel of packed rows."""

from __future__ import annotations

from .....core.device import Device
from .....core.problem import Problem
from .....core.task import BYTES
from .....planner.proposal import Proposal, power_of_two, words_of
from ..blocks import MOST_BLOCKS, choices_of_terms, other_registers, propose

PACKED = "packed"
"""Name of the kernel's file."""

MOST_COLS = 200
"""Most columns of a packed row.  Longer rows take no less time so than with head and tail apart, on an H100."""

MOST_COLS_BESIDE = 64
"""The same where a bias, a mask or logits are read beside the operands.

The first kernel moves a masked softmax of 65 columns at the speed of a copy on an H100, and one of 33 at 0.7 of it.
"""

MOST_ROWS = 1024
"""Most rows of a block: those whose losses one block adds (source.SEGMENT)."""

THREADS = 128
"""Threads of a block.  With 256, softmax of 1048576 x 33 bfloat16 takes 2 percent longer on an H100."""

STRETCH = 4 << 10
"""Bytes of a block's rows, at least.  With half, softmax of 4194304 x 5 bfloat16 takes 2 percent longer on an H100."""

HELD = 36
"""Most registers of a thread for its elements, before more lanes share a row."""

HELD_OF_GRADIENT = 52
"""The same for 16-bit gradients of rows with a target, whose constants each lane computes.

With 36, the gradient of token_logprobs of 97, 150 and 199 columns takes 14 to 18 percent longer on an H100.
"""


def not_packed(problem: Problem) -> str | None:
    """Why short rows whose bytes are no multiple of 16 cannot be moved as one stretch; None where they can.

    The empty string for all other rows.
    """
    most = MOST_COLS_BESIDE if problem.bias_bytes or problem.masked or problem.logit_bytes else MOST_COLS
    if not problem.contiguous or problem.cols > most or problem.cols % problem.vector == 0:
        return ""
    if not problem.packed:
        return "a tensor has gaps between its rows, or the call is batch-invariant"
    if problem.sharded:
        return "other GPUs have columns of the rows"
    out = BYTES[problem.out_dtype or problem.dtype]
    if 8 in (problem.itemsize, out, problem.bias_bytes, problem.logit_bytes):
        return "float64 is loaded by instructions that read global memory alone"
    return None


def packed(problem: Problem, device: Device) -> list[Proposal]:
    """Short rows that a block moves as one stretch of memory: one proposal, or none."""
    if not_packed(problem) is not None:
        return []
    # A column of a bias and of a mask takes a register each.
    words = words_of(problem) + -(-problem.bias_bytes // 4) + problem.masked
    is_gradient = problem.declaration.has_target and problem.writes_elements and problem.itemsize == 2
    lanes = power_of_two(-(-problem.cols * words // (HELD_OF_GRADIENT if is_gradient else HELD)))
    held, groups = -(-problem.cols // lanes), THREADS // lanes
    # A thread loads the operands per row of all its rows together, so they count.
    row_bytes = max(problem.row_bytes, problem.read_bytes // max(problem.rows, 1))
    # With few rows, more of them in a block would leave multiprocessors without a block.
    spread = power_of_two(problem.rows // (groups * 2 * device.multiprocessors))
    depth = min(power_of_two(-(-STRETCH // (groups * row_bytes))), spread, MOST_ROWS // groups)
    rows, (terms, *_) = groups * depth, choices_of_terms(problem)
    resident = min(
        device.registers // (THREADS * (other_registers(problem, device) + held * words)),
        device.shared_memory // (rows * _shared_bytes(problem) + 1024), device.threads // THREADS,
    )  # fmt: skip
    proposal = propose(
        problem, "row", f"{rows} rows of {problem.cols} columns are moved as one stretch of memory, 16 bytes at a time",
        peeled=False, programs=-(-problem.rows // rows), block=held * lanes, rows_per_program=rows, depth=depth,
        warps=THREADS // 32, lanes=lanes, terms=terms, kernel=PACKED, resident=max(1, min(resident, 32)),
        by_estimate=True,
    )  # fmt: skip
    return [proposal] if proposal.programs <= MOST_BLOCKS else []


def _shared_bytes(problem: Problem) -> int:
    """Bytes of a row in shared memory, where results of another size than the elements have a place of their own."""
    out = BYTES[problem.out_dtype or problem.dtype] if problem.writes_elements else problem.itemsize
    beside = problem.bias_bytes + problem.masked + problem.logit_bytes
    return problem.row_bytes + problem.cols * (beside + (out if out != problem.itemsize else 0))
