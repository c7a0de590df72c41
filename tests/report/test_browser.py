"""The page in a real browser: no error, no request, and the picker says what `onlinesoftmax explain` says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="the command line needs typer")
pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")

import typer.testing
from made_records import BROWSER
from playwright import sync_api

from onlinesoftmax.cli import build
from onlinesoftmax.lab.report.charts import MEASURES
from onlinesoftmax.lab.report.combinations import Choices
from onlinesoftmax.lab.report.page import page as make_page

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=BROWSER)
        yield started
        started.close()


@pytest.fixture(scope="module")
def tab(browser: Any) -> Any:
    """One tab for all tests: the first page of a tab takes the browser longer than the others."""
    return browser.new_page()


@pytest.fixture
def visit(tab: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page; after the test, nothing may have gone wrong on it."""
    said: list[str] = []
    asked: list[str] = []
    opened: list[Path] = []
    listeners: dict[str, Callable[[Any], None]] = {
        "console": lambda message: said.append(message.text),
        "pageerror": lambda error: said.append(str(error)),
        "request": lambda request: asked.append(request.url),
    }

    def visit(path: Path, width: int = 1000, scheme: str = "light") -> Any:
        tab.set_viewport_size({"width": width, "height": 900})
        tab.emulate_media(color_scheme=scheme)
        # A page that differs in the part behind "#" alone would not be loaded again.
        tab.goto("about:blank")
        for event, listener in listeners.items():
            tab.on(event, listener)
        tab.goto(path.as_uri())
        tab.wait_for_selector("html[data-ready]", timeout=60_000)
        opened.append(path)
        return tab

    yield visit
    for event, listener in listeners.items():
        tab.remove_listener(event, listener)
    assert said == []
    # A page of one file asks for that file alone.
    assert [url for url in asked if not url.endswith("report.html")] == []
    assert len(asked) == len(opened)


def explained(tab: Any) -> Any:
    """What the command at the end of the page prints."""
    command = tab.inner_text("#command").removeprefix("onlinesoftmax ").split()
    result = typer.testing.CliRunner().invoke(build(), [*command, "--no-compile", "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def check(tab: Any) -> Any:
    """Compare every number and sentence on the picker with `onlinesoftmax explain`."""
    right = explained(tab)
    plan = right["plan"]
    assert tab.inner_text("#plan") == f"{plan['backend']}/{plan['strategy']}"
    assert tab.inner_text("#reason") == f"Why: {plan['reason']}."
    problem = tab.inner_text("#problem")
    assert f"{right['problem']['rows']} x {right['problem']['cols']} {right['problem']['dtype']}" in problem
    values = dict(
        zip(tab.locator("#facts dt").all_inner_texts(), tab.locator("#facts dd").all_inner_texts(), strict=True)
    )
    assert values["launches"] == str(plan["launches"])
    assert values["programs"].startswith(f"{plan['programs']:,} ")
    assert f"{plan['block']} columns" in values["block"]
    assert [row.split("\t")[:2] for row in tab.locator("#others tbody tr").all_inner_texts()] == [
        [f"{other['backend']}/{other['strategy']}", other["why_not"]] for other in right["others"]
    ]
    return right


def test_the_slider_changes_the_answer_to_what_explain_says(visit: Callable[..., Any], page_file: Path) -> None:
    tab = visit(page_file)
    check(tab)
    slider, plans = tab.locator("#length"), set()
    box = slider.bounding_box()
    # The last part is beyond the lengths that fit the memory: the slider goes back to the last stop.
    for part, length in ((0.1, 2**3), (0.55, 2**16.5), (0.95, 3 << 22)):
        slider.click(position={"x": part * box["width"], "y": box["height"] / 2})
        cols = check(tab)["problem"]["cols"]
        assert int(tab.input_value("#typed")) == cols
        assert 0.7 < cols / length < 1.4
        assert float(tab.input_value("#length")) == pytest.approx(len(bin(cols)) - 3, abs=1)
        plans.add(tab.inner_text("#plan"))
    assert len(plans) > 1
    assert tab.locator("#lengths svg").count() == 1


def test_the_keyboard_reaches_every_length(visit: Callable[..., Any], page_file: Path) -> None:
    tab = visit(page_file)
    slider = tab.locator("#length")
    slider.focus()
    for key, cols in (("Home", 1), ("ArrowRight", 2), ("ArrowUp", 3), ("ArrowLeft", 2), ("End", 3 << 22)):
        slider.press(key)
        assert int(tab.input_value("#typed")) == cols
        assert slider.get_attribute("aria-valuetext") == f"{cols:,} elements"
    before = tab.inner_text("#plan")
    slider.press("PageDown")
    slider.press("ArrowLeft")
    assert tab.inner_text("#plan") != before, "one step before a cliff, another strategy runs"
    check(tab)
    tab.click("#next")
    assert tab.inner_text("#plan") == before
    check(tab)


def test_every_choice_is_explained(visit: Callable[..., Any], page_file: Path) -> None:
    tab = visit(page_file)
    for option in ("scale", "bias", "mask", "causal"):
        tab.select_option("#option", option)
        assert option in check(tab)["score_options"]
    tab.select_option("#alignment", "odd")
    assert check(tab)["problem"]["cols"] == 4097
    type_length(tab, "50257")
    assert check(tab)["problem"]["cols"] == 50257
    tab.select_option("#framework", "jax")
    assert tab.input_value("#option") != "causal", "our functions for JAX have no causal mask"
    assert check(tab)["plan"]["backend"] == "cuda"


def type_length(tab: Any, text: str) -> None:
    tab.fill("#typed", text)
    tab.press("#typed", "Enter")


def test_a_typed_length_has_its_own_answer(visit: Callable[..., Any], page_file: Path) -> None:
    tab = visit(page_file)
    for cols, kind in ((3, "aligned"), (13, "odd"), (50257, "odd"), (30522, "even"), (262208, "aligned"), (14, "even")):
        type_length(tab, str(cols))
        assert (tab.input_value("#typed"), tab.input_value("#alignment")) == (str(cols), kind)
        assert tab.inner_text("#snapped") == ""
        assert check(tab)["problem"]["cols"] == cols
        # Another choice keeps the length.
        tab.select_option("#option", "bias" if tab.input_value("#option") == "none" else "none")
        assert check(tab)["problem"]["cols"] == cols


def test_a_typed_length_without_an_answer_is_named(visit: Callable[..., Any], page_file: Path) -> None:
    tab = visit(page_file)
    for cols, neighbour in ((1027, 1025), (1030, 1026), (1032, 1024), (2**33 + 1, 2**24 + 1)):
        type_length(tab, str(cols))
        assert tab.input_value("#typed") == str(cols)
        said = tab.inner_text("#snapped")
        assert said.startswith(
            f"This page has no answer for {cols:,}. The plan below is for {neighbour:,}, the nearest"
        )
        assert f"4096 x {neighbour} bfloat16" in tab.inner_text("#problem")
        assert f" 4096x{cols} " in tab.inner_text("#command"), "no other number than the one that was typed"


def test_a_link_opens_the_same_choice(visit: Callable[..., Any], page_file: Path) -> None:
    tab = visit(page_file)
    tab.fill("#rows", "3000")
    type_length(tab, "50257")
    assert tab.inner_text("#snapped") == "This page has no answer for 3,000 rows: the plan is for 4,096, the nearest."
    assert " 3000x50257 " in tab.inner_text("#command")
    link = "#framework=torch&gpu=h200&operation=softmax&option=none&dtype=bfloat16&rows=3000&cols=50257"
    assert tab.get_attribute("#link", "href") == link
    tab.click("#copy")
    tab.wait_for_function("copied.textContent")
    tab.evaluate("location.hash = '#rows=4096&option=bias&cols=30522'")
    tab.wait_for_function("rows.value === '4096'")
    assert check(tab)["score_options"] == ["bias"]
    assert tab.input_value("#alignment") == "even"


def test_what_is_no_length_changes_nothing(visit: Callable[..., Any], page_file: Path) -> None:
    tab = visit(page_file)
    for text in ("", "0", "-8", "3.7", "1e400"):
        type_length(tab, "12")
        type_length(tab, text)
        assert tab.input_value("#typed") == "12"
        assert tab.inner_text("#snapped") == "A row length is a whole number, at least 1."
    assert check(tab)["problem"]["cols"] == 12


def test_a_shape_that_does_not_fit_the_memory_says_so(visit: Callable[..., Any], page_file: Path) -> None:
    tab = visit(page_file)
    assert tab.inner_text("#memory") == ""
    type_length(tab, str(3 << 22))
    assert tab.inner_text("#memory") == (
        "h200 is too small: the tensors of this call have 206.2 GB, and the device has 151.4 GB."
    )


def test_the_charts_show_the_records(visit: Callable[..., Any], page_file: Path) -> None:
    tab = visit(page_file)
    assert tab.locator("#panels figcaption").all_inner_texts() == ["softmax, bfloat16"]
    assert tab.inner_text("#panels .note").startswith("Ours is the fastest in 2 of 2 cases.")
    with tab.expect_download() as download:
        tab.click("#panels a.data")
    assert download.value.suggested_filename == "softmax-softmax-bfloat16.csv"
    lines = download.value.path().read_text().splitlines()
    assert lines[0].startswith("cols,rows,shape,who,us,gbps,ratio")
    assert lines[1].startswith("1024,4096,4096x1024,copy,50,4000,1,")
    for measure, (title, *_) in MEASURES.items():
        tab.select_option("#measure", measure)
        tab.wait_for_selector(f'#panels svg text:has-text("{title}")')
    tab.click("summary")
    assert "NVIDIA H200" in tab.inner_text("#record-facts")
    assert "at the floor" in tab.inner_text("#record-table")
    assert "Not shown: broken.json: field <date>: 3 is not of type 'string'" in tab.inner_text("header")
    tab.evaluate("location.hash = '#record=loss.json&measure=us'")
    tab.wait_for_function("measure.value === 'us'")
    assert tab.get_attribute("#record-link", "href") == "#record=loss.json&measure=us"
    tab.wait_for_selector('#panels figcaption:has-text("cross_entropy, with gradient, reduction mean, bfloat16")')


@pytest.mark.parametrize("width", [400, 1800])
def test_nothing_is_wider_than_the_window(visit: Callable[..., Any], page_file: Path, width: int) -> None:
    tab = visit(page_file, width, "dark")
    tab.wait_for_selector("#panels svg")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    dark = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    tab.emulate_media(color_scheme="light")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    # The thumb stands below the length on the chart, at any width.
    tab.focus("#length")
    tab.keyboard.press("Home")
    tab.wait_for_timeout(200)
    thumb = tab.locator("#length").bounding_box()["x"] + 8
    assert thumb == pytest.approx(_ring(tab), abs=3)


def _ring(tab: Any) -> float:
    """Horizontal middle of the ring around the chosen length."""
    box = tab.locator("#lengths svg path[transform][stroke-width='2']").last.bounding_box()
    return float(box["x"] + box["width"] / 2)


def test_every_input_has_a_label(visit: Callable[..., Any], page_file: Path) -> None:
    tab = visit(page_file)
    named = "(e) => [...e.labels].some((label) => label.innerText.trim())"
    assert tab.evaluate(f"[...document.querySelectorAll('input, select')].every({named})")
    assert tab.get_attribute("#answer", "aria-live") == "polite"


@pytest.mark.usefixtures("html")
def test_without_records_the_page_has_the_picker_alone(visit: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(make_page([], Choices(["a100", "h100"], ["softmax"], [], ["float32"], [1], ["jax"])))
    tab = visit(path)
    assert "There are no records to show" in tab.inner_text("main")
    assert tab.locator("#panels, #record").count() == 0
    check(tab)
    # Two GPUs stand side by side.
    assert not tab.is_visible("#beside-answer")
    tab.select_option("#beside", "h100")
    assert tab.inner_text("#beside-problem").endswith("float32 on h100")
    assert tab.inner_text("#beside-note") == "The upper band and the dashed line are those of h100."
    tab.evaluate("location.hash = '#gpu=h100&beside=a100&cols=64'")
    tab.wait_for_function("gpu.value === 'h100'")
    assert tab.inner_text("#beside-problem") == "for softmax of 1 x 64 float32 on a100"
    check(tab)


def test_the_page_names_no_address(html: str) -> None:
    own = re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)
    assert "http" not in own.replace('http-equiv="Content-Security-Policy"', "")
