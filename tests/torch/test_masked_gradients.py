"""A masked element has no gradient, not even where the result of its row is NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_fused import DEVICE

from contract import OPERATIONS

PATHS = [{}, {"backend": "triton"}]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("path", PATHS, ids=["default", "triton"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_masked_elements_have_no_gradient_where_the_result_is_nan(
    operation: str, path: dict[str, str], causal: bool
) -> None:
    """Rows 0 and 1 are fully masked, as a causal mask does it with more queries than keys; row 2 holds NaN."""
    x = torch.randn(5, 3, device=DEVICE)
    x[2, 0] = torch.nan
    mask = torch.ones(5, 3, dtype=torch.bool, device=DEVICE).tril(-2)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    given: dict[str, Any] = {"causal": True} if causal else {"mask": mask}
    y = OPERATIONS[operation](ours, **given, **path)
    right = getattr(torch, operation)(theirs.masked_fill(~mask, -torch.inf), -1)
    torch.testing.assert_close(y, right, equal_nan=True)
    for dy in (torch.randn_like(y), torch.ones_like(y)):
        for create_graph in (False, True):
            (found,) = torch.autograd.grad(y, ours, dy, retain_graph=True, create_graph=create_graph)
            (expected,) = torch.autograd.grad(right, theirs, dy, retain_graph=True)
            torch.testing.assert_close(found, expected, equal_nan=True)
            assert (found[~mask] == 0).all()
