"""Sharded rows in real processes against one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import onlinesoftmax as osm
from distributed import (
    benchmark,
    dtensors,
    fast_path,
    files,
    fsdp,
    mistakes,
    page_blocks,
    passes,
    peer_memory,
    processes,
    routing,
    sampling,
    sharded_heads,
)

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


def _rest(*cuts: int) -> Any:
    return pytest.param(cuts, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize("cuts", [_rest(0, 20, 37), (0, 0, 5, 37), _rest(0, 7, 7, 8, 37)], ids=str)
def test_shards_are_as_good_as_whole_rows(cuts: tuple[int, ...], tmp_path: Path) -> None:
    """Two, three and four processes; uneven shards, and empty ones."""
    processes.run(processes.everything, cuts, tmp_path)


@pytest.mark.parametrize("cuts", [(0, 20, 37), _rest(0, 7, 7, 8, 37)], ids=str)
def test_different_calls_are_an_error_on_every_process(cuts: tuple[int, ...], tmp_path: Path) -> None:
    processes.run(mistakes.everything, cuts, tmp_path)


def test_different_calls_are_an_error_on_several_hosts(tmp_path: Path) -> None:
    processes.run(mistakes.without_sockets, (0, 20, 37), tmp_path)


@pytest.mark.parametrize("cuts", [_rest(0, 20, 37), (0, 0, 5, 37)], ids=str)
def test_the_passes_over_a_shard_heads_sampling_and_routing(cuts: tuple[int, ...], tmp_path: Path) -> None:
    checks = passes.everything, sharded_heads.everything, sampling.everything, routing.everything
    processes.run_in_turn(checks, cuts, tmp_path)


@pytest.mark.parametrize("cuts", [(0, 20, 37), _rest(0, 0, 5, 37)], ids=str)
def test_losses_by_kernels_alone(cuts: tuple[int, ...], tmp_path: Path) -> None:
    processes.run(fast_path.everything, cuts, tmp_path)


def _gpus(count: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} GPUs")


two_gpus = _gpus(2)
# The shards of two, four and eight GPUs: uneven, and some of them empty.
every_number_of_gpus = pytest.mark.parametrize(
    "cuts",
    [
        pytest.param(cuts, marks=_gpus(len(cuts) - 1), id=f"{len(cuts) - 1} GPUs")
        for cuts in ((0, 20, 37), (0, 7, 7, 8, 37), (0, 5, 5, 10, 16, 20, 28, 30, 37))
    ],
)


@pytest.mark.gpu
@every_number_of_gpus
@pytest.mark.parametrize(
    "check",
    [
        *(functools.partial(peer_memory.one_check, check.__name__) for check in peer_memory.CHECKS),
        processes.everything,
        mistakes.everything,
        sharded_heads.everything,
        peer_memory.a_process_is_late,
    ],
    ids=[
        *(check.__name__ for check in peer_memory.CHECKS),
        "processes",
        "mistakes",
        "sharded_heads",
        "a_process_is_late",
    ],
)
def test_peer_memory(check: Callable[..., None], cuts: tuple[int, ...], tmp_path: Path) -> None:
    """GPUs exchange states from kernel to kernel."""
    processes.run(check, cuts, tmp_path, "nccl", "peer_memory")


@pytest.mark.gpu
@two_gpus
def test_inductor_compiles_a_sharded_loss(tmp_path: Path) -> None:
    processes.run(passes.compiled_by_inductor, (0, 20, 37), tmp_path, "nccl")


@pytest.mark.gpu
@every_number_of_gpus
@pytest.mark.parametrize(
    "check",
    [
        processes.everything,
        mistakes.everything,
        dtensors.everything,
        passes.everything,
        fast_path.everything,
        routing.everything,
        routing.on_meshes,
        sampling.everything,
        sampling.on_meshes,
        sharded_heads.everything,
        sharded_heads.on_meshes,
    ],
    ids=lambda check: f"{check.__module__.rpartition('.')[2]}.{check.__name__}",
)
def test_all_options_of_shards_on_gpus(check: Callable[..., None], cuts: tuple[int, ...], tmp_path: Path) -> None:
    """Every combination of the options with NCCL: it compiles a few hundred kernels."""
    processes.run(check, cuts, tmp_path, "nccl")


def test_a_model_wrapped_by_fsdp(tmp_path: Path) -> None:
    processes.run(fsdp.training_follows_pytorch, (0, 1, 2), tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: torch.cuda.is_available() is False")
def test_a_model_wrapped_by_fsdp_on_gpus(tmp_path: Path) -> None:
    """One process on one GPU, two on two: FSDP's hooks, streams and dtypes are the same."""
    size = min(torch.cuda.device_count(), 2)
    processes.run(fsdp.training_follows_pytorch, tuple(range(size + 1)), tmp_path, "nccl")


def test_a_whole_graph_needs_shards() -> None:
    x, target = torch.zeros(2, 4), torch.tensor([0, 3])
    with osm.distributed.one_process() as group:
        compiled = torch.compile(osm.distributed.cross_entropy, fullgraph=True, backend="eager")
        with pytest.raises(torch._dynamo.exc.Unsupported, match="pass shards=: without it, the host reads the shapes"):
            compiled(x, target, group=group)


def test_a_dead_process_ends_the_others(tmp_path: Path) -> None:
    processes.run(mistakes.a_process_dies, (0, 20, 30, 37), tmp_path)


def test_a_late_process_ends_the_calls_of_the_others(tmp_path: Path) -> None:
    processes.run(mistakes.a_process_is_late, (0, 20, 37), tmp_path)


@pytest.mark.parametrize(
    "check",
    [
        files.files_are_those_of_one_process,
        files.a_failure_of_one_is_a_failure_of_all,
        files.late_failures_say_what_became_of_the_file,
        files.each_process_flushes_once,
        files.a_process_that_dies_leaves_no_file,
        files.a_process_that_dies_before_the_rename,
        files.a_process_that_dies_after_the_rename,
    ],
)
def test_processes_share_a_file(check: Callable[[Path], None], tmp_path: Path) -> None:
    processes.team(check, 3, tmp_path)


def test_the_command_line_shares_a_file(tmp_path: Path) -> None:
    processes.as_torchrun(files.the_command_line, 2, tmp_path)


@pytest.mark.parametrize(
    "check",
    [
        benchmark.the_record,
        benchmark.heads_with_sharded_classes,
        benchmark.other_options,
        benchmark.options_that_do_not_fit,
        benchmark.a_record_that_is_continued,
        benchmark.wrong_results,
    ],
)
def test_the_benchmark_of_sharded_rows(check: Callable[[Path], None], tmp_path: Path) -> None:
    processes.as_torchrun(check, 2, tmp_path)


@pytest.mark.parametrize("page", ["distributed", "sharded_heads"])
def test_python_prints_the_output_shown(page: str, tmp_path: Path) -> None:
    """Each block is run by as many processes as its comment says."""
    for block in page_blocks.blocks_of(page):
        (tmp_path / page_blocks.CODE).write_text(block.code)
        processes.as_torchrun(page_blocks.run_the_block, block.size, tmp_path)
        printed = "".join((tmp_path / f"{rank}.txt").read_text() for rank in range(block.size))
        assert printed == block.shown or not block.shown, block.code


def test_the_example_of_a_sharded_head_has_the_curve_of_one_process(tmp_path: Path) -> None:
    processes.as_torchrun(files.the_example_of_a_head, 2, tmp_path)
    assert "Largest difference" in (tmp_path / "0.txt").read_text()


def test_the_benchmark_says_how_to_start_it() -> None:
    code, out, err = benchmark.command()
    assert (code, out) == (2, "")
    assert "torchrun --nproc-per-node 2 -m onlinesoftmax bench --suite distributed" in err


def test_without_a_group() -> None:
    with pytest.raises(RuntimeError, match="no process group: call torch"):
        osm.distributed.softmax(torch.zeros(2, 3))
    with pytest.raises(TypeError, match="argument 'local' must be Tensor"):
        osm.distributed.softmax([0.0])
    with pytest.raises(RuntimeError, match="label_smoothing must be from 0 to 1"):
        osm.distributed.cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), label_smoothing=2.0)
    with pytest.raises(ValueError, match="z_loss must be at least 0"):
        osm.distributed.cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), z_loss=float("nan"))
    with pytest.raises(TypeError, match="'label_smoothing' must be float, not bool"):
        osm.distributed.cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), label_smoothing=True)


def test_groups_and_tensors_that_are_none() -> None:
    with osm.distributed.one_process() as group:
        x, mesh = torch.zeros(4, 1), torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        for other, words in ((0, "not int$"), ("world", "not str$"), (mesh, r"not DeviceMesh; pass its get_group\(\)")):
            with pytest.raises(TypeError, match=f"group must be a process group of torch.distributed or None, {words}"):
                osm.distributed.softmax(x, group=other)
        cut = torch.distributed.tensor.distribute_tensor(x, mesh, (torch.distributed.tensor.Shard(1),))
        for name in ("softmax", "log_softmax", "logsumexp"):
            with pytest.raises(TypeError, match=f"local is a DTensor: call onlinesoftmax.{name}, or pass local.to_lo"):
                getattr(osm.distributed, name)(cut, group=group)


@pytest.mark.parametrize("shape", [(4, 7), (2, 4, 1), (3, 1)])
def test_a_mask_that_does_not_broadcast(shape: tuple[int, ...]) -> None:
    """One local column broadcasts to a whole row, so a mask of the whole row would give a result of its shape."""
    x, index, mask = torch.zeros(4, 1), torch.zeros(4, dtype=torch.long), torch.ones(shape, dtype=torch.bool)
    with osm.distributed.one_process() as group:
        for name in ("softmax", "log_softmax", "logsumexp", "token_logprobs"):
            arguments = (x, index) if name == "token_logprobs" else (x,)
            with pytest.raises(
                RuntimeError, match=rf"{name}\(\): mask of shape .* does not broadcast to input's \(4, 1\)"
            ):
                getattr(osm.distributed, name)(*arguments, mask=mask, group=group)


def test_score_options_of_another_type() -> None:
    x, index = torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)
    wrong: tuple[tuple[type[Exception], str, dict[str, Any]], ...] = (
        (RuntimeError, "mask must be boolean", {"mask": torch.ones(4, 3)}),
        (TypeError, "scale must be a number, not ndarray", {"scale": np.ones(4, "f")}),
        (TypeError, "scale must be a number, not Tensor", {"scale": torch.ones(())}),
    )
    with osm.distributed.one_process() as group:
        shards = osm.distributed.Shards(0, 3, 3)
        for name in ("softmax", "log_softmax", "logsumexp", "token_logprobs"):
            arguments = (x, index) if name == "token_logprobs" else (x,)
            for error, message, options in wrong:
                with pytest.raises(error, match=message):
                    getattr(osm.distributed, name)(*arguments, group=group, shards=shards, **options)


def test_numbers_of_a_sharded_loss_that_are_tensors_may_change() -> None:
    """A kept launch must not hold the value of the first call."""
    x, target, smoothing = torch.randn(4, 7), torch.tensor([1, 0, 2, 5]), torch.tensor(0.0)
    with osm.distributed.one_process() as group:
        given: dict[str, Any] = {"group": group, "shards": osm.distributed.Shards(0, 7, 7)}
        if processes.kernels_run():
            given["backend"] = "triton"
        for _ in range(2):
            for _ in range(2):
                found = osm.distributed.cross_entropy(x, target, label_smoothing=smoothing, **given)
                torch.testing.assert_close(found, functional.cross_entropy(x, target, label_smoothing=smoothing))
            smoothing += 0.25


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("token_logprobs", {"scale": 1.0}, {"scale": True}),
        ("cross_entropy", {"ignore_index": 0}, {"ignore_index": False}),
        ("cross_entropy", {"ignore_index": 0}, {"ignore_index": 0.0}),
    ],
)
def test_an_equal_number_of_a_wrong_type_after_a_right_call(
    name: str, right: dict[str, Any], wrong: dict[str, Any]
) -> None:
    """A kept launch is found under a key, in which True equals 1."""
    x, target = torch.randn(4, 7), torch.tensor([1, 0, 2, 5])
    with osm.distributed.one_process() as group:
        given: dict[str, Any] = {"group": group, "shards": osm.distributed.Shards(0, 7, 7)}
        if processes.kernels_run():
            given["backend"] = "triton"
        call = functools.partial(getattr(osm.distributed, name), x, target, **given)
        call(**right)
        call(**right)
        with pytest.raises(TypeError, match=f"{next(iter(wrong))}.* must be"):
            call(**wrong)


def test_the_dtype_of_a_sharded_loss_and_an_index_to_ignore() -> None:
    x, target = torch.randn(4, 7).bfloat16(), torch.tensor([1, 0, 2, 5])
    with osm.distributed.one_process() as group:
        given: dict[str, Any] = {"group": group, "shards": osm.distributed.Shards(0, 7, 7)}
        for dtype in (torch.float32, None, torch.float32):
            found = osm.distributed.cross_entropy(x, target, dtype=dtype, **given)
            want = functional.cross_entropy(x.float(), target)
            torch.testing.assert_close(found, want.to(dtype or torch.bfloat16))
        for error, dtype in ((NotImplementedError, torch.float64), (RuntimeError, torch.int32), (TypeError, "float32")):
            with pytest.raises(error, match="dtype"):
                osm.distributed.cross_entropy(x, target, dtype=dtype, **given)
        found = osm.distributed.token_logprobs(x, target, ignore_index=2, **given).logprob
        want = x.float().log_softmax(1).gather(1, target[:, None])[:, 0]
        torch.testing.assert_close(found, want.masked_fill(target == 2, 0))


def test_the_log_probabilities_of_rows_without_columns() -> None:
    x, index = torch.zeros(2, 0), torch.zeros(2, dtype=torch.long)
    with osm.distributed.one_process() as group:
        found = osm.distributed.token_logprobs(x, index, group=group)
    assert found.logprob.isnan().all()
    assert (found.lse == -torch.inf).all()
    assert found.entropy.tolist() == [0.0, 0.0]


def test_shards_that_do_not_fit() -> None:
    with osm.distributed.one_process() as group:
        x = torch.zeros(2, 3)
        for shards in ((0, 2, 3), (1, 3, 3), (-1, 3, 3)):
            with pytest.raises(ValueError, match="does not fit a local tensor with 3 columns"):
                osm.distributed.softmax(x, group=group, shards=osm.distributed.Shards(*shards))
        with pytest.raises(TypeError, match="argument 'shards' must be Shards, not tuple"):
            osm.distributed.softmax(x, group=group, shards=(0, 3, 3))


def test_dtensors_are_as_good_as_whole_tensors(tmp_path: Path) -> None:
    checks = dtensors.everything, sharded_heads.on_meshes, sampling.on_meshes, routing.on_meshes
    processes.run_in_turn(checks, (0, 1, 2, 3, 4), tmp_path)
