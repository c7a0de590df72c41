"""The records of `onlinesoftmax bench` that a report shows: found, checked against a schema, and read."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

from ...core.printable import printable
from ...core.whole_files import NotRegularError, read_regular
from ..bench.record_file import FORMAT
from ..bench.result import CaseResult
from ..bench.tables import Table, read_cases, table_of

FOLDER = Path("benchmarks/results")
"""The records that a report shows by default, relative to a checkout."""

SHIPPED = Path(__file__).parent / "shipped"
"""The records that a report shows by default elsewhere; an archive of this package has them, and no checkout."""

LONGEST_MESSAGE = 160
"""Characters of a message that quotes the file; longer quotations say less."""

MOST_BYTES = 256 << 20
"""Size of the longest file that is read; the records of whole suites have 1 MB."""

DEEPEST = 32
"""Levels of nested lists and objects in a file; a record has eight."""


class RecordError(ValueError):
    """A file cannot be shown: the message names the file and the field."""


@dataclass(frozen=True)
class Record:
    """One record.

    Attributes:
        name: Name of its file.
        content: The document.
        results: The results of its cases.
    """

    name: str
    content: dict[str, Any]
    results: list[CaseResult]

    @property
    def sharded(self) -> list[CaseResult]:
        """The results of cases whose rows were sharded over processes; empty in any other record."""
        return [found for found in self.results if found.measures == "sharded time"]

    @cached_property
    def table(self) -> Table:
        """The table that `onlinesoftmax bench` prints, with the lines above and below."""
        return table_of(self.results, self.content)

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The machine, the versions and the commit."""
        device, git = self.content["device"], self.content["git"]
        named = [f"{name} {version}" for name, version in self.content["versions"].items() if version]
        state = {True: ", with changes that are in no commit", False: ", without changes", None: ""}[git["dirty"]]
        facts = [("file", self.name), ("machine", device.get("processor") or device["name"])]
        # A GPU's threads are those of a multiprocessor, which its name says already.
        shown = ("threads",) if device.get("kind") == "cpu" else ("driver", "cuda")
        facts += [(name, str(device[name])) for name in shown if device.get(name)]
        if device.get("bandwidth"):
            facts.append(("copy bandwidth", f"{device['bandwidth']:.0f} GB/s ({device.get('source', 'no source')})"))
        return [
            *facts, ("versions", ", ".join(named)), ("commit", git["commit"] + state), ("date", self.content["date"]),
        ]  # fmt: skip


def read(paths: Sequence[Path]) -> tuple[list[Record], list[str], list[str]]:
    """The records in files and folders, newest first.

    Args:
        paths: Files and folders; of a folder, every .json file.

    Returns:
        The records; a sentence for each file that cannot be shown; and a sentence for each file of a folder that holds
        no record of `onlinesoftmax bench`, which is no error.
    """
    records, wrong, others = [], [], []
    for path, named in files_of(paths).items():
        try:
            content = _document(path)
            if not named and not (isinstance(content, dict) and "format" in content):
                others.append(printable(f"{path} is left out: it is no record of onlinesoftmax bench."))
            else:
                records.append(_record(path, content))
        except RecordError as error:
            wrong.append(printable(str(error)))
    records.sort(key=lambda record: record.content["date"], reverse=True)
    return records, wrong, others


def files_of(paths: Iterable[Path]) -> dict[Path, bool]:
    """The files, and True for each that was named itself."""
    found: dict[Path, bool] = {}
    for path in paths:
        # Path.is_dir raises errors, of names that are too long for example, which reading turns into a sentence.
        if os.path.isdir(path):  # noqa: PTH112
            found = dict.fromkeys(sorted(path.glob("*.json")), False) | found
        else:
            found[path] = True
    return found


def _document(path: Path) -> Any:
    """The JSON of a file; its texts are printable."""
    try:
        content = read_regular(path, MOST_BYTES).decode()
        return _checked(json.loads(content, object_pairs_hook=_object, parse_constant=_no_number))
    except NotRegularError as error:
        raise RecordError(f"{path} {error.strerror}, not a file") from None
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise RecordError(f"{path} is no text in UTF-8") from None
    except json.JSONDecodeError as error:
        raise RecordError(f"{path} is no JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except ValueError as error:  # of the functions below, and of numbers with thousands of digits
        raise RecordError(f"{path}: {error}") from None
    except RecursionError:
        raise RecordError(f"{path} is no record: it is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; a ValueError where a key is given twice, as parsers differ on which one counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"field {printable(twice)}: it is given twice in one object")
    return found


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _checked(value: Any, depth: int = 0) -> Any:
    """A value of JSON with printable texts.

    Raises:
        RecursionError: it is nested too deeply for a record.
    """
    if depth > DEEPEST:
        raise RecursionError
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_checked(each, depth + 1) for each in value]
    if isinstance(value, dict):
        return {printable(key): _checked(each, depth + 1) for key, each in value.items()}
    return value


def _record(path: Path, content: Any) -> Record:
    """The record in a document.

    Raises:
        RecordError: the document is no record of this format; the message names the field.
    """
    version = content.get("format") if isinstance(content, dict) else None
    if version is not None and version != FORMAT:
        shown = str(version)[:LONGEST_MESSAGE]
        raise RecordError(
            f"{path}: field format: this version of onlinesoftmax reads {FORMAT}, and the file has {shown}"
        )
    for error in _validator().iter_errors(content):
        raise RecordError(f"{path}: {_sentence(error)}")
    try:
        results = read_cases(content)
    except ValueError as error:
        raise RecordError(f"{path}: {error}") from None
    return Record(printable(path.name), content, results)


@cache
def _validator() -> Any:
    import jsonschema

    schema = json.loads(resources.files(__package__).joinpath("record.schema.json").read_text(encoding="utf-8"))
    plain = jsonschema.Draft202012Validator
    # In JSON Schema 1.0 is an integer, and the integers of a record are sizes and counts of Python.
    types = plain.TYPE_CHECKER.redefine_many({"integer": lambda _, value: type(value) is int, "number": _is_number})
    return jsonschema.validators.extend(plain, type_checker=types)(_inlined(schema, schema["$defs"]))


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """A schema with small definitions in place of references to them: a look-up takes longer than most checks."""
    if isinstance(schema, list):
        return [_inlined(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    definition = definitions.get(str(schema.get("$ref")).removeprefix("#/$defs/"))
    if definition and len(schema) == 1 and "$ref" not in str(definition):
        return definition
    return {key: _inlined(each, definitions) for key, each in schema.items()}


def _is_number(_: Any, value: Any) -> bool:
    """True for a finite number: the parser makes 1e999 infinite."""
    return type(value) is int or (type(value) is float and isfinite(value))


def _sentence(error: Any) -> str:
    """The field of a validation error, and the reason."""
    field = error.json_path.removeprefix("$").removeprefix(".")
    message = error.message
    if len(message) > LONGEST_MESSAGE:
        message = f"the value does not fit {error.validator} {str(error.validator_value)[:LONGEST_MESSAGE]}"
    return f"field {field}: {message}" if field else message
