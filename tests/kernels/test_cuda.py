"""The CUDA backend without a GPU: NVRTC compiles every kernel, and the struct that a launch fills in is checked.

test_cuda_gpu.py has the tests that run kernels.
"""

from __future__ import annotations

import gc
import itertools
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from contract import DTYPES
from contract import OPERATIONS as FORWARD
from onlinesoftmax.core.call import Call, Settings
from onlinesoftmax.core.device import CACHE_LINE, known
from onlinesoftmax.core.options import SCORE_OPTIONS
from onlinesoftmax.core.problem import Problem
from onlinesoftmax.core.task import Choice, Task
from onlinesoftmax.kernels import cuda
from onlinesoftmax.kernels.cuda import compile, messages, params, source
from onlinesoftmax.kernels.cuda.strategy.grid.ring_proposals import STREAM
from onlinesoftmax.kernels.report import find_cuobjdump, occupancy
from onlinesoftmax.kernels.request import Request
from onlinesoftmax.ops import OPERATIONS
from onlinesoftmax.planner.plan import Plan, priced
from onlinesoftmax.planner.strategies import TABLE
from onlinesoftmax.torch import fast_path
from onlinesoftmax.torch import prepare as prepared
from pairs import rest_exhaustive, with_every_pair

pytest.importorskip("cuda.core", reason="cuda.core is not installed")

GPUS = {"a100": "sm_80", "h200": "sm_90", "b200": "sm_100"}
PROPOSALS = {strategy: propose for backend, strategy, propose in TABLE if backend == "cuda"}
COLS = {"row": 1024, "cluster": 1 << 16, "grid": 1 << 22, "looped": 128256}
ROWS = {"row": 65536, "cluster": 256, "grid": 1, "looped": 2048}

ALL = tuple(name for name, operation in OPERATIONS.items() if operation.forward.name in FORWARD)
"""The operations without a target; test_cuda_targets.py compiles the others."""

Ask = Callable[..., Request]
Check = Callable[[str], None]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ask]:
    """A function of (gpu, strategy, operation, x, **options) that gives the request the backend gets for that call.

    The plan is the first proposal in the planner's table.  `outputs` names the outputs of a forward call.
    """
    found: list[Request] = []

    def record(request: Request) -> Callable[..., None]:
        found.append(request)
        return lambda x, y, more: None

    def ask(
        gpu: str, strategy: str, operation: str, x: torch.Tensor, outputs: tuple[str, ...] = (), **options: Any
    ) -> Request:
        device = known(gpu)

        def first(task: Task, *_: Any) -> Plan:
            problem = Problem.of(task, False)
            proposals = PROPOSALS[strategy](problem, device)
            assert not isinstance(proposals, str), proposals
            return priced(proposals[0], problem, device)

        monkeypatch.setattr(prepared, "plan_of", first)
        fast_path.forget()
        forward = operation.removesuffix("_backward")
        if outputs:
            settings = Settings(-1, options.get("dtype"), False, Choice("cuda", strategy))
            prepared.run(Call(OPERATIONS[operation], x, settings), outputs)
            assert found[-1].task.outputs == outputs
            return found[-1]
        # Autocast does not know tensors without memory; with a dtype it is not asked.
        options = {"dtype": x.dtype, "backend": "cuda", "strategy": strategy} | options
        y = FORWARD[forward](x.requires_grad_(operation != forward), **options)
        if operation != forward:
            torch.autograd.grad(y, x, torch.empty_like(y))
        assert found[-1].operation.name == operation
        return found[-1]

    monkeypatch.setattr(cuda, "prepare", record)
    yield ask
    fast_path.forget()


def no_memory(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def constants(request: Request) -> dict[str, Any]:
    return {name: value for _, name, value in source.constants(request)}


def _cells() -> list[Any]:
    """Every GPU, strategy, operation and dtype; without a GPU in the machine, every two of these meet.

    The H200 has all combinations, and the others the dtypes in turn.  In few cells, strategies meet GPUs.
    """
    others = [
        (gpu, strategy, operation, DTYPES[(i + j + k) % len(DTYPES)])
        for i, gpu in enumerate(("a100", "b200"))
        for (j, strategy), (k, operation) in itertools.product(enumerate(PROPOSALS), enumerate(ALL))
        if (gpu, strategy) != ("a100", "cluster")
    ]
    cells = [*itertools.product(("h200",), PROPOSALS, ALL, DTYPES), *others]
    on_host = with_every_pair(cells, lambda cell: cell)
    on_gpu = [pytest.param(*cell, marks=pytest.mark.gpu) for cell in cells if cell not in on_host]
    return [*rest_exhaustive(on_host, lambda cell: (cell[:2], *cell[2:])), *on_gpu]


def _name(value: object) -> str:
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize(("gpu", "strategy", "operation", "dtype"), _cells(), ids=_name)
def test_every_kernel_compiles_and_what_is_on_chip_stays_there(
    ask: Ask, gpu: str, strategy: str, operation: str, dtype: torch.dtype, log_of: Any
) -> None:
    request = ask(gpu, strategy, operation, no_memory(ROWS[strategy], COLS[strategy], dtype=dtype))
    log = log_of(source.source(request), GPUS[gpu])
    used = compile.usage(log)
    if constants(request).get("STREAMED") != "true":
        assert not used["spills"], (request.plan, used)
    if strategy == "grid":
        # All blocks of a cooperative launch must fit the device at once.
        shared_memory, threads = used["shared_memory"] + source.shared_memory(request), 32 * request.plan.warps
        resident = occupancy(known(gpu), request.plan.warps, used["registers"], shared_memory) * known(gpu).threads
        assert request.plan.programs * threads <= resident * known(gpu).multiprocessors


def _pipelines() -> list[Any]:
    """Operations that reduce rows and write elements, each with every dtype on the H200.

    Without a GPU in the machine, dtypes and GPUs take turns: the test above compiles every operation with every dtype.
    """
    names = [name for name in ALL if OPERATIONS[name].reduces and not OPERATIONS[name].per_row]
    in_turn = [(("h200", "b200")[i % 2], name, DTYPES[i % len(DTYPES)]) for i, name in enumerate(names)]
    others = [*itertools.product(("h200",), names, DTYPES), *(("b200", *cell[1:]) for cell in in_turn)]
    return [*in_turn, *(pytest.param(*cell, marks=pytest.mark.gpu) for cell in others if cell not in in_turn)]


@pytest.mark.parametrize(("gpu", "operation", "dtype"), _pipelines(), ids=_name)
def test_a_pipelined_kernel_keeps_its_rows_on_chip(
    ask: Ask, gpu: str, operation: str, dtype: torch.dtype, log_of: Any
) -> None:
    request = ask(gpu, "grid", operation, no_memory(64, (1 << 21) // dtype.itemsize - 1, dtype=dtype))
    assert request.plan.stages
    log = log_of(source.source(request), GPUS[gpu])
    used = compile.usage(log)
    assert not used["spills"], (request.plan, used)
    # Every multiprocessor holds one block of the cooperative launch.
    assert used["shared_memory"] + source.shared_memory(request) <= known(gpu).shared_memory
    assert occupancy(known(gpu), request.plan.warps, used["registers"], used["shared_memory"]) > 0
    assert request.plan.programs <= known(gpu).multiprocessors
    # The ring follows the other variables in shared memory, and begins on a cache line as they end on one.
    assert used["shared_memory"] % CACHE_LINE == 0


@pytest.mark.parametrize(
    ("operation", "dtype"),
    [("softmax", torch.bfloat16), pytest.param("softmax_backward", torch.float32, marks=pytest.mark.exhaustive)],
)
def test_the_ring_of_a_streaming_kernel_begins_on_a_cache_line(
    ask: Ask, operation: str, dtype: torch.dtype, log_of: Any
) -> None:
    request = ask("h200", "grid", operation, no_memory(1, 1 << 28, dtype=dtype))
    assert request.plan.kernel == STREAM
    log = log_of(source.source(request), "sm_90")
    assert compile.usage(log)["shared_memory"] % CACHE_LINE == 0


WITH_BIAS = (*FORWARD, "logsumexp_backward")
WITH_MASK = (*FORWARD, "log_softmax_backward", "logsumexp_backward")

Variant = tuple[tuple[str, ...], Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, Any]]], str, Any]

VARIANTS: dict[str, Variant] = {
    "scale": (ALL, lambda x: (x, {"scale": -0.7}), "SCALE", "Scale::NUMBER"),
    "scale tensor": (ALL, lambda x: (x, {"scale": x.new_empty(())}), "SCALE", "Scale::TENSOR"),
    "scale of rows": (ALL, lambda x: (x, {"scale": x.new_empty(2, 64, 1)}), "SCALE", "Scale::TENSOR"),
    "softcap": (ALL, lambda x: (x, {"softcap": 5.0}), "SOFTCAP", "true"),
    "bias": (WITH_BIAS, lambda x: (x, {"bias": torch.empty_like(x[0])}), "HAS_BIAS", "true"),
    "bias of a column": (WITH_BIAS, lambda x: (x, {"bias": x.new_empty(2, 1, 1)}), "BIAS_WIDTH", 1),
    "mask": (WITH_MASK, lambda x: (x, {"mask": x > 0}), "HAS_MASK", "true"),
    "causal": (WITH_MASK, lambda x: (x, {"causal": True}), "CAUSAL", "true"),
    "zero": (ALL, lambda x: (x, {"mask": x > 0, "fully_masked": "zero"}), "ZERO", "true"),
    "all": (WITH_BIAS, lambda x: (x, {
        "scale": 1.5, "softcap": 8.0, "bias": torch.empty_like(x[0]), "mask": x[0] > 0, "causal": True,
        "fully_masked": "zero",
    }), "FUSED", "true"),
    "cut": (ALL, lambda x: (x.new_empty(2, 64, x.shape[2] - 1), {}), "PEEL", "true"),
    "dimensions": (WITH_BIAS, lambda x: (x.new_empty(4, 6, 8, x.shape[2])[::2, 1::2, ::2], {}), "DIMS", 3),
    "columns apart": (WITH_BIAS, lambda x: (x.new_empty(2, 64, 2 * x.shape[2])[..., ::2], {}), "X_WIDTH", 1),
    "another dtype": (
        ALL, lambda x: (x, {"dtype": torch.float32 if x.itemsize == 2 else torch.float16}), "dtypes differ", True
    ),
}  # fmt: skip
"""Name: operations that it concerns, what is asked of a tensor, and a constant that shows it in the kernel."""


def _variant_cells() -> list[Any]:
    """Every variant meets every strategy, in few cells one of them; operations and dtypes take turns."""
    cells = []
    for (i, name), (j, strategy) in itertools.product(enumerate(VARIANTS), enumerate(PROPOSALS)):
        operation = VARIANTS[name][0][(i + j) % len(VARIANTS[name][0])]
        cells.append((name, strategy, operation, DTYPES[(i + 3 * j) % len(DTYPES)]))
    return rest_exhaustive(cells)


@pytest.mark.parametrize(("variant", "strategy", "operation", "dtype"), _variant_cells(), ids=_name)
def test_what_is_asked_for_compiles(
    ask: Ask, check_in_compiler: Check, variant: str, strategy: str, operation: str, dtype: torch.dtype
) -> None:
    """No variant has instructions of its own, so the machine code of test_cuda_targets.py says enough."""
    _, make, constant, value = VARIANTS[variant]
    x, options = make(no_memory(2, 64, COLS[strategy], dtype=dtype))
    request = ask("h200", strategy, operation, x, **options)
    assert (constants(request) | {"dtypes differ": request.task.dtypes["x"] != request.task.dtypes["y"]})[
        constant
    ] == value
    check_in_compiler(source.source(request))


BUCKETS = [
    ("row", 1024, 1000, 4096), ("row", 1023, 1001, 1024), ("cluster", 1 << 17, (1 << 17) - 64, 1 << 18),
    ("grid", 1 << 22, (1 << 22) - 1024, 1 << 26), ("looped", 128256, 1 << 20, 50257),
]  # fmt: skip


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(("strategy", "cols", "near", "far"), BUCKETS)
def test_a_bucket_is_compiled_once(
    ask: Ask, strategy: str, cols: int, near: int, far: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(compile, "build", lambda text, arch: (b"code", compiled.append(text), None))
    requests = [ask("h200", strategy, "softmax", no_memory(ROWS[strategy], n)) for n in (cols, near, far)]
    one, another, other = map(source.source, requests)
    assert one == another != other
    for text, count in ((one, 1), (another, 1), (other, 2)):
        assert compile.cubin(text, "sm_90") == b"code"
        assert len(compiled) == count


# cuda.core 1.2.2: a Program that failed, and that the garbage collector finds in a cycle, trips over itself.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "name",
    [
        *(f"numeric/{file}" for file in ("numbers", "state", "formulas")),
        *(f"row/{file}" for file in ("operands", "block_reduce", "slice")),
        *PROPOSALS,
    ],
)
def test_an_error_names_file_and_line(ask: Ask, name: str) -> None:
    strategy = name if name in PROPOSALS else "row"
    name = f"strategy/{name}/{name}" if name in PROPOSALS else name
    whole, part = source.source(ask("h200", strategy, "softmax", no_memory(64, 1 << 16))), source.text(f"{name}.cuh")
    # Its first line is #line, and counts for nothing; the wrong one comes after the last.
    message = rf'{name}\.cuh\({part.count(chr(10))}\): error: identifier "no_such_type" is undefined'
    with pytest.raises(RuntimeError, match=message):
        compile.build(whole.replace(part, part + "no_such_type x;\n"), "sm_90")
    # The program is one of the youngest objects.
    gc.collect(1)


@pytest.mark.parametrize("dims", [1, 2, 3, 4])
def test_params_are_packed_as_the_struct_lies(ask: Ask, check_in_compiler: Check, dims: int) -> None:
    from onlinesoftmax.kernels.cuda import arguments

    sizes = (3, 4, 5, 6)[:dims]
    # Every second index, so that no stride joins two dimensions.
    index = (*[slice(None, None, 2)] * dims, slice(1, 65))
    x = no_memory(*(2 * size for size in sizes), 99)[index]
    request = ask("h200", "row", "softmax", x, causal=True, mask=x[..., :1] > 0)
    task, packed = request.task, arguments.values(request)
    assert len(task.sizes) == dims
    fields = (
        *(t.pointer for t in params.TENSORS),
        *(params.REST, params.MAIL, params.LOSS_MAIL),
        *(f"shard_mail[{process}]" for process in range(len(params.SHARD_MAIL))),
        *params.NUMBERS,
        *params.SIZES,
        "sizes",
    )
    at = {name: i for i, name in enumerate(fields)}
    at |= {f"{name}_place": at["sizes"] + dims + i * (dims + 1) for i, name in enumerate(params.PLACES.values())}
    checks = [f"static_assert(sizeof(Params) == {len(packed)});", f"static_assert(sizeof(Place) == {8 * (dims + 1)});"]
    checks += [f"static_assert(__INTADDR__(&((Params*)0)->{name}) == {8 * i});" for name, i in at.items()]
    checks.append(f"static_assert(__INTADDR__(&((Place*)0)->col) == {8 * dims});")
    check_in_compiler(source.source(request) + "\n".join(checks))

    strides = {name: (*outer, col) for name, (outer, col) in source.places_of(request).items()}
    assert strides.keys() == {"x", "y", "mask", "query"}
    # 64 columns of bfloat16 are 8 chunks, which one block has.  No block counts targets.
    # The rows are whole: process 0 of 1 has them in one tensor, and there are no mailboxes of other processes.
    whole = (0, 64, 0, 1, 0, 0, 0, 0, 0)
    numbers = (task.rows, 64, task.diagonal, 8, request.plan.shared, 0, *whole, *task.sizes)
    places = itertools.chain.from_iterable(strides.get(name, (0,) * (dims + 1)) for name in params.PLACES)
    assert struct.unpack(f"={len(packed) // 8}q", packed) == ((0,) * at["rows"] + numbers + tuple(places))


def test_params_have_every_tensor_and_number_that_is_declared() -> None:
    operands = [one for operation in OPERATIONS.values() for one in operation.operands]
    tensors = {one.name for one in operands if not one.number}
    tensors |= {one.name for operation in OPERATIONS.values() for one in operation.outputs}
    tensors |= {option.name for option in SCORE_OPTIONS.values() if option.tensor}
    assert {tensor.name for tensor in params.TENSORS} == tensors | {"logits"}
    numbers = {option.name for option in SCORE_OPTIONS.values() if option.number}
    assert set(params.NUMBERS) == numbers | {one.name for one in operands if one.number}
    # A field that a call fills in is one pointer or one number, and no two share an index.
    indices = [*params.FIELD_OF_POINTER.values(), *(params.FIELD[name] for name in params.NUMBERS)]
    assert sorted(indices) == list(range(len(params.POINTERS) + len(params.NUMBERS)))


SEVERAL = [
    ("softmax", ("y", "lse")), ("softmax", ("y", "lse", "m", "l", "entropy")), ("log_softmax", ("y", "entropy")),
    ("logsumexp", ("y", "lse")), ("logsumexp", ("y", "m", "l")), ("softmax", ("entropy",)), ("softmax", ("m", "l")),
]  # fmt: skip
"""Operations and the outputs that they are asked for."""

SEVERAL_CELLS = [
    *rest_exhaustive((strategy, *one) for i, one in enumerate(SEVERAL) for strategy in [*PROPOSALS][i % 2 * 2 :][:2]),
    *(
        pytest.param(strategy, *one, marks=pytest.mark.gpu)
        for i, one in enumerate(SEVERAL) for strategy in [*PROPOSALS][2 - i % 2 * 2 :][:2]
    ),
]  # fmt: skip
"""On a machine without a GPU, all outputs meet two of the four strategies, in few cells one."""


@pytest.mark.parametrize(("strategy", "operation", "outputs"), SEVERAL_CELLS, ids=str)
def test_several_outputs_compile_without_spills(
    ask: Ask, strategy: str, operation: str, outputs: tuple[str, ...], log_of: Any
) -> None:
    dtype = DTYPES[(len(outputs) + list(PROPOSALS).index(strategy)) % 4]
    request = ask("h200", strategy, operation, no_memory(ROWS[strategy], COLS[strategy], dtype=dtype), outputs)
    found = constants(request)
    assert found["WRITES_ROWS"] == str(any(found[f"ROW_{name.upper()}"] == "true" for name in outputs)).lower()
    assert found["WRITES_ELEMENTS"] == str("y" in outputs and operation != "logsumexp").lower()
    assert found["SUMS"] == 1 + ("entropy" in outputs)
    log = log_of(source.source(request), "sm_90")
    # A grid block has all registers of 128 for elements; a second sum of float64 pushes a few constants to memory.
    most = 64 if strategy == "grid" and "entropy" in outputs else 0
    if found.get("STREAMED") != "true":
        assert compile.usage(log)["spills"] <= most


MAILED: list[tuple[torch.dtype, torch.dtype, tuple[str, ...]]] = [(dtype, dtype, ("y",)) for dtype in DTYPES]
MAILED += [(torch.float32, torch.bfloat16, ("y",))]
MAILED += [(dtype, dtype, ("y", "entropy")) for dtype in (torch.bfloat16, torch.float64)]


@pytest.mark.parametrize(
    ("dtype", "out", "outputs", "rows"),
    rest_exhaustive((*one, rows) for one in MAILED for rows in (1, 3, 48)),
    ids=_name,
)
def test_messages_have_the_words_that_the_kernel_counts(
    ask: Ask, check_in_compiler: Check, dtype: torch.dtype, out: torch.dtype, outputs: tuple[str, ...], rows: int
) -> None:
    request = ask("h200", "grid", "softmax", no_memory(rows, 1 << 20, dtype=dtype), outputs, dtype=out)
    words, team = messages.team_mail_words(request), request.plan.splits
    assert team > 1
    teams, has_board = request.plan.programs // team, bool(request.plan.kernel)
    assert has_board == (rows > 3 and dtype != torch.float64)
    # The constructor of Mailboxes looks ahead at two slots, and no row has more than one.
    slots = str(max(2, rows)) if teams == 1 and rows < 4 else "SLOTS"
    of_team = (
        f"Board::board_words({team})" if has_board else f"{slots} * {team} * {team} * sizeof(TeamChannel::Sent) / 8"
    )
    check = f"static_assert({teams} * ({of_team}) == {words});"
    check += f"static_assert({1 + ('entropy' in outputs)} == SUMS);"
    check_in_compiler(source.source(request) + check)


# The last packet of a message has one, two or three words of the state; that of float64 with an entropy has ten words.
PACKETS = [
    ("h200", torch.float64, ("y", "entropy")), ("b200", torch.bfloat16, ("y",)), ("a100", torch.float32, ("y",)),
]  # fmt: skip


@pytest.mark.skipif(find_cuobjdump() is None, reason="cuobjdump is not installed")
@pytest.mark.parametrize(("gpu", "dtype", "outputs"), PACKETS, ids=_name)
def test_a_packet_of_a_message_is_loaded_by_one_instruction(
    ask: Ask, gpu: str, dtype: torch.dtype, outputs: tuple[str, ...], sass_of: Any
) -> None:
    request = ask(gpu, "grid", "softmax", no_memory(1, 1 << 20, dtype=dtype), outputs)
    loads = re.findall(r"LDG?\.E\S*STRONG\.GPU", sass_of(source.source(request), GPUS[gpu]))
    assert len(loads) >= messages.message_packets(request)
    assert all(".128." in load for load in loads)
