"""The kernel's one parameter, the struct `Params`: its C++ text and its packing, both from one list of fields.

The list follows from the declarations (ops/, core/options.py): every tensor and every number that some
operation reads or writes has a field, so a new operand or output needs no change here.  A field takes eight bytes.
A kernel never reads the fields of tensors and numbers that its request lacks.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

from ...core.declaration import Operand, Output
from ...core.options import SCORE_OPTIONS
from ...core.task import MOST_PROCESSES
from ...ops import OPERATIONS

LOGITS = Operand("logits", "element")
"""The logits beside a saved output: a gradient reads them for the slope of a score option such as softcap."""


class Tensor(NamedTuple):
    """A tensor that some operation reads or writes.

    Attributes:
        name: Its name in requests.
        element: True where it has one value per element in some operation.
        row: True where it has one value per row in some operation.
        read: True where it is an operand or an option with one value per row in some operation.
        written: True where it is an output of some operation.
        integer: True where its elements are integers.
    """

    name: str
    element: bool
    row: bool
    read: bool
    written: bool
    integer: bool

    @property
    def pointer(self) -> str:
        """Name of its pointer in Params; an option that may also be a number gives the number the plain name."""
        return f"{self.name}_tensor" if self.name in SCORE_OPTIONS and not self.element else self.name

    @property
    def type(self) -> str:
        """Name of the C++ type of its elements."""
        return self.pointer.upper()


def _tensors() -> tuple[Tensor, ...]:
    """Every tensor, the input and the main output first."""
    operands = [one for operation in OPERATIONS.values() for one in operation.operands if not one.number]
    outputs = [one for operation in OPERATIONS.values() for one in operation.outputs]
    used: list[Operand | Output] = [*operands, *outputs, LOGITS]
    kinds: dict[str, set[str]] = {"x": set(), "y": set()}
    for one in used:
        kinds.setdefault(one.name, set()).add(one.kind)
    for option in SCORE_OPTIONS.values():
        if option.tensor:
            kinds.setdefault(option.name, set()).add(option.kind)
    read = {one.name for one in operands if one.kind == "row"}
    read |= {option.name for option in SCORE_OPTIONS.values() if option.kind == "row"}
    written = {one.name for one in outputs}
    integer = {one.name for one in used if one.dtype in ("integer", "index")}
    return tuple(
        Tensor(name, "element" in kind, "row" in kind, name in read, name in written, name in integer)
        for name, kind in kinds.items()
    )


TENSORS = _tensors()
"""Every tensor that a kernel may be given."""

ELEMENT_TENSORS = tuple(tensor.name for tensor in TENSORS if tensor.element)
"""Names of the tensors that may have one value per element."""

ROW_OUTPUTS = tuple(tensor.name for tensor in TENSORS if tensor.row and tensor.written)
"""Names of the outputs that may have one value per row."""

_PER_CALL = tuple(tensor for tensor in TENSORS if not (tensor.element or tensor.row))

CALL_TENSORS = tuple(tensor.name for tensor in _PER_CALL if not tensor.written)
"""Names of the operands that are a tensor with one value for the call."""

CALL_OUTPUTS = tuple(tensor.name for tensor in _PER_CALL if tensor.written)
"""Names of the outputs with one value for the call."""

ROW_OPERANDS = tuple(tensor for tensor in TENSORS if tensor.read and not tensor.integer)
"""The floating operands and options that may have one value per row."""

REST = "rest"
"""Field of the last columns of the rows, where they do not lie behind the others."""

MAIL, LOSS_MAIL = "mail", "loss_mail"
"""Fields of the mailboxes of teams, and of those of a loss that is reduced to a scalar."""

SHARD_MAIL = tuple(f"shard_mail_{process}" for process in range(MOST_PROCESSES))
"""Fields of the mailboxes in the memory of each process that has a part of the rows."""

POINTERS = (*(tensor.name for tensor in TENSORS), REST, MAIL, LOSS_MAIL, *SHARD_MAIL)
"""Pointers, by the names of the tensors that a call fills in."""

OPERAND_NUMBERS = tuple(
    dict.fromkeys(one.name for operation in OPERATIONS.values() for one in operation.operands if one.number)
)
"""Operands that are one number for the call."""

NUMBERS = (*(option.name for option in SCORE_OPTIONS.values() if option.number), *OPERAND_NUMBERS)
"""Options and operands that may be one number for the call, packed as the bits of a float64."""

SIZES = {
    "rows": "",
    "cols": "",
    "diagonal": "column q + diagonal - 1 is the last that query q attends to",
    "slice": "chunks of a row that each block of a team or of a cluster owns; with a ring, chunks of a tile",
    "shared_tiles": "chunks that a thread keeps in shared memory",
    "counters": "blocks that count the targets of a mean that the kernel writes",
    "first": "columns of the whole row before those of this process",
    "total": "columns of the whole row",
    "process": "number of this process among those that have a part of the row",
    "processes": "",
    "rest_first": "columns of a row before those in `rest`",
    "rest_row": "elements from one row of `rest` to the next",
    "set_words": "64-bit words of the mailboxes of a process, in each set",
    "number": "of this launch among those that the host has made for these mailboxes; 0 in a CUDA graph",
    "timeout": "nanoseconds for which a message of another process is waited for",
}
"""Integers that follow from the layout and the plan, each with its comment; a launch fills in the last three."""

PLACES = {tensor.name: tensor.pointer for tensor in TENSORS if tensor.element or tensor.row} | {"query": "query"}
"""Tensors whose rows have a place, strides of the outer dimensions and of a column, with their names in Params."""

FIELD = {name: i for i, name in enumerate((*POINTERS, *NUMBERS, *SIZES))}
"""Index of every field before `sizes`; a number that may also be a tensor has the index of the number."""
FIELD_OF_POINTER = {name: i for i, name in enumerate(POINTERS)}
"""Index of every pointer."""


def struct_text() -> str:
    """C++ text of Params, and the lists of tensors as macros that take what to do with each."""
    pointers = [f"    {'' if t.written else 'const '}{t.type}* {t.pointer};" for t in TENSORS]
    sizes = [f"    int64 {name};{f'   // {comment}' if comment else ''}" for name, comment in SIZES.items()]
    elements = " ".join(f"DO({name.upper()}, {name})" for name in ELEMENT_TENSORS)
    row_operands = " ".join(f"DO({tensor.type}, {tensor.pointer})" for tensor in ROW_OPERANDS)
    row_outputs = " ".join(f"DO({name.upper()}, {name})" for name in ROW_OUTPUTS)
    return "\n".join(
        [
            '#line 1 "params"',
            "// Strides in elements: of the outer dimensions, the fastest first, and of a column.",
            "struct Place { int64 strides[DIMS]; int64 col; };",
            "struct Params {",
            *pointers,
            "    const X* rest;   // column `rest_first` of each row, and those behind it",
            "    uint64* mail;   // mailboxes of teams",
            "    uint64* loss_mail;   // mailboxes of a loss that is reduced to a scalar",
            f"    uint64* shard_mail[{MOST_PROCESSES}];   // mailboxes in the memory of each process",
            f"    double {', '.join(NUMBERS)};",
            *sizes,
            "    int64 sizes[DIMS];   // of the outer dimensions",
            f"    Place {', '.join(f'{name}_place' for name in PLACES.values())};",
            "};",
            "// DO(NAME, name) for every tensor that may have one value per element, for every floating operand that",
            "// may have one value per row, and for every output per row.",
            f"#define ELEMENT_TENSORS(DO) {elements}",
            f"#define ROW_OPERANDS(DO) {row_operands}",
            f"#define ROW_OUTPUTS(DO) {row_outputs}",
            "",
        ]
    )


def pack(sizes: Mapping[str, int], outer: tuple[int, ...], places: Mapping[str, tuple[tuple[int, ...], int]]) -> bytes:
    """Params as bytes, with zeros for pointers and numbers, which a call fills in.

    Args:
        sizes: Value of every name in SIZES.
        outer: Sizes of the outer dimensions.
        places: (strides of the outer dimensions, stride of a column) of the tensors that the request has.
    """
    nothing = ((0,) * len(outer), 0)
    strides: list[int] = []
    for name in PLACES:
        of_rows, of_columns = places.get(name, nothing)
        strides += [*of_rows, of_columns]
    values = [*(sizes[name] for name in SIZES), *outer, *strides]
    empty = len(POINTERS) + len(NUMBERS)
    return struct.pack(f"={empty}Q{len(values)}q", *(0,) * empty, *values)
