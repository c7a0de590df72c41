"""What a backend is asked to prepare: everything that is known before there are tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..core.layout import Layout
from ..core.operations import OPERATIONS, Operation
from ..planner.plan import Plan


@dataclass(frozen=True)
class Request:
    """An operation on rows that lie in a certain way, and the plan for it.

    Attributes:
        name: The operation's, in OPERATIONS.
        plan: Who runs it, with which blocks.
        layout: Where the rows of every tensor lie.
        dtypes: Dtype of every tensor by name: x, y, those of layout.more, and scale if that is a tensor.
        aligned: Names of the tensors that begin on 16 bytes.
        scale, softcap: Whether there is one.
        diagonal: Column q + diagonal - 1 is the last that query q attends to; None without causality.
        zero: Whether a row in which all is masked is written as zeros.
    """

    name: str
    plan: Plan
    layout: Layout
    dtypes: Mapping[str, str]
    aligned: frozenset[str]
    scale: bool = False
    softcap: bool = False
    diagonal: int | None = None
    zero: bool = False

    @property
    def operation(self) -> Operation:
        return OPERATIONS[self.name]

    @property
    def accumulator(self) -> str:
        """Name of the dtype that states are kept in."""
        return "float64" if "float64" in (self.dtypes["x"], self.dtypes["y"]) else "float32"

    @property
    def exact(self) -> bool:
        """Whether the output has 24 bits or more, which 16 would not show."""
        return self.dtypes["y"] in ("float32", "float64")
