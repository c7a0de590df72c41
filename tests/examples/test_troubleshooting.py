"""docs/troubleshooting.md: each message that it quotes is raised here, or stands in the source code."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the messages are about tensors")

import torch
from torch.nn import functional

import onlinesoftmax as osm

TEXT = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
TABLES = re.findall(r"^\| message \| what to do \|\n\|---\|---\|\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
QUOTED = re.findall(r"^\| `([^`]+)` \|", "".join(TABLES), re.MULTILINE)

X, INDEX = torch.zeros(4, 10), torch.zeros(4, dtype=torch.long)
LEAF = torch.zeros(4, 10, requires_grad=True)


def of_jax() -> Any:
    jnp = pytest.importorskip("jax.numpy", reason="one message is about JAX arrays")
    return osm.softmax(jnp.zeros(3))


def strict() -> None:
    with osm.override(strict=True):
        functional.softmax(X, -1)


def second_derivative() -> None:
    weight = torch.zeros(10, 8, requires_grad=True)
    osm.linear_cross_entropy(torch.zeros(4, 8), weight, INDEX).backward(create_graph=True)


CALLS: tuple[Callable[[], Any], ...] = (
    of_jax,
    strict,
    second_derivative,
    lambda: osm.softmax(X, temperature=0.7),  # type: ignore[call-arg]  # the mistake
    lambda: osm.linear_cross_entropy(torch.zeros(4, 8), torch.zeros(8, 10), INDEX),
    lambda: osm.softmax(INDEX),
    lambda: osm.load_balancing_loss(osm.route(X, 2)),
    lambda: osm.cross_entropy(torch.zeros(2, 4, 10), INDEX.expand(2, 4)),
    lambda: osm.cross_entropy(X, torch.tensor([1, 2, 3, 10]), check=True),
    lambda: osm.cross_entropy(INDEX, X),
    lambda: osm.softmax(X, mask=torch.ones(4, 10)),
    lambda: osm.cross_entropy(LEAF, INDEX, inplace_backward=True),
    lambda: osm.token_logprobs(X, INDEX, scale=torch.ones((), requires_grad=True)),
    lambda: osm.linear_cross_entropy(torch.zeros(4, 8), torch.zeros(10, 8, dtype=torch.bfloat16), INDEX),
    lambda: osm.distributed.softmax(X),
)


def literals() -> Iterator[str]:
    """The strings of the package; where an f-string has a value, NUL."""
    for path in Path(osm.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_every_message_is_raised_or_stands_in_the_source_code() -> None:
    raised = []
    for call in CALLS:
        with pytest.raises((RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)) as error:
            call()
        raised.append(str(error.value))
    assert not set(raised) - set(QUOTED)
    with osm.override() as mode:
        pass
    found = {*raised, str(mode.report())}
    rest = {message for message in QUOTED if message not in found}
    for text in literals():
        # At least a third of a message is in the string itself, not in its values.
        if len(text.replace("\0", "")) >= 13:
            pattern = re.compile(".*".join(map(re.escape, text.split("\0"))))
            rest -= {one for one in rest if 3 * len(text.replace("\0", "")) >= len(one) and pattern.fullmatch(one)}
    assert not rest
    assert len(QUOTED) >= 20


def test_every_environment_variable_of_the_package_is_on_its_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "environment.md").read_text(encoding="utf-8")
    read = r"""environ(?:\.get|\.setdefault)?[(\[]"(\w+)"|"(\w+)" (?:not )?in os\.environ|(ONLINESOFTMAX_[A-Z_]+)"""
    package = Path(osm.__file__).parent
    sources = [path for path in package.rglob("*.py") if path.relative_to(package).parts[0] != "lab"]
    found = {name for path in sources for names in re.findall(read, path.read_text(encoding="utf-8")) for name in names}
    assert found - {""} <= set(re.findall(r"`(\w+)", page))
