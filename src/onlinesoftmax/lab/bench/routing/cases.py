"""A case of routing: logits (tokens, experts), and a gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....routing.rules import MOST_EXPERTS
from ...names import check_names
from ..cases import LogitsCase

ROUTE = "route"

GATES: dict[str, dict[str, Any]] = {
    "top 8": {"k": 8},
    "top 6, not normalized": {"k": 6, "renormalize": False},
    "top 8 of 4 groups": {"k": 8, "score": "sigmoid", "groups": 8, "group_k": 4, "scale": 2.5},
    "top 4 first": {"k": 4, "order": "topk_first"},
}
"""The gates that are measured, by the names that tables show: arguments of `route`.

A gate with groups has a bias too, as that of DeepSeek-V3.
"""


@dataclass(frozen=True)
class RouteCase(LogitsCase):
    """The routing of logits (tokens, experts); with a gradient, that of weights and of both losses.

    Attributes:
        gate: Name in GATES.

    Example:
        >>> case = RouteCase("route", (65536, 256), 1, "float32", gate="top 8")
        >>> str(case), case.read_bytes, case.write_bytes
        ('65536x256, top 8', 67108864, 4457472)
    """

    axes, float64_copies = "tokens x experts", 10
    gate: str = ""

    def __post_init__(self) -> None:
        check_names("function", [self.operation], [ROUTE])
        check_names("gate", [self.gate], GATES)
        super().__post_init__()
        given = self.arguments
        if given["k"] > self.shape[1] * given.get("group_k", 1) // given.get("groups", 1):
            raise ValueError(f"{self.operation} with {self.gate}: {self.shape[1]} experts are too few")
        if self.shape[1] > MOST_EXPERTS:
            raise ValueError(f"{self.operation}: {self.shape[1]} experts are more than {MOST_EXPERTS}")

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))}, {self.gate}{' with gradient' if self.with_gradient else ''}"

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `route` that are no tensors."""
        return GATES[self.gate]

    @property
    def write_bytes(self) -> int:
        """Bytes of weights, experts, lse and counts; and of the gradient."""
        of_results = self.rows * (8 * self.arguments["k"] + 4) + 4 * self.shape[1]
        return of_results + (self.read_bytes if self.with_gradient else 0)
