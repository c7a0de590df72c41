"""Derivatives of our kernels: first, second, forward mode, torch.func; what is saved; strides and dtypes of dy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_fused import NAMES, moved, options
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import onlinesoftmax as osm
from contract import DEVICE, GPU, OPERATIONS, PLANS, ROW_PLANS, forced, outliers
from pairs import rest_exhaustive

Function = Callable[..., torch.Tensor]


def small(plan: str) -> tuple[int, ...]:
    """A shape of few rows; `column` needs 8 that lie side by side."""
    return (1, 8 if plan == "triton/column" else 4, 9)


def call(operation: str, plan: str, given: dict[str, Any]) -> tuple[Function, tuple[torch.Tensor, ...]]:
    """The operation as a function of x and whatever of the arguments has a gradient, and these."""
    column = plan == "triton/column"
    x = torch.randn(small(plan), dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    if column:
        # The same with rows that lie side by side.
        x = x.transpose(-1, -2).contiguous()
        turn = {0: lambda t: t, 1: lambda t: t[:, None]}
        given = {
            k: turn.get(v.dim(), lambda t: t.transpose(-1, -2))(v) if isinstance(v, torch.Tensor) else v
            for k, v in given.items()
        }
    names = [k for k, v in given.items() if isinstance(v, torch.Tensor) and v.is_floating_point()]

    def function(x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        more = given | dict(zip(names, tensors, strict=True))
        return OPERATIONS[operation](x, -2 if column else -1, **forced(plan), **more)

    return function, tuple(t.requires_grad_() for t in (x, *(given[name].clone() for name in names)))


def _cells() -> list[tuple[str, str, str]]:
    cells = [
        (plan, name, operation)
        for plan, name, operation in itertools.product(PLANS, ("plain", *NAMES), OPERATIONS)
        # Where rows lie side by side there are no queries before them.
        if not (plan == "triton/column" and name in ("causal", "all"))
    ]
    # One gradcheck runs hundreds of kernels.  Every eleventh cell still meets each plan, option and operation, as 11 is
    # coprime to their numbers.
    return cells if GPU else cells[::11]


@pytest.mark.parametrize(("plan", "name", "operation"), _cells())
def test_gradcheck(plan: str, name: str, operation: str) -> None:
    given = moved(options(torch.float64, small(plan))[name]) if name != "plain" else {}
    torch.manual_seed(0)
    function, inputs = call(operation, plan, given)
    # Its random vectors would meet the -inf of a masked log-softmax: what is compared is finite.
    finite = lambda *t: function(*t).clamp_min(-1e4)  # noqa: E731
    assert gradcheck(finite, inputs, fast_mode=not GPU)
    assert gradgradcheck(finite, inputs, fast_mode=not GPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_the_gradient_of_logsumexp_sums_to_one_in_16_bits(dtype: torch.dtype, compiled: bool) -> None:
    """It is the softmax, computed from the logsumexp in float32; PyTorch computes it from the rounded result."""
    x = outliers(16, 1000, dtype=dtype, device=DEVICE) + 40
    function = lambda t: osm.logsumexp(t, -1, backend="triton")  # noqa: E731
    if compiled:
        function = torch.compile(function, backend="aot_eager", fullgraph=True)

    def error(function: Callable[[torch.Tensor], torch.Tensor]) -> float:
        leaf = x.clone().requires_grad_()
        function(leaf).sum().backward()
        return (leaf.grad.double() - torch.softmax(x.double(), -1)).abs().max().item()

    ours, theirs = error(function), error(lambda t: torch.logsumexp(t, -1))
    # The softmax, rounded once: half a unit in the last place of a number up to 1.
    assert ours <= torch.finfo(dtype).eps / 2 + 1e-5
    assert ours < theirs


PAIRS = list(itertools.product(OPERATIONS, ROW_PLANS))
OF_EACH_PLAN = pytest.mark.parametrize(("operation", "plan"), PAIRS if GPU else rest_exhaustive(PAIRS))


@OF_EACH_PLAN
def test_dy_of_any_strides(operation: str, plan: str) -> None:
    x = outliers(6, 129, dtype=torch.float32, device=DEVICE)
    full = x.shape if operation != "logsumexp" else x.shape[:1]
    kinds = {
        "one number": torch.ones((), device=DEVICE).expand(full),
        "a row for all": torch.randn(full[-1], device=DEVICE).expand(full),
        "a number a row": torch.randn(full[0], *[1] * (len(full) - 1), device=DEVICE).expand(full),
        "transposed": torch.randn(full[::-1], device=DEVICE).t() if len(full) > 1 else torch.randn(full, device=DEVICE),
        "every second": torch.randn(*full[:-1], 2 * full[-1], device=DEVICE)[..., ::2],
        "begins anywhere": torch.randn(full.numel() + 1, device=DEVICE)[1:].view(full),
    }
    for name, dy in kinds.items():
        ours, theirs = (t.clone().requires_grad_() for t in (x, x))
        OPERATIONS[operation](ours, -1, **forced(plan)).backward(dy)
        getattr(torch, operation)(theirs, -1).backward(dy)
        torch.testing.assert_close(
            ours.grad, theirs.grad, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_a_wider_output(path: dict[str, str]) -> None:
    x = outliers(4, 65, dtype=torch.float16, device=DEVICE)
    ours, theirs = (t.clone().requires_grad_() for t in (x, x))
    dy = torch.randn(4, 65, device=DEVICE)
    osm.softmax(ours, dtype=torch.float32, **path).backward(dy)
    torch.softmax(theirs, -1, torch.float32).backward(dy)
    assert ours.grad is not None
    assert ours.grad.dtype == torch.float16
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("shape", "dim"), [((), 0), ((0, 3), 1), ((3, 0), 1), ((5,), 0), ((2, 3, 4), (0, 2))])
def test_shapes(operation: str, shape: tuple[int, ...], dim: Any, path: dict[str, str]) -> None:
    if isinstance(dim, tuple) and operation != "logsumexp":
        return
    x = torch.randn(shape, device=DEVICE)
    ours, theirs = (t.clone().requires_grad_() for t in (x, x))
    OPERATIONS[operation](ours, dim, **path).sum().backward()
    getattr(torch, operation)(theirs, dim).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_nothing_is_saved_but_the_output(operation: str) -> None:
    saved: list[torch.Tensor] = []
    x = torch.randn(4, 64, device=DEVICE, requires_grad=True)
    mask = torch.ones(4, 64, dtype=torch.bool, device=DEVICE)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = OPERATIONS[operation](x, backend="triton", mask=mask, scale=2.0)
    places = {t.data_ptr() for t in saved}
    allowed = {"softmax": [y, mask], "log_softmax": [y, mask], "logsumexp": [y, x, mask]}[operation]
    assert places == {t.data_ptr() for t in allowed}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_fully_masked_rows_have_no_gradient(operation: str, path: dict[str, str]) -> None:
    x = torch.randn(3, 40, device=DEVICE, requires_grad=True)
    bias = torch.zeros(3, 40, device=DEVICE)
    bias[2] = -torch.inf
    mask = torch.ones(3, 40, dtype=torch.bool, device=DEVICE)
    mask[1] = False
    y = OPERATIONS[operation](x, mask=mask, bias=bias, fully_masked="zero", **path)
    y.backward(torch.randn_like(y))
    assert x.grad is not None
    assert (x.grad[1:] == 0).all()
    assert (x.grad[0] != 0).all()


@pytest.mark.parametrize("causal", [False, True])
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


def functions(operation: str, path: dict[str, str], **given: Any) -> tuple[Function, Function]:
    """Ours and PyTorch's, of one argument."""
    ours, theirs = OPERATIONS[operation], getattr(torch, operation)
    scale = given.get("scale", 1.0)
    return (lambda x: ours(x, -1, **path, **given)), (lambda x: theirs(x * scale, -1))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_torch_func(operation: str, path: dict[str, str]) -> None:
    ours, theirs = functions(operation, path, scale=0.5)
    x, v = (torch.randn(3, 7, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(s)) for s in (0, 1))
    func = torch.func
    transforms: list[Callable[[Function], Any]] = [
        lambda f: func.grad(lambda x: f(x).square().sum())(x),
        lambda f: func.vmap(f)(x),
        lambda f: func.vmap(f, in_dims=1)(x),
        lambda f: func.vmap(func.vmap(f))(x[None]),
        lambda f: func.jacrev(f)(x[0]),
        lambda f: func.jacfwd(f)(x[0]),
        lambda f: func.hessian(lambda x: f(x).square().sum())(x[0]),
        lambda f: func.jvp(f, (x,), (v,))[1],
        lambda f: func.vmap(func.grad(lambda x: f(x).square().sum()))(x),
    ]
    for transform in transforms:
        torch.testing.assert_close(transform(ours), transform(theirs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_vmap_over_every_argument(operation: str) -> None:
    torch.manual_seed(0)
    x, bias = torch.randn(4, 3, 7, device=DEVICE), torch.randn(4, 7, device=DEVICE)
    mask, scale = torch.rand(4, 3, 7, device=DEVICE) > 0.3, torch.rand(4, device=DEVICE)
    mask[..., 0] = True

    def function(x: Any, bias: Any, mask: Any, scale: Any, **path: str) -> torch.Tensor:
        return OPERATIONS[operation](x, bias=bias, mask=mask, scale=scale, causal=True, fully_masked="zero", **path)

    ours = torch.func.vmap(lambda *t: function(*t, backend="triton"))(x, bias, mask, scale)
    theirs = torch.stack([function(*t, backend="eager") for t in zip(x, bias, mask, scale, strict=True)])
    torch.testing.assert_close(ours, theirs)
    # A bias alone has the batch.
    ours = torch.func.vmap(lambda b: OPERATIONS[operation](x[0], bias=b, backend="triton"))(bias)
    theirs = torch.stack([OPERATIONS[operation](x[0], bias=b, backend="eager") for b in bias])
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", ["plain", "scale tensor", "softcap", "bias", "mask", "all"])
def test_forward_mode(operation: str, name: str) -> None:
    given = moved(options(torch.float64, (2, 3, 5))[name]) if name != "plain" else {}
    x, v = (torch.randn(2, 3, 5, dtype=torch.float64, device=DEVICE) for _ in range(2))
    results = []
    for path in ({"backend": "triton"}, {"backend": "eager"}):
        with forward_ad.dual_level():
            y = OPERATIONS[operation](forward_ad.make_dual(x, v), **given, **path)
            results.append(forward_ad.unpack_dual(y).tangent.nan_to_num())
    torch.testing.assert_close(*results)


def test_autocast() -> None:
    x = torch.randn(4, 32, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        for operation, function in OPERATIONS.items():
            expected = getattr(torch, operation)(x, -1)
            for given in (
                {},
                {"backend": "triton"},
                {"scale": 1.0, "causal": False},
                {"backend": "triton", "scale": 2.0},
            ):
                assert function(x, -1, **given).dtype == expected.dtype, (operation, given)


def _invariant_cells() -> list[Any]:
    dtypes = (torch.float32, torch.bfloat16)
    pairs = list(itertools.product(ROW_PLANS, (33, 1000, 4100)))
    if GPU:
        return list(itertools.product(ROW_PLANS, (33, 1000, 4100), dtypes))
    # In the interpreter the dtypes take turns.
    return rest_exhaustive((*pair, dtypes[i % 2]) for i, pair in enumerate(pairs))


@pytest.mark.parametrize(("plan", "cols", "dtype"), _invariant_cells(), ids=str)
def test_batch_invariant(plan: str, cols: int, dtype: torch.dtype) -> None:
    """The bits of a row, forward and backward, alone and in batches of any size, from any place in memory."""
    sizes = (1, 2, 3, 7, 64, 1000, 4096) if GPU else (1, 4)
    x = outliers(sizes[-1], cols, dtype=dtype, device=DEVICE)
    dy = outliers(sizes[-1], cols, dtype=dtype, device=DEVICE).roll(1)

    def run(x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for function in OPERATIONS.values():
            z = x.detach().requires_grad_()
            y = function(z, batch_invariant=True, **forced(plan))
            y.backward(dy if y.dim() == x.dim() else dy[..., 0])
            found += [y.detach(), z.grad]
        return [t for t in found if t is not None]

    whole = run(x, dy)
    for size, first in itertools.product(sizes[:-1], (0, 1) if GPU else (1,)):
        rows = slice(first, first + size)
        for part, all_of_it in zip(run(x[rows], dy[rows]), whole, strict=True):
            assert torch.equal(part, all_of_it[rows]), (size, first)
    deeper = run(x[:4].view(2, 2, cols), dy[:4].view(2, 2, cols)) if sizes[-1] >= 4 else []
    for part, all_of_it in zip(deeper, whole, strict=False):
        assert torch.equal(part.flatten(0, 1), all_of_it[:4])


@pytest.mark.parametrize("shape", [(3, 0), (0, 3)])
def test_batch_invariant_without_elements(shape: tuple[int, int]) -> None:
    x = torch.zeros(shape)
    for operation, ours in OPERATIONS.items():
        for dim in (0, 1, (0, 1)) if operation == "logsumexp" else (0, 1):
            assert torch.equal(ours(x, dim, batch_invariant=True), ours(x, dim))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_batch_invariant_on_pytorch_operations(operation: str) -> None:
    x = outliers(300, 1000, dtype=torch.float32, device=DEVICE)
    whole = OPERATIONS[operation](x, batch_invariant=True, backend="eager")
    for size in (1, 2, 7, 100):
        assert torch.equal(
            OPERATIONS[operation](x[5 : 5 + size], batch_invariant=True, backend="eager"), whole[5 : 5 + size]
        )


def test_batch_invariant_sum_of_a_row_that_threads_would_share() -> None:
    x = torch.randn(2, 40000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    index, threads = torch.tensor([0, 1]), torch.get_num_threads()
    torch.set_num_threads(2)
    alone, beside = (osm.token_logprobs(x[:n], index[:n], batch_invariant=True) for n in (1, 2))
    torch.set_num_threads(threads)
    assert torch.equal(alone.entropy, beside.entropy[:1])


def test_the_gradient_of_a_batch_invariant_logsumexp_where_scores_are_nearly_equal() -> None:
    """log_softmax rounds the three scores to the same number."""
    x = torch.tensor([[1e-9, 2e-9, 0.0]], requires_grad=True)
    osm.logsumexp(x, batch_invariant=True, backend="eager").backward()
    torch.testing.assert_close(x.grad, torch.full((1, 3), 1 / 3))


@pytest.mark.parametrize("keepdim", [False, True])
def test_batch_invariant_over_several_dims_on_pytorch_operations(keepdim: bool) -> None:
    x = outliers(4, 6, 50, dtype=torch.float64, device=DEVICE)
    options = {"keepdim": keepdim, "batch_invariant": True, "backend": "eager"}
    whole = osm.logsumexp(x, (2, -3), **options)
    torch.testing.assert_close(whole, torch.logsumexp(x, (0, 2), keepdim))
    assert torch.equal(osm.logsumexp(x[:, 2:3], (0, 2), **options), whole[:, 2:3] if keepdim else whole[2:3])
    assert osm.logsumexp(x[0, 0, 0], (0,), **options) == x[0, 0, 0]


@OF_EACH_PLAN
def test_same_gradient_same_bits(operation: str, plan: str) -> None:
    x = outliers(3, 5001, dtype=torch.float32, device=DEVICE).requires_grad_()
    y = OPERATIONS[operation](x, **forced(plan))
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    first, second = (torch.autograd.grad(y, x, dy, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
