"""One page for all tests of the report: few combinations, two records."""

from __future__ import annotations

import base64
import gzip
import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from made_records import BROWSER, record

from onlinesoftmax.lab.report.combinations import Choices
from onlinesoftmax.lab.report.page import NEEDED, page
from onlinesoftmax.lab.report.records import read

FEW = Choices(["h200"], ["softmax"], ["softmax"], ["bfloat16"], [4096], ["torch", "jax"])


@pytest.fixture(scope="session")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    for module in NEEDED:
        pytest.importorskip(module, reason=f"a report needs {module}")
    folder = tmp_path_factory.mktemp("records")
    (folder / "softmax.json").write_text(json.dumps(record()))
    loss = record("cross_entropy", date="2026-01-01T00:00:00+00:00")
    for case in loss["cases"]:
        case |= {"with_gradient": True, "reduction": "mean"}
    (folder / "loss.json").write_text(json.dumps(loss))
    records, wrong, others = read([folder])
    assert not wrong + others
    # The program of the charts takes seconds to bundle, and only a browser runs it.
    with (
        mock.patch.object(sys.modules[page.__module__], "_library", return_value="")
        if BROWSER is None
        else nullcontext()
    ):
        return page(records, FEW, ["broken.json: field <date>: 3 is not of type 'string'"])


@pytest.fixture(scope="session")
def data(html: str) -> Any:
    """The data of the page, with a list for each answer, as its scripts unpack them."""
    packed = re.search(r'id="data">([^<]*)<', html)
    assert packed
    found = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    for plan in found["plans"]["plans"]:
        for family in plan.values():
            family["answers"] = list(map(list, zip(*family.pop("columns"), strict=True)))
    return found


@pytest.fixture(scope="session")
def page_file(html: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html, encoding="utf-8")
    return path
