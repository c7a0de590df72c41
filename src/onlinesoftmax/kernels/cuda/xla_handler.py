"""The function that XLA calls to launch a CUDA kernel: a handler of XLA's FFI, in Python, through ctypes.

XLA passes the address of a call frame: its stream, the buffers of operands and results, and one attribute, the text of
a `Launch`.  The layouts are those of xla/ffi/api/c_api.h, which jaxlib brings; a struct only grows at its end.  A
program that XLA runs as a CUDA graph calls the handler when it records the graph, and not when it replays it.

XLA runs the program of each GPU in a thread of its own, and a GPU may wait for another one in a collective operation.
So no thread waits for a GPU while it holds Python's lock, or a lock that a thread of another GPU takes.  To load a
kernel may wait until its GPU is idle: kernels are loaded for all GPUs in use when XLA compiles a program, and for a GPU
that comes into use later, with the first launch there.  With several GPUs, launching releases Python's lock.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import re
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from ctypes import c_int32, c_uint64, c_void_p
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from ..registry import module_missing
from . import COMPILER, driver, why_not_compiled

MAJOR, OLDEST_MINOR = 0, 1
"""Version of the FFI that the handler tells XLA: the oldest that it can be.  `why_unlike` checks what it needs."""

INSTANTIATE, EXECUTE = "instantiate", "execute"
"""Stages in which XLA calls the handler, as jax.ffi names them: it compiles a program, and runs it."""

COMMAND_BUFFER_COMPATIBLE = 1
"""XLA_FFI_Handler_Traits: a call launches the same kernels each time, and a graph may record and replay them."""

INTERNAL = 13
"""XLA_FFI_Error_Code of an internal error."""

LINE = 128
"""Bytes of a cache line; a mailbox begins with one."""

KEY = 32
"""Characters of a digest with which the text of a launch begins."""


@cache
def unavailable() -> str | None:
    """The reason why programs of XLA cannot call CUDA kernels; None where they can.

    None without a driver too: a program can be compiled here for a GPU elsewhere.
    """
    if reason := module_missing(COMPILER, "cuda") or why_unlike(interface()):
        return reason
    try:
        driver.library()
    except OSError:
        return None
    return why_not_compiled()


class Interface(NamedTuple):
    """XLA's FFI as the header that jaxlib brings describes it.

    Attributes:
        version: (major, minor).
        functions: Names of the functions of XLA_FFI_Api, in their order.
    """

    version: tuple[int, int]
    functions: tuple[str, ...]

    @classmethod
    def of(cls, header: str) -> Interface | None:
        """The interface of a header's text; None for a text without it."""
        found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", header) for part in ("MAJOR", "MINOR")]
        if not all(found):
            return None
        major, minor = (int(number[1]) for number in found if number)
        return cls((major, minor), tuple(re.findall(r"_XLA_FFI_API_STRUCT_FIELD\(XLA_FFI_(\w+)\)", header)))


def why_unlike(found: Interface | None) -> str | None:
    """The reason why the handler does not fit an interface of XLA; None where it does."""
    if found is None:
        return "CUDA kernels in JAX need XLA's FFI, and jaxlib has no header of it"
    right = found.version[0] == MAJOR and found.version[1] >= OLDEST_MINOR
    if right and all(found.functions[i - _FIRST : i - _FIRST + 1] == (name,) for name, i in _FUNCTIONS.items()):
        return None
    version = "{}.{}".format(*found.version)
    return f"CUDA kernels in JAX do not know the version {version} of XLA's FFI, which is that of jaxlib"


def interface() -> Interface | None:
    """The interface of the jaxlib that is installed; None without its header."""
    package = find_spec("jaxlib")
    folders = (package and package.submodule_search_locations) or ()
    headers = [Path(folder) / "include/xla/ffi/api/c_api.h" for folder in folders]
    return next((Interface.of(path.read_text(encoding="utf-8")) for path in headers if path.exists()), None)


class Launch(NamedTuple):
    """One launch without its stream and its tensors, in a form that a compiled program of XLA can hold.

    Attributes:
        name: Name of the kernel.
        fields: Field of `Params` for the address of each operand, of each result, and of each mailbox.
        mail: Bytes of each mailbox, memory by which blocks of the kernel exchange words.  The last result has all of
            them, one after the other, because it is emptied at once.
        config: Arguments of `driver.launch_config`: teams, team, threads, bytes of dynamic shared memory, blocks of a
            cluster, and True for a cooperative launch.
        values: `Params`, with zeros for the addresses.
        cubin: The machine code.
        empty: Value that each byte of the mailboxes gets before the kernel runs.
    """

    name: str
    fields: tuple[int, ...]
    mail: tuple[int, ...]
    config: tuple[int, int, int, int, int, bool]
    values: bytes
    cubin: bytes
    empty: int = 0xFF

    @property
    def mail_bytes(self) -> int:
        """Bytes of all mailboxes together."""
        return sum(_to_whole_lines(size) for size in self.mail)

    def with_mail(self, addresses: Sequence[int]) -> Sequence[int]:
        """The addresses of operands, results and mailboxes from those of the operands and of all results."""
        if len(self.mail) < 2:
            return addresses
        *given, first = addresses
        return [*given, *accumulate(map(_to_whole_lines, self.mail[:-1]), initial=first)]

    def text(self) -> str:
        """The launch as ASCII text that begins with its digest."""
        head = json.dumps([self.name, self.fields, self.mail, self.config, self.empty, len(self.values)])
        body = base64.b64encode(zlib.compress(self.values + self.cubin)).decode()
        digest = hashlib.sha256(f"{head}\n{body}".encode()).hexdigest()[:KEY]
        return f"{digest}{head}\n{body}"

    @classmethod
    def parse(cls, text: str) -> Launch:
        """The launch of a text that `text` made."""
        head, _, body = text[KEY:].partition("\n")
        name, fields, mail, config, empty, size = json.loads(head)
        code = zlib.decompress(base64.b64decode(body))
        return cls(name, tuple(fields), tuple(mail), tuple(config), code[:size], code[size:], empty)


def _to_whole_lines(size: int) -> int:
    return -(-size // LINE) * LINE


Start = Callable[[Sequence[int], int], None]
"""start(addresses, stream) launches a loaded kernel on operands and results at these addresses."""

Load = Callable[[Launch, int], Start]
"""load(launch, device) loads the kernel of a launch for the device of this number."""


# Words of 8 bytes.  XLA_FFI_CallFrame: its own fields, and the structs of operands, results and attributes.
_FRAME, _PAIR, _ASKED, _WORD = c_uint64 * 21, c_uint64 * 2, c_uint64 * 4, c_uint64
_KEY, _32_BITS = ctypes.c_char * KEY, 0xFFFFFFFF
_EXTENSION, _API, _CONTEXT, _STAGE = 1, 2, 3, 4
_ARGS_COUNT, _ARGS, _RESULTS_COUNT, _RESULTS, _ATTRIBUTES = 7, 9, 12, 14, 20
# XLA_FFI_Api: its functions begin with word _FIRST.
_FIRST = 6
_ERROR_CREATE, _STREAM_GET, _DEVICE_ORDINAL_GET = 6, 10, 23
_FUNCTIONS = {"Error_Create": _ERROR_CREATE, "Stream_Get": _STREAM_GET, "DeviceOrdinal_Get": _DEVICE_ORDINAL_GET}
# Byte offset of `data` in XLA_FFI_Buffer.
_DATA = 24

_ASK = ctypes.PYFUNCTYPE(c_void_p, c_void_p)
"""Type of XLA's functions: they return at once, so they keep Python's lock."""


class _Api(NamedTuple):
    """Functions of one XLA_FFI_Api."""

    stream_get: Any
    device_ordinal_get: Any


class Handler:
    """A handler of XLA's FFI.

    Args:
        load: Loads the kernel of a launch; for a GPU, `load` of this module.
        has_stream: False for a platform without streams, such as the host.
        devices: Function that returns the devices for which kernels are loaded when XLA compiles a program.

    Attributes:
        stages: Address of the C function for each stage in which XLA calls it.
    """

    def __init__(
        self, load: Load, has_stream: bool = True, devices: Callable[[], Iterable[int]] = driver.used_devices
    ) -> None:
        self._load, self._has_stream, self._devices = load, has_stream, devices
        self._loaded: dict[tuple[bytes, int], Start] = {}
        self._apis: dict[int, _Api] = {}
        # Loading may wait for its device, and another device must not wait with it: each has a lock.
        self._locks: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        self._callback = ctypes.CFUNCTYPE(c_void_p, c_void_p)(self._called)
        self.stages = dict.fromkeys((INSTANTIATE, EXECUTE), ctypes.cast(self._callback, c_void_p).value)

    def _called(self, address: int) -> int | None:
        """Handle one call of XLA: None, or the address of an error."""
        frame = _FRAME.from_address(address)
        try:
            if frame[_EXTENSION] and _wrote_metadata(frame[_EXTENSION]):
                return None
            # The only attribute is a text: XLA_FFI_ByteSpan.
            begin, size = _PAIR.from_address(_WORD.from_address(frame[_ATTRIBUTES]).value)[:]
            key = _KEY.from_address(begin).raw
            if frame[_STAGE] & _32_BITS == 0:
                self._prepare(key, ctypes.string_at(begin, size))
                return None
            stream, device = self._where(frame)
            start = self._loaded.get((key, device)) or self._first(key, ctypes.string_at(begin, size), device)
            start([_WORD.from_address(buffer + _DATA).value for buffer in _buffers(frame)], stream)
        except BaseException as error:
            # Hazard: ctypes drops an exception, also a KeyboardInterrupt, and XLA would go on without the result.
            return self._error(frame, f"{type(error).__name__}: {error}")
        return None

    def _prepare(self, key: bytes, text: bytes) -> None:
        """Load the kernel of a text for every device that may run it."""
        for device in self._devices():
            # Such as a device of another architecture.  If a program runs there, its first launch tries again.
            with suppress(driver.DriverError):
                self._first(key, text, device)

    def _first(self, key: bytes, text: bytes, device: int) -> Start:
        """Load the kernel of a text for a device, once."""
        with self._locks[device]:
            found = self._loaded.get((key, device))
            if found is None:
                found = self._loaded[key, device] = self._load(Launch.parse(text.decode()), device)
            return found

    def _where(self, frame: Any) -> tuple[int, int]:
        """The stream of a call, 0 where the platform has none, and the number of its device."""
        api = self._apis.get(frame[_API]) or self._api(frame)
        # struct_size, extension, context, result
        ask = _ASKED(32, 0, frame[_CONTEXT])
        if self._has_stream and api.stream_get(ask):
            raise RuntimeError("XLA gives no stream")
        stream = ask[3]
        # A device number has 32 bits.
        ask[3] = 0
        if api.device_ordinal_get(ask):
            raise RuntimeError("XLA gives no device")
        return stream, ask[3]

    def _api(self, frame: Any) -> _Api:
        """The functions that XLA offers to a call."""
        words = (c_uint64 * (_DEVICE_ORDINAL_GET + 1)).from_address(frame[_API])
        if words[0] < ctypes.sizeof(words):
            raise RuntimeError("the FFI of this jaxlib, or of its GPU plugin, is too old to tell the device of a call")
        found = _Api(*(_ASK(words[i]) for i in (_STREAM_GET, _DEVICE_ORDINAL_GET)))
        self._apis[frame[_API]] = found
        return found

    def _error(self, frame: Any, message: str) -> int:
        """The address of an error of XLA with a message."""
        text = ctypes.create_string_buffer(message.encode(errors="backslashreplace"))
        # struct_size, extension, message, code
        arguments = _ASKED(28, 0, ctypes.addressof(text), INTERNAL)
        address: int = _ASK(_WORD.from_address(frame[_API] + 8 * _ERROR_CREATE).value)(arguments)
        return address


def _buffers(frame: Any) -> list[int]:
    """Addresses of the structs XLA_FFI_Buffer of the operands and the results."""
    operands: list[int] = (_WORD * frame[_ARGS_COUNT]).from_address(frame[_ARGS])[:]
    return operands + (_WORD * frame[_RESULTS_COUNT]).from_address(frame[_RESULTS])[:]


def _wrote_metadata(extension: int) -> bool:
    """Write the version and the traits of the handler, and return True, if XLA asks for them.

    XLA asks when it registers the handler, with an extension of type 1, whose last field is the address of the answer.
    """
    if c_int32.from_address(extension + 8).value != 1:
        return False
    metadata = c_uint64.from_address(extension + 24).value
    # XLA_FFI_Metadata: struct_size, (struct_size, extension, major, minor) of the version, traits.
    answer = (c_int32 * 3).from_address(metadata + 24)
    answer[:] = [MAJOR, OLDEST_MINOR, COMMAND_BUFFER_COMPATIBLE]
    return True


def load(launch: Launch, device: int) -> Start:
    """Load the kernel of a launch for a GPU."""
    dynamic, cluster = launch.config[3:5]
    function = driver.load_function(launch.cubin, launch.name, device, dynamic, cluster)
    library = driver.library_for_xla()

    places, size, empty = launch.fields, launch.mail_bytes, launch.empty
    kept: list[driver.Arguments] = []
    fill = library.cuMemsetD8Async

    def enqueue(addresses: Sequence[int], stream: int, call: driver.Arguments) -> int:
        """Empty the mailboxes and launch the kernel; the status of the first call that fails, or 0."""
        status = fill(addresses[-1], empty, size, stream) if size else 0
        return status or call.launch()

    def start(addresses: Sequence[int], stream: int) -> None:
        # list.pop is atomic, so no two threads get the same arguments.
        try:
            call = kept.pop()
        except IndexError:
            call = driver.Arguments(launch.values, driver.launch_config(*launch.config), function, library)
        fields = call.fields
        for place, address in zip(places, launch.with_mail(addresses), strict=True):
            fields[place] = address
        call.config.stream = stream
        status = enqueue(addresses, stream, call)
        if status:
            # A thread may have no context, or that of the device of the program before.
            driver.make_current(device)
            status = enqueue(addresses, stream, call)
        kept.append(call)
        driver.check(status, f"launching {launch.name} in a program of XLA")

    return start


HANDLER = Handler(load)
"""The handler for GPUs.  XLA keeps the address of its function, so that it must live as long as the process."""
