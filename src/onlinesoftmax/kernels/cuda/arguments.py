"""The arguments of a launch that follow from its request, before there are tensors: for PyTorch and for XLA."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from ..request import Request
from .messages import team_mail_words
from .params import LOSS_MAIL, MAIL, POINTERS, REST, pack
from .source import blocks, loss_mail_words, places_of, program, shared_memory, sizes_of

EMPTY = -1
"""Value of a word of a mailbox without a message, as in channel.cuh."""


class OwnLaunch(NamedTuple):
    """A launch of a small kernel, or of one that an operation brings, still without tensors.

    Its only parameter is a struct of 64-bit fields: the addresses of tensors, 0 for one that is not given, and numbers.

    Attributes:
        text, name: Source and name of the kernel.
        pointers: Names of the tensors, in the order of the struct.
        numbers: The numbers, which follow the pointers.
        blocks, threads: Blocks of the launch, and threads of a block.
        dynamic: Bytes of dynamic shared memory of a block.
        cluster: Blocks of a cluster.
        waits: True if the kernel waits itself for the kernel before it, and so may begin early.
        words: 64-bit words that the blocks share, the last of the tensors; 0 without them.
        empty: Value of each word before and after a launch.
    """

    text: str
    name: str
    pointers: tuple[str, ...]
    numbers: tuple[int, ...]
    blocks: int
    threads: int
    dynamic: int = 0
    cluster: int = 1
    waits: bool = False
    words: int = 0
    empty: int = 0

    @property
    def configuration(self) -> tuple[int, int, int, int, int, bool]:
        """The arguments of `driver.launch_config`."""
        return self.blocks, 1, self.threads, self.dynamic, self.cluster, False

    @property
    def values(self) -> bytes:
        """The parameter, with zeros for the addresses."""
        fields = (*[0] * len(self.pointers), *self.numbers)
        return b"".join(field.to_bytes(8, "little", signed=field < 0) for field in fields)


class OwnKernel(NamedTuple):
    """A kernel that an operation brings.

    Attributes:
        name: Its name.
        files: Paths of its files, in the order of inclusion: with a folder, in this package; else in `package`.  A file
            of another package is (path, package).
        pointers: Names of its tensors, in the order of the struct; numbers follow.
        prologue: Function of what it is compiled for that returns types and constants.
        waits: As in OwnLaunch.
        package: Name of the package of the kernel's own files.
    """

    name: str
    files: tuple[str | tuple[str, str], ...]
    pointers: tuple[str, ...]
    prologue: Callable[[Any], str]
    waits: bool = False
    package: str | None = None

    @property
    def places(self) -> list[tuple[str, str]]:
        """(path, package) of the files."""
        own = str(self.package)
        return [f if isinstance(f, tuple) else (f, __package__ if "/" in f else own) for f in self.files]

    def source(self, shape: Any) -> str:
        """The source of the kernel for a shape."""
        return _own_source(self, shape)

    def launch(
        self, shape: Any, numbers: tuple[int, ...], clusters: int, dynamic: int = 0, words: int = 0
    ) -> OwnLaunch:  # fmt: skip
        """The launch of the kernel.

        Args:
            shape: What it is compiled for; it has the threads of a block, and the blocks of a cluster.
            numbers: Its numbers.
            clusters: Number of clusters.
            dynamic: Bytes of dynamic shared memory of a block.
            words: As in OwnLaunch.
        """
        blocks, threads, cluster = clusters * shape.cluster, shape.threads, shape.cluster
        text = self.source(shape)
        return OwnLaunch(text, self.name, self.pointers, numbers, blocks, threads, dynamic, cluster, self.waits, words)


@cache
def _own_source(kernel: OwnKernel, shape: Any) -> str:
    return program(kernel.prologue(shape), *kernel.places)


def configuration(request: Request) -> tuple[int, int, int, int, int, bool]:
    """The arguments of `driver.launch_config`."""
    plan, dynamic = request.plan, shared_memory(request)
    cluster = plan.splits if plan.strategy == "cluster" else 1
    team = plan.splits if plan.strategy == "grid" else 1
    return blocks(request) // team, team, 32 * plan.warps, dynamic, cluster, plan.strategy == "grid"


def mail_words(request: Request) -> dict[str, int]:
    """Number of 64-bit words, EMPTY before and after a launch, by field."""
    words = {MAIL: team_mail_words(request), LOSS_MAIL: loss_mail_words(request)}
    return {field: count for field, count in words.items() if count}


def filled_in(request: Request) -> list[str]:
    """Names of the tensors that a call passes besides x and the first output."""
    given = {"x", request.task.outputs[0]}
    names = {*request.task.dtypes, *([REST] if request.rest else [])} - given
    return [name for name in POINTERS if name in names]


def values(request: Request) -> bytes:
    """Params with zeros for everything that a call fills in."""
    return pack(sizes_of(request), request.task.sizes, places_of(request))
