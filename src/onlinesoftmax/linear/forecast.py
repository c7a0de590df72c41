"""The forecast of a head's time: its products, the kernels that read its logits, and the sums over chunks."""

from __future__ import annotations

from typing import NamedTuple

from ..core.device import MATRIX_PART, Device, matrix_rate
from ..core.units import duration
from .plans import LinearPlan
from .problem import LinearProblem


class Forecast(NamedTuple):
    """Microseconds of a head, forward and backward together.

    Attributes:
        products_us: Products, at the rate of large products of the device.
        logits_us: Kernels that read the logits, by the estimates of their plans.
        sums_us: Reads and writes of float32 sums over chunks, at the bandwidth of a copy.
    """

    products_us: float
    logits_us: float
    sums_us: float

    @property
    def us(self) -> float:
        """All of it."""
        return self.products_us + self.logits_us + self.sums_us

    def __str__(self) -> str:
        sums = f", sums {duration(self.sums_us)}" if self.sums_us else ""
        return f"{duration(self.us)}: products {duration(self.products_us)}, logits {duration(self.logits_us)}{sums}"


def forecast(problem: LinearProblem, plan: LinearPlan, logits_us: float, device: Device) -> Forecast | None:
    """The forecast of a plan; None where the rate of the device is not known.

    Args:
        problem: The problem.
        plan: A plan of it.
        logits_us: Microseconds of the kernels that read the logits.
        device: The device.
    """
    rate = matrix_rate(device, problem.itemsize)
    if rate is None:
        return None
    operations = 2 * problem.tokens * problem.hidden * problem.classes * plan.products
    return Forecast(operations / rate * 1e6, logits_us, sum_traffic(problem, plan) / (device.bandwidth * 1e3))


def sources(problem: LinearProblem, device: Device) -> str | None:
    """Where the figures of a forecast come from; None where there is no forecast."""
    rate = matrix_rate(device, problem.itemsize)
    if rate is None:
        return None
    products = f"{rate / 1e12:.0f} tera-operations/s ({MATRIX_PART} of the datasheet, as an H100 reached in bfloat16)"
    return f"products at {products}; logits by the plans of the kernels; sums at {device.bandwidth:.0f} GB/s"


def sum_traffic(problem: LinearProblem, plan: LinearPlan) -> int:
    """Bytes that sums over chunks move beyond the one write of each product that a plan without chunks has.

    Each chunk writes the sum, all but the first read it, and a conversion reads it and writes the result.
    """
    if plan.name == "columns":
        elements, sum_bytes = problem.tokens * problem.hidden * problem.of_input, problem.input_sum_bytes
    else:
        elements, sum_bytes = problem.classes * problem.hidden * problem.of_weight, problem.weight_sum_bytes
    if plan.name == "stored" and not problem.sums_one_product:
        return 0
    result = elements * problem.itemsize
    # A sum without memory of its own is the result.
    return (2 * plan.chunks - 1) * (sum_bytes or result) - result + (sum_bytes + result if sum_bytes else 0)
