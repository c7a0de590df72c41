"""Blocks around torch.utils.checkpoint, which repeats its forward in backward, where PyTorch turns all modes off.

Both forwards must run the same functions: the second one computes the tensors that the first one did not save.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any, Protocol

import torch

from .report import Counts

NOT_REPEATED = "torch.utils.checkpoint will repeat it outside of the block"
"""Why PyTorch runs a call that would not run our function in the second forward."""


def checkpoint_hook() -> Any:
    """The hook of the torch.utils.checkpoint around the running code, which will repeat the code; None outside.

    A checkpoint with `use_reentrant=True` has no hook: it saves no tensor in the first forward.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks[0] if hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint" else None


class Block(Protocol):
    """A block of `override`.

    Attributes:
        counts: Counters, which all blocks of one object share.
        entered: Result of `checkpoint_hook` for each time that the block has been entered and not left.
    """

    counts: Counts
    entered: tuple[Any, ...]

    def enter(self, checkpoint: Any) -> Any:
        """Enter the block inside a checkpoint."""

    def __exit__(self, *error: Any) -> None: ...  # the class says it


INSIDE: ContextVar[tuple[Any, ...]] = ContextVar("blocks of override around this code", default=())
"""The modes of the blocks around the running code, outermost first.

PyTorch's stack of modes belongs to a thread, and all asyncio tasks of the thread share it.  Each task has a context of
its own, so a mode on the stack knows whether its block is around this task.
"""


class Repeated:
    """The function by which a checkpoint repeats its forward, inside the blocks around the checkpoint."""

    def __init__(self, function: Callable[..., Any], blocks: Iterable[Block]) -> None:
        self.function, self.blocks = function, tuple(blocks)

    def __call__(self, *inputs: Any) -> Any:
        """Repeat the forward."""
        with ExitStack() as stack:
            if not torch._C._len_torch_function_stack():
                # Blocks around backward are not active in it, and compiled code is guarded by the number of blocks.
                stack.callback(INSIDE.reset, INSIDE.set(()))
            for block in self.blocks:
                # As in the first forward, the block is outside of the checkpoint.
                block.enter(None)
                stack.callback(block.__exit__, None, None, None)
            return self.function(*inputs)


def is_repeated(hook: Any, block: Block, around: Iterable[Block]) -> bool:
    """True where the checkpoint will repeat the running code inside the block.

    The first call inside a checkpoint replaces the function by which the checkpoint repeats its forward.

    Args:
        hook: Result of `checkpoint_hook`.
        block: The block that has got a call.
        around: The blocks of this thread around the running code, outermost first.
    """
    if hook in block.entered:
        return True
    function = inspect.unwrap(hook)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if "frame" in cells:  # The hook of the first forward: the frame is the record of the checkpoint.
        frame = cells["frame"].cell_contents
        if not isinstance(frame.recompute_fn, Repeated):
            outside = dict.fromkeys(other for other in around if other.entered[0] is not hook)
            frame.recompute_fn = Repeated(frame.recompute_fn, outside)
    elif "target_frame_ref" in cells:
        frame = cells["target_frame_ref"].cell_contents()
    else:
        return False
    repeated = frame.recompute_fn
    return isinstance(repeated, Repeated) and any(other.counts is block.counts for other in repeated.blocks)
