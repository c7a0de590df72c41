"""The planner's decisions: it is pure, so any GPU can be planned for here."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from onlinesoftmax.core.device import KNOWN, Device, known
from onlinesoftmax.core.problem import Problem
from onlinesoftmax.core.task import ITEMSIZE, MOST_PROCESSES, Choice, Flags, task_of
from onlinesoftmax.core.view import View
from onlinesoftmax.kernels.cuda.strategy.row.proposals import row
from onlinesoftmax.ops import OPERATIONS
from onlinesoftmax.planner.measured import table_for
from onlinesoftmax.planner.plan import Plan, PlanError, Planner, Refusal, Strategies, best, plan
from onlinesoftmax.planner.price import LAUNCH_US, exchange_us
from onlinesoftmax.planner.proposal import Proposal, made
from onlinesoftmax.planner.strategies import FOR_JAX, TABLE

H100, H200 = known("h100"), known("h200")
GPUS = [name for name in KNOWN if name != "cpu"]
SHAPES = [(1, 1), (7, 100), (64, 512), (1 << 20, 64), (4096, 50257), (2048, 128256), (16, 1 << 22), (1, 1 << 28)]
STRATEGIES = {"torch": TABLE, "jax": FOR_JAX}


def plans(problem: Problem, device: Device, strategies: Strategies = TABLE, *, measured: bool = False) -> list[Plan]:
    """The plans of all strategies that can run a problem."""
    table = table_for(device) if measured else None
    return [o for o in Planner(device, table=table, strategies=strategies).alternatives(problem) if isinstance(o, Plan)]


@pytest.mark.parametrize("framework", STRATEGIES)
@pytest.mark.parametrize("name", KNOWN)
def test_every_device_has_a_plan_for_every_operation(name: str, framework: str) -> None:
    for operation in OPERATIONS:
        for rows, cols in (*SHAPES, (0, 7), (7, 0)):
            problem = Problem(operation, rows, cols, "float16")
            chosen = plan(problem, known(name), strategies=STRATEGIES[framework])
            assert chosen.device == known(name).name
            assert chosen.reason


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", ["h200", "a100"])
def test_a_strategy_proposes_blocks_that_hold_columns_or_says_why_not(name: str, dtype: str) -> None:
    """Also with a bias of wider elements than the input, which leaves a thread few registers."""
    device = known(name)
    for operation, bias_bytes, masked in itertools.product(OPERATIONS, (0, 2, 4, 8), (False, True)):
        given = (*(["bias"] if bias_bytes else []), *(["mask"] if masked else []))
        read = {"bias_bytes": bias_bytes, "given": given}
        for (rows, cols), (backend, strategy, propose) in itertools.product([(2, 64), (64, 4096), (3, 1 << 20)], TABLE):
            options = propose(Problem(operation, rows, cols, dtype, **read), device)
            case = (operation, bias_bytes, masked, rows, cols, backend, strategy)
            assert options, case
            if isinstance(options, str):
                continue
            assert all(option.block > 0 for option in options), case
            if strategy == "grid":
                # Blocks own slices of whole cache lines.
                assert all(option.splits <= -(-cols // (128 // ITEMSIZE[dtype])) for option in options), case


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("framework", STRATEGIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_plan_is_estimated_under_its_floor_or_its_launches(dtype: str, framework: str, measured: bool) -> None:
    """Also where a length is one of the table of the H200, between two, or beyond all."""
    between = [(rows, cols) for rows in (2, 300) for cols in (7, 65, 3000, 201088, 3000001)] if measured else []
    for operation, (rows, cols) in itertools.product(OPERATIONS, (*SHAPES, *between)):
        for option in plans(Problem(operation, rows, cols, dtype), H200, STRATEGIES[framework], measured=measured):
            assert option.estimate_us >= max(option.floor_us, option.launches * LAUNCH_US), (rows, cols, option)


@pytest.mark.parametrize("rows", [1, 64, 8192])
def test_more_work_is_not_estimated_to_take_less(rows: int) -> None:
    lengths = [1 << i for i in range(4, 24)]
    times = [plan(Problem("softmax", rows, cols), H200).estimate_us for cols in lengths]
    # Another strategy takes over where rows become long, and its first estimate may be a little lower.
    assert all(later > 0.95 * earlier for earlier, later in itertools.pairwise(times)), times
    assert times[-1] > times[0]


def test_a_short_row_is_read_once_and_a_long_one_is_shared() -> None:
    assert plan(Problem("softmax", 65536, 1000, "bfloat16"), H200).reads == 1
    for backend in ("cuda", "triton"):
        assert plan(Problem("softmax", 1, 1 << 26), H200, Choice(backend)).splits >= H200.multiprocessors


@pytest.mark.parametrize("framework", STRATEGIES)
def test_blocks_hold_the_whole_row_of_a_strategy_that_reads_it_once(framework: str) -> None:
    for cols in (1, 63, 255, 1000, 4096, 32768):
        for backend, strategy, propose in STRATEGIES[framework]:
            options = propose(Problem("softmax", 64, cols, "bfloat16"), H200)
            if backend == "eager" or isinstance(options, str):
                continue
            for option in options:
                held = option.block * option.splits + 2 * (option.vector - 1)
                if option.reads == 1:
                    assert held >= cols, (backend, strategy, option)
                assert option.programs >= 1
                assert 1 <= option.warps <= 32


@pytest.mark.parametrize("framework", STRATEGIES)
def test_variants_name_proposals_without_the_length_of_a_row(framework: str) -> None:
    for _, _, propose in STRATEGIES[framework]:
        for cols in (101, 1009, 4097, 50257, 999983):
            options = propose(Problem("softmax", 64, cols, "bfloat16"), H200)
            if not isinstance(options, str):
                assert len({option.variant for option in options}) == len(options)
                assert all(str(cols) not in str(option.variant) for option in options)


def test_both_kinds_of_output_cost_what_elements_cost() -> None:
    both, elements, rows = (
        Problem("softmax", 4096, 4096, "bfloat16", outputs=outputs) for outputs in (("y", "lse"), ("y",), ("lse",))
    )
    chosen = [plan(problem, H200, table=table_for(H200)) for problem in (both, elements, rows)]
    assert (chosen[0].strategy, chosen[0].variant) == (chosen[1].strategy, chosen[1].variant)
    assert chosen[2].estimate_us < chosen[1].estimate_us <= chosen[0].estimate_us


def test_bytes_and_floor_follow_from_reads_and_writes() -> None:
    rows, cols = 2048, 128256
    chosen = plan(Problem("softmax", rows, cols, "bfloat16"), H200, Choice("triton", "looped"))
    assert chosen.bytes_moved == 3 * rows * cols * 2
    assert chosen.floor_us == pytest.approx(2 * rows * cols * 2 / (H200.bandwidth * 1e3))
    per_row = plan(Problem("logsumexp", rows, cols, "bfloat16"), H200, Choice("triton", "looped"))
    assert per_row.bytes_moved == rows * cols * 2 + rows * 2


def test_the_cpu_runs_the_framework() -> None:
    for strategies in STRATEGIES.values():
        chosen = plan(Problem("softmax", 10, 10), known("cpu"), strategies=strategies)
        assert (chosen.backend, chosen.strategy) == ("eager", "row")
        assert "no kernels of ours" in chosen.reason


def test_strided_rows_side_by_side_go_by_column() -> None:
    problem = Problem("softmax", 131072, 512, interleaved=4096)
    for table in (None, table_for(H200)):
        assert plan(problem, H200, table=table).strategy == "column"


def test_unaligned_rows_are_split_where_tensors_begin_alike() -> None:
    odd, even = (plan(Problem("softmax", 4096, cols, "bfloat16"), H200, Choice("triton")) for cols in (4095, 4096))
    assert (odd.vector, even.vector) == (8, 1)
    assert "unaligned rows: head and tail are handled separately" in odd.reason
    unaligned = plan(Problem("softmax", 4096, 4095, "bfloat16", unit=1, can_peel=False), H200, Choice("triton"))
    assert unaligned.vector == 1
    assert unaligned.estimate_us > odd.estimate_us


def test_a_batch_invariant_plan_does_not_depend_on_the_rows() -> None:
    invariant = Choice(batch_invariant=True)
    chosen = [
        plan(Problem("softmax", rows, 50257, "bfloat16"), H200, invariant, table=table_for(H200))
        for rows in (1, 3, 128, 10000)
    ]
    assert len({(p.strategy, p.variant, p.block, p.splits, p.warps) for p in chosen}) == 1
    assert [p.programs for p in chosen] == [rows * chosen[0].splits for rows in (1, 3, 128, 10000)]


def test_forced_but_impossible_lists_every_reason() -> None:
    with pytest.raises(PlanError, match=r"(?s)strategy='row'.*triton/row: a row of 200000 columns.*registers") as error:
        plan(Problem("softmax", 4, 200000), H200, Choice("triton", "row"))
    assert "looped" not in str(error.value)
    with pytest.raises(PlanError, match=r"(?s)with backend='eager' batch_invariant=True.*depend on the number of rows"):
        plan(Problem("softmax", 4, 4), known("h200"), Choice("eager", None, True))
    with pytest.raises(PlanError, match="eager has no strategy 'split'"):
        plan(Problem("softmax", 4, 4), H200, Choice("eager", "split"))
    with pytest.raises(PlanError, match=r"(?s)triton/row.*triton/looped.*triton/split.*triton/column"):
        plan(Problem("softmax", 4, 4), known("cpu"), Choice("triton"))


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("framework", STRATEGIES)
def test_a_forced_strategy_is_the_one_that_is_planned(framework: str, measured: bool) -> None:
    problem, strategies = Problem("softmax", 256, 65536, "bfloat16"), STRATEGIES[framework]
    for option in plans(problem, H200, strategies, measured=measured):
        table = table_for(H200) if measured else None
        forced = plan(problem, H200, Choice(option.backend, option.strategy), table=table, strategies=strategies)
        assert (forced.backend, forced.strategy) == (option.backend, option.strategy)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("rows", "cols"), [(256, 1 << 20), (16, 1 << 22)])
def test_several_long_rows_are_pipelined(rows: int, cols: int, dtype: str) -> None:
    chosen = plan(Problem("softmax", rows, cols, dtype), H200, table=table_for(H200))
    assert (chosen.backend, chosen.strategy, chosen.reads) == ("cuda", "grid", 1)
    assert chosen.stages
    # A team must have rows to load while it writes one.
    assert rows >= 3 * chosen.programs // chosen.splits


def test_each_plan_of_grid_names_its_kernel() -> None:
    kernels = {(64, 1 << 20): "pipeline", (1, 1 << 28): "stream", (1, 1 << 20): ""}
    for (rows, cols), kernel in kernels.items():
        chosen = plan(Problem("softmax", rows, cols, "bfloat16"), H200, Choice("cuda", "grid"), table=table_for(H200))
        assert chosen.kernel == kernel
        proposals = next(propose for _, strategy, propose in TABLE if strategy == "grid")(
            Problem("softmax", rows, cols, "bfloat16"), H200
        )
        assert not isinstance(proposals, str)
        for proposal in proposals:
            assert bool(proposal.stages) == bool(proposal.kernel)


def test_an_expanded_gradient_is_not_pipelined() -> None:
    """`y.sum().backward()` gives a dy whose elements are all one number in memory; a bulk copy could not load it."""
    shape, rows_apart = (512, 1 << 20), View((1 << 20, 1), "bfloat16")
    operation = OPERATIONS["softmax_backward"]
    for dy, pipelined in ((rows_apart, True), (View((0, 0), "bfloat16"), False)):
        tensors = {"x": rows_apart, "dy": dy, "y": rows_apart}
        task = task_of(operation, operation.always, shape, 1, tensors, Flags())
        assert bool(plan(Problem.of(task), H200, table=table_for(H200)).stages) is pipelined


def test_a_plan_of_several_long_rows_says_why_it_is_not_pipelined() -> None:
    def reason(problem: Problem, device: Device = H200) -> str:
        chosen = plan(problem, device, Choice("cuda", "grid"))
        assert not chosen.stages
        return chosen.reason

    long = (64, 1 << 20, "bfloat16")
    assert "not pipelined: bulk copies need compute capability 9.0" in reason(Problem("softmax", *long), known("a100"))
    bias = Problem("softmax", *long, bias_bytes=2, given=("bias",))
    assert "not pipelined: a bias or a mask would be read twice" in reason(bias)
    apart = Problem("softmax", *long, unit=1, can_peel=False)
    assert "not pipelined: bulk copies need rows whose aligned columns are adjacent" in reason(apart)
    apart = Problem("softmax_backward", *long, same_dtype=False)
    assert "not pipelined: bulk copies need inputs of one dtype, each with adjacent columns" in reason(apart)
    wider = Problem("softmax", 64, 1 << 20, "float32", out_dtype="float64")
    assert "not pipelined: float64 results" in reason(wider)
    # One row leaves nothing to load while it is written, so there is nothing to explain.
    assert "pipelined" not in reason(Problem("softmax", 1, 1 << 20, "bfloat16"))


def test_long_rows_beside_cache_lines_are_split() -> None:
    def vector(rows: int, cols: int, **access: Any) -> int:
        problem = Problem("softmax", rows, cols, "bfloat16", **access)
        chosen = plan(problem, H200, table=table_for(H200))
        assert access or bool(chosen.kernel) == (cols >= 1 << 20)
        return chosen.vector

    # 8 elements have 16 bytes, and 64 have a cache line.
    assert (vector(16, (1 << 22) + 8), vector(3, 100000008)) == (8, 8)
    assert (vector(16, 1 << 22), vector(16, (1 << 22) + 64)) == (1, 1)
    # A single row begins where its tensor does, a cluster loads its rows without bulk copies, and rows that begin
    # differently in x and y cannot be split.
    assert (vector(1, (1 << 28) + 8), vector(4096, 50256)) == (1, 1)
    assert vector(16, (1 << 22) + 8, unit=8, can_peel=False) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("cols", [(1 << 20) + 1, (1 << 22) + 1, (1 << 24) + 1, 100000007])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_few_long_unaligned_rows_use_the_whole_device(rows: int, cols: int, dtype: str) -> None:
    chosen = plan(Problem("softmax", rows, cols, dtype), H200, table=table_for(H200))
    assert chosen.programs >= 0.9 * H200.multiprocessors


def test_unknown_names() -> None:
    with pytest.raises(PlanError, match=r"unknown backend 'tritn'; there are: cuda, triton, eager"):
        plan(Problem("softmax", 4, 4), H200, Choice("tritn"))
    with pytest.raises(
        PlanError, match=r"unknown strategy 'rows'; there are: row, cluster, grid, looped, split, column"
    ):
        plan(Problem("softmax", 4, 4), H200, Choice(strategy="rows"))
    for choice in (Choice("triton"), Choice(strategy="column")):
        with pytest.raises(PlanError, match=r"'(triton|column)' needs the framework 'torch'; there are: "):
            plan(Problem("softmax", 4, 4), H200, choice, strategies=FOR_JAX)
    with pytest.raises(ValueError, match=r"unknown operation 'sofmax'"):
        Problem("sofmax", 4, 4)
    with pytest.raises(ValueError, match=r"unknown dtype 'int8'"):
        Problem("softmax", 4, 4, "int8")
    with pytest.raises(ValueError, match="rows and cols"):
        Problem("softmax", -1, 4)


def test_unavailable_backends_are_refused_with_their_reason() -> None:
    absent = (("triton", "triton is not installed"), ("cuda", "cuda.core is not installed"))
    assert plan(Problem("softmax", 4096, 4096), H200, unavailable=absent).backend == "eager"
    options = Planner(H200, absent, table_for(H200)).alternatives(Problem("softmax", 4, 4))
    assert {o.reason for o in options if isinstance(o, Refusal)} == {reason for _, reason in absent}


def test_a_made_record_is_the_one_that_its_class_makes() -> None:
    values: dict[str, Any] = {"programs": 1, "block": 8, "backend": "cuda", "strategy": "row"}
    assert made(Proposal, **values) == Proposal(**values)
    assert list(vars(made(Proposal, **values))) == list(vars(Proposal(**values))), "JSON has this order"
    with pytest.raises(TypeError, match="colums"):
        made(Proposal, **values, colums=3)
    with pytest.raises(TypeError, match="strategy"):
        made(Proposal, **{name: value for name, value in values.items() if name != "strategy"})


def test_split_adds_merges_as_the_partials_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem("softmax", 1, 1 << 28, "bfloat16")
    states, merge, write = 1, 1, 1
    chosen = plan(problem, H200, Choice("triton", "split"))
    assert chosen.launches == states + merge + write
    monkeypatch.setattr("onlinesoftmax.planner.strategies.triton.MERGE_FAN", 16)
    left, merges = chosen.splits, 0
    while left > 1:
        left, merges = -(-left // 16), merges + 1
    assert plan(problem, H200, Choice("triton", "split")).launches == states + merges + write


def test_the_table_names_each_pair_once() -> None:
    for strategies in STRATEGIES.values():
        pairs = [(backend, strategy) for backend, strategy, _ in strategies]
        assert len(set(pairs)) == len(pairs)


def sharded(operation: str, rows: int, cols: int, outputs: tuple[str, ...] = ()) -> Problem:
    return Problem(operation, rows, cols, "bfloat16", sharded=True, outputs=outputs)


def test_only_cuda_kernels_exchange_states() -> None:
    problem = sharded("softmax", 8192, 64128)
    assert {p.backend for p in Planner(H200).alternatives(problem) if isinstance(p, Plan)} == {"cuda"}
    with pytest.raises(PlanError, match="only CUDA kernels exchange states with other GPUs"):
        plan(problem, H200, Choice("triton"))


@pytest.mark.parametrize("cols", [1, 5, 37, 1000, 16000])
def test_a_row_has_a_lane_for_each_process(cols: int) -> None:
    found = row(sharded("softmax", 1000, cols), H200)
    assert not isinstance(found, str)
    assert all(proposal.lanes >= MOST_PROCESSES for proposal in found)


def test_waiting_for_other_gpus_takes_time() -> None:
    """Each round of rows waits, longer where nothing is written; whole rows and given states wait for nobody."""
    for operation, waits in (("softmax", 1.5), ("logsumexp", 3), ("logsumexp_backward", 0), ("softmax_backward", 1.5)):
        problem = sharded(operation, 8192, 16000)
        proposals = row(problem, H200)
        assert not isinstance(proposals, str)
        one = proposals[0]
        rounds = 8192 / (one.resident * H200.multiprocessors * one.rows_per_program)
        assert exchange_us(one, problem, H200) == pytest.approx(waits * rounds)
        assert exchange_us(one, replace(problem, sharded=False), H200) == 0


@pytest.mark.parametrize(
    ("operation", "outputs", "cols", "strategy"),
    [
        ("softmax", ("y",), 16000, "row"), ("cross_entropy", ("loss", "y"), 16000, "row"),
        ("token_logprobs", ("y", "lse", "entropy"), 16000, "looped"), ("softmax", ("y",), 64128, "cluster"),
    ],
)  # fmt: skip
def test_the_plans_that_were_fastest_on_two_gpus(
    operation: str, outputs: tuple[str, ...], cols: int, strategy: str
) -> None:
    """Strategies that were faster than the others by a tenth for shards of 8192 rows on two H200s."""
    assert plan(sharded(operation, 8192, cols, outputs), H200, table=table_for(H200)).strategy == strategy


@pytest.mark.parametrize(
    ("exponent", "dtype", "strategy"),
    [(18, "float32", "cluster"), (19, "bfloat16", "cluster"), (19, "float32", "split"), (20, "bfloat16", "split")],
)
def test_sixteen_blocks_do_not_read_two_megabytes_alone(exponent: int, dtype: str, strategy: str) -> None:
    """In JAX, one row of 2 MB takes 20 us in a cluster; one of 4 MB takes 14 in programs on all multiprocessors."""
    problem = Problem("softmax", 1, 1 << exponent, dtype)
    for gpu in ("h100", "h200"):
        (found, *_) = sorted(plans(problem, known(gpu), FOR_JAX, measured=True), key=lambda o: o.rank_us)
        assert (found.backend, found.strategy) == ("pallas", strategy)


@pytest.mark.parametrize(("rows", "cols", "strategy"), [(1024, 4096, "row"), (8, 131072, "cluster")])
def test_of_equally_fast_estimates_the_first_strategy_is_taken(rows: int, cols: int, strategy: str) -> None:
    """Mosaic compiles `cluster` for half a second, so it is taken only where it is faster."""
    problem = Problem("softmax", rows, cols, "bfloat16")
    found = plans(problem, H100, FOR_JAX, measured=True)
    fastest = min(found, key=lambda option: option.rank_us)
    assert (fastest.strategy, fastest.measured_on) == ("cluster", "")
    assert best(found).strategy == strategy
