"""Launches: the layout and the plan are packed once; a call only fills in its pointers, numbers and stream.

A kernel has one parameter, the struct `Params`, which params.py lays out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ..request import Request
from . import arguments, compile, driver, process_mailboxes
from .arguments import EMPTY
from .messages import shard_message_words
from .params import FIELD, FIELD_OF_POINTER, NUMBERS, SHARD_MAIL
from .source import kernel_name, source

Run = Callable[[torch.Tensor, torch.Tensor, dict[str, Any]], None]


def bind(request: Request) -> Run:
    """The function run(x, y, more) for tensors of the shapes and dtypes of a request, all on one device.

    y is the first of the request's outputs; `more` has every other operand and every other output by name.
    """
    plan, values, config = request.plan, arguments.values(request), arguments.configuration(request)
    dynamic, cluster = config[3:5]
    x_field, y_field = (FIELD_OF_POINTER[name] for name in ("x", request.task.outputs[0]))
    tensors = tuple((FIELD_OF_POINTER[name], name) for name in arguments.filled_in(request))
    numbers = tuple((FIELD[name], name) for name in NUMBERS if name in request.task.numbers)
    # Mailboxes have a power of two of words, so that calls with other numbers of rows share them.
    words = {name: 1 << (count - 1).bit_length() for name, count in arguments.mail_words(request).items()}
    mail = tuple((FIELD_OF_POINTER[name], count) for name, count in words.items())
    part = request.task.part
    # A gradient that is given the states of whole rows exchanges nothing.
    shards = part.mail if part is not None and request.operation.reduces else None
    shard_words = request.task.rows * part.processes * shard_message_words(request) if part and shards else 0
    has_other_fields = bool(tensors or numbers or mail or shards)
    stream_of, doing = torch._C._cuda_getCurrentRawStream, f"launching {plan.backend}/{plan.strategy}"

    def new_call(index: int) -> driver.Arguments:
        kernel = loaded(source(request), kernel_name(request), index, dynamic, cluster)
        # The driver starts a cooperative kernel only when the device is empty.
        early = request.follows_divisor and plan.strategy != "grid" and may_begin_early(index)
        call = driver.Arguments(values, driver.launch_config(*config, early=early), kernel, index=index)
        if shards is not None:
            boxes = process_mailboxes.MAIL[shards]
            call.fields[_FIRST_SHARD:_AFTER_SHARDS] = boxes.addresses
            call.fields[_SET_WORDS], call.fields[_TIMEOUT] = boxes.set_words, boxes.timeout_ns
        return call

    kept: list[driver.Arguments] = []
    give_back = kept.append

    def run(x: torch.Tensor, y: torch.Tensor, more: dict[str, Any]) -> None:
        try:
            call = kept.pop()
        except IndexError:
            call = new_call(x.get_device())
        fields, index = call.fields, call.index
        fields[x_field], fields[y_field] = x.data_ptr(), y.data_ptr()
        call.config.stream = stream = stream_of(index)
        if has_other_fields:
            for field, name in tensors:
                fields[field] = more[name].data_ptr()
            for field, name in numbers:
                # ctypes keeps the low 64 bits of a number, also of a negative one.
                fields[field] = more[name]
            for field, count in mail:
                # The default stream, whose handle is 0, is the usual one; this look-up takes half the time.
                of_default = None if stream else _default_stream_words(field, count, EMPTY, index)
                fields[field] = of_default or words_of_stream(field, count, EMPTY, index, stream).data_ptr()
            if shards is not None:
                boxes = process_mailboxes.MAIL[shards]
                fields[_NUMBER] = boxes.next_launch(shard_words, stream, index)
        if status := call.launch():
            driver.launch_again(call, status, index, doing)
        if shards is not None and not fields[_NUMBER]:
            boxes.count_replays()
        give_back(call)

    return run


_FIRST_SHARD, _AFTER_SHARDS = FIELD_OF_POINTER[SHARD_MAIL[0]], FIELD_OF_POINTER[SHARD_MAIL[-1]] + 1
_SET_WORDS, _NUMBER, _TIMEOUT = FIELD["set_words"], FIELD["number"], FIELD["timeout"]


def may_begin_early(index: int) -> bool:
    """True where a device can begin a kernel before the kernel before it on the stream has ended."""
    return torch.cuda.get_device_capability(index) >= (9, 0)


@cache
def loaded(text: str, name: str, index: int, dynamic: int, cluster: int) -> int:
    """The handle of a kernel, compiled or from the cache, loaded for a device."""
    major, minor = torch.cuda.get_device_capability(index)
    return driver.load_function(compile.cubin(text, f"sm_{major}{minor}"), name, index, dynamic, cluster)


def words_of_stream(use: int | str, count: int, value: int, index: int, stream: int) -> torch.Tensor:
    """64-bit words that hold a value when they are made.

    Each kernel restores what the next one relies on, and on one stream only one kernel uses the words at a time.

    Args:
        use: Name of what the words are for; different uses have different words.
        count: Number of words.
        value: The value.
        index: Number of the device.
        stream: The stream, as PyTorch's raw handle.
    """
    # The default stream, whose handle is 0, cannot be captured, so it is not asked, which would take host time.
    if stream and torch.cuda.is_current_stream_capturing():
        # A graph may be replayed while other kernels run, so it owns its words.
        return torch.full((count,), value, dtype=torch.int64, device=index)
    key = use, count, index, stream
    found = _WORDS.get(key)
    if found is None:
        # setdefault is atomic: threads that launch on one stream at the same time use the same words.
        found = _WORDS.setdefault(key, torch.full((count,), value, dtype=torch.int64, device=index))
    return found


@cache
def _default_stream_words(use: int | str, count: int, value: int, index: int) -> int:
    """Address of the words of the default stream, which are never freed."""
    return words_of_stream(use, count, value, index, 0).data_ptr()


_WORDS: dict[tuple[int | str, int, int, int], torch.Tensor] = {}
"""Results of `words_of_stream`."""


def launcher(own: arguments.OwnLaunch) -> Callable[..., None]:
    """The function launch(index, addresses, numbers=None) of a kernel with its own parameter, for one GPU.

    `index` is the number of the GPU, the same in every call, which is the current one.  The addresses are those of the
    tensors, 0 for an absent one.  `numbers` are the last ones of the parameter, if calls choose them: all or none.
    """
    values, config = own.values, own.configuration
    # Launches with other numbers of words share them.
    words = 1 << (own.words - 1).bit_length() if own.words else 0
    stream_of, doing = torch._C._cuda_getCurrentRawStream, f"launching {own.name}"

    def new_call(index: int) -> driver.Arguments:
        kernel = loaded(own.text, own.name, index, own.dynamic, own.cluster)
        return driver.Arguments(values, driver.launch_config(*config, own.waits and may_begin_early(index)), kernel)

    kept: list[driver.Arguments] = []
    give_back = kept.append

    def launch(index: int, addresses: list[int], numbers: list[int] | None = None) -> None:
        try:
            call = kept.pop()
        except IndexError:
            call = new_call(index)
        fields: Any = call.fields
        fields[: len(addresses)] = addresses
        call.config.stream = stream = stream_of(index)
        if numbers:
            fields[-len(numbers) :] = numbers
        if words:
            fields[len(addresses)] = words_of_stream(own.name, words, own.empty, index, stream).data_ptr()
        if status := call.launch():
            driver.launch_again(call, status, index, doing)
        give_back(call)

    return launch
