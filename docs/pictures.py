"""Draw the pictures of docs/strategies and of protocols.md, sampling.md and start.md, and the chart of plans.md.

python docs/pictures.py
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from onlinesoftmax import explain
from onlinesoftmax.lab.report.charts import COLORS, GREY
from onlinesoftmax.planner.plan import Plan
from onlinesoftmax.sampling.eager import FUNCTIONS
from onlinesoftmax.sampling.formulas import gumbel

WIDTH = 16
"""Columns of a drawn row."""


def bar(axes: Axes, y: float, begin: float, end: float, color: str, alpha: float = 1.0) -> None:
    """A part of a row."""
    axes.add_patch(Rectangle((begin, y), end - begin, 0.8, facecolor=color, edgecolor="white", lw=1, alpha=alpha))


def label(axes: Axes, x: float, y: float, text: str, color: str = GREY) -> None:
    axes.text(x, y, text, color=color, ha="center", va="center", fontsize=9)


def arrow(
    axes: Axes, begin: tuple[float, float], end: tuple[float, float], bend: float = 0.0, style: str = "->"
) -> None:
    axes.add_patch(
        FancyArrowPatch(
            begin, end, arrowstyle=style, mutation_scale=10, color=GREY, lw=1, connectionstyle=f"arc3,rad={bend}"
        )
    )


def row(axes: Axes) -> None:
    """Four rows in two blocks; each row belongs to a group of four threads, its lanes."""
    for i in range(4):
        y = 4.6 - i - 0.3 * (i // 2)
        for chunk in range(8):
            lane = chunk % 4
            bar(axes, y, 2 * chunk, 2 * chunk + 2, COLORS[i // 2], 1.0 - 0.08 * lane)
            label(axes, 2 * chunk + 1, y + 0.4, f"{lane}", "white")
        label(axes, WIDTH + 2.4, y + 0.4, f"row {i}, block {i // 2}")
    label(axes, WIDTH / 2, 0.6, "a box: a chunk of 16 bytes · its number: the lane that holds the chunk")


def cluster(axes: Axes) -> None:
    """Two rows; four blocks own a quarter of each, and send each other their states."""
    for i in range(2):
        y = 3.4 * (1 - i)
        for block in range(4):
            bar(axes, y, 4 * block, 4 * block + 4, COLORS[4 * i + block])
            label(axes, 4 * block + 2, y + 0.4, f"block {4 * i + block}", "white")
        for left, right in combinations(range(4), 2):
            away = 0.9 - 0.3 * (right - left)
            arrow(axes, (4 * left + 2 + away, y + 0.9), (4 * right + 2 - away, y + 0.9), -0.3, "<->")
        label(axes, WIDTH + 2.2, y + 0.4, f"row {i}")
    label(axes, WIDTH / 2, -0.8, "arrows: every block sends the state (m, l) of its slice to every other block")


def grid(axes: Axes) -> None:
    """One row over all blocks; each keeps its slice in registers, in shared memory, or reads a part of it again."""
    for block in range(4):
        for part, alpha in enumerate((1.0, 0.65, 0.35)):
            begin = 4 * block + (0, 1.4, 2.8)[part]
            bar(axes, 2, begin, begin + (1.4, 1.4, 1.2)[part], COLORS[block], alpha)
        label(axes, 4 * block + 2, 1.4, f"block {block}")
        arrow(axes, (4 * block + 2, 2.9), (WIDTH / 2, 4.2))
    label(axes, WIDTH / 2, 4.6, "mailboxes in L2: one state (m, l) from every block to every block")
    label(axes, WIDTH / 2, 0.5, "strong colour: registers · medium: shared memory · faint: read twice")


def looped(axes: Axes) -> None:
    """One row of one block, in tiles; the second pass begins with the newest tile."""
    for tile in range(8):
        bar(axes, 1.5, 2 * tile, 2 * tile + 2, COLORS[0], 0.65 + 0.05 * tile)
        label(axes, 2 * tile + 1, 1.9, f"tile {tile}", "white")
    arrow(axes, (0.3, 3.0), (WIDTH - 0.3, 3.0))
    label(axes, WIDTH / 2, 3.4, "first pass: the state (m, l)")
    arrow(axes, (WIDTH - 0.3, 0.9), (0.3, 0.9))
    label(axes, WIDTH / 2, 0.5, "second pass: read again, write; L2 still holds the newest tiles")


def split(axes: Axes) -> None:
    """One row over several programs, in three launches."""
    for launch, text in ((0, "launch 3: write"), (2, "launch 2: merge"), (4, "launch 1: states")):
        label(axes, WIDTH + 2.5, launch + 0.4, text)
    for program in range(4):
        for launch in (0, 4):
            bar(axes, launch, 4 * program, 4 * program + 4, COLORS[program], 0.9)
            label(axes, 4 * program + 2, launch + 0.4, f"program {program}", "white")
        arrow(axes, (4 * program + 2, 3.9), (WIDTH / 2, 2.9))
        arrow(axes, (WIDTH / 2, 1.9), (4 * program + 2, 0.9))
    bar(axes, 2, WIDTH / 2 - 1, WIDTH / 2 + 1, COLORS[4])


def column(axes: Axes) -> None:
    """A matrix whose rows of softmax run down; a program owns adjacent ones."""
    for program in range(4):
        for line in range(6):
            bar(axes, line, 4 * program, 4 * program + 4, COLORS[program], 0.9 if line % 2 else 0.7)
        label(axes, 4 * program + 2, -0.6, f"program {program}")
    arrow(axes, (-0.7, 5.8), (-0.7, 0.0))
    axes.text(-1.3, 2.9, "softmax dimension", color=GREY, ha="center", va="center", rotation=90, fontsize=9)
    arrow(axes, (0.0, 6.3), (WIDTH, 6.3))
    label(axes, WIDTH / 2, 6.8, "adjacent in memory")


def slots(axes: Axes) -> None:
    """Messages of two blocks about eight rows, coloured by slot, and why slot 2 is free again for row 6."""
    for y, block in ((3.2, "A"), (0.6, "B")):
        label(axes, -1.0, y + 0.4, f"block {block}\nsends")
        for i in range(8):
            bar(axes, y, 2 * i, 2 * i + 1.6, COLORS[i % 4])
            label(axes, 2 * i + 0.8, y + 0.4, f"row {i}", "white")
    arrow(axes, (4.8, 3.15), (8.5, 1.45))
    arrow(axes, (9.1, 1.45), (12.5, 3.15))
    label(axes, 2.6, 2.3, "B receives row 2\nbefore it sends row 4")
    label(axes, 14.6, 2.3, "A receives row 4\nbefore it sends row 6")
    label(axes, 8, 0.1, "one colour: one slot. Rows 2 and 6 share slot 2")


def counter(axes: Axes) -> None:
    """The numbers that four blocks draw for a row with six streamed tiles."""
    drawn = (0, 1, 2, 3, 1, 0, 1, 3, 0, 2)
    for number, block in enumerate(drawn):
        past = number >= 6
        bar(axes, 2, 1.8 * number, 1.8 * number + 1.6, GREY if past else COLORS[block], 0.5 if past else 1.0)
        label(axes, 1.8 * number + 0.8, 2.4, f"{number}", "white")
        label(axes, 1.8 * number + 0.8, 3.2, f"{block}")
        label(axes, 1.8 * number + 0.8, 1.6, "none" if past else f"tile {5 - number}")
    for y, text in ((3.2, "block"), (2.4, "draws"), (1.6, "writes")):
        label(axes, -1.2, y, text)
    arrow(axes, (17, 1.3), (17, 0.8))
    label(axes, 13.0, 0.4, "who draws the largest number resets the counter")


def stages(axes: Axes) -> None:
    """The stages of a ring at one moment, and who works on each."""
    states = [("held", COLORS[0], 1.0)] * 2 + [("full", COLORS[0], 0.65)] * 2
    states += [("in flight", COLORS[1], 0.7)] * 2 + [("free", GREY, 0.4)] * 2
    for i, (state, color, alpha) in enumerate(states):
        bar(axes, 2, 2.2 * i, 2.2 * i + 2.1, color, alpha)
        label(axes, 2.2 * i + 1.05, 2.4, state, "white")
    for i, text in ((0, "next to release"), (2, "next to read"), (4, "oldest in flight"), (6, "next to load")):
        arrow(axes, (2.2 * i + 1.05, 1.2), (2.2 * i + 1.05, 1.9))
        label(axes, 2.2 * i + 1.05, 0.9, text)
    arrow(axes, (0.3, 3.1), (17.3, 3.1))
    label(axes, 8.8, 3.5, "order of the tiles; the stage after the last is the first")


def loss_words(axes: Axes) -> None:
    """The blocks of a loss in the order of their numbers, and the words through which they send numbers."""
    roles = ("count", "count", "rows", "rows", "rows\n+ add", "rows", "rows", "rows\n+ add")
    for i, role in enumerate(roles):
        axes.add_patch(Rectangle((2.3 * i, 3.6), 2.1, 1.1, facecolor=COLORS[0 if i < 2 else 1], edgecolor="white"))
        label(axes, 2.3 * i + 1.05, 4.15, role, "white")
        label(axes, 2.3 * i + 1.05, 5.0, f"{i}")
    label(axes, -1.2, 5.0, "block")
    words = ((0.6, 3.4, "divisor"), (5.0, 4.2, "losses"), (10.2, 2.4, "sum"), (13.6, 4.2, "losses"))
    for begin, width, text in words:
        axes.add_patch(Rectangle((begin, 1.3), width, 0.9, facecolor=GREY, edgecolor="white", alpha=0.6))
        label(axes, begin + width / 2, 1.75, text, "white")
    for begin, end in (
        ((1.05, 3.5), (1.6, 2.3)), ((3.35, 3.5), (2.8, 2.3)), ((3.6, 2.3), (5.2, 3.5)), ((5.9, 3.5), (5.9, 2.3)),
        ((8.0, 3.5), (7.7, 2.3)), ((8.8, 2.3), (9.8, 3.5)), ((10.6, 3.5), (11.2, 2.3)), ((12.2, 2.3), (16.6, 3.5)),
        ((12.9, 3.5), (14.2, 2.3)), ((15.2, 3.5), (15.4, 2.3)), ((17.0, 2.3), (17.3, 3.5)),
    ):  # fmt: skip
        arrow(axes, begin, end)
    arrow(axes, (18.3, 4.15), (19.3, 4.15))
    label(axes, 19.3, 3.6, "scalar")
    label(axes, 9, 0.6, "every number goes to a block with a larger number, so blocks never wait in a circle")


def launches(axes: Axes) -> None:
    """Three launches of two GPUs, coloured by their set of mailboxes, and the order of the messages."""
    for y, gpu, shift in ((3.2, 0, 0.0), (0.6, 1, 0.8)):
        label(axes, -1.0, y + 0.4, f"GPU {gpu}")
        for i in range(3):
            begin = 5.6 * i + shift
            bar(axes, y, begin, begin + 4.8, COLORS[i % 2])
            label(axes, begin + 2.4, y + 0.4, "launch n" + (f" + {i}" if i else ""), "white")
    arrow(axes, (3.4, 3.15), (3.4, 1.45))
    arrow(axes, (9.6, 1.45), (12.4, 3.15))
    label(axes, 6.7, 2.3, "GPU 1 reads this\nbefore its launch n ends")
    label(axes, 15.2, 2.3, "GPU 0 receives this\nbefore it sends in launch n + 2")
    label(axes, 8.4, 0.1, "one colour: one set of mailboxes")


def sampling(axes: Axes) -> None:
    """Scores of tokens, the threshold that keeps five of them, and the noise with which one of these wins."""
    scores = (1.5, 3.0, 0.6, 2.2, 3.9, 1.1, 2.7, 0.4, 1.8, 3.4, 1.3, 0.8)
    noise = gumbel(FUNCTIONS, torch.tensor([[40]]), torch.tensor([[0]]), len(scores))[0].tolist()
    least, sums = sorted(scores)[-5], [z + g for z, g in zip(scores, noise, strict=True)]
    best = max(total for z, total in zip(scores, sums, strict=True) if z >= least)
    for token, (z, total) in enumerate(zip(scores, sums, strict=True)):
        x, kept, wins = 1.4 * token, z >= least, total == best
        color = COLORS[1] if wins else COLORS[0] if kept else GREY
        axes.add_patch(Rectangle((x, 0), 0.7, z, facecolor=color, alpha=1.0 if kept else 0.35))
        label(axes, x + 0.35, -0.4, f"{token}", color if wins else GREY)
        if kept:
            # Beside its bar, so that noise below 0 shows.
            arrow(axes, (x + 0.98, z), (x + 0.98, total))
            axes.plot(x + 0.98, total, "o", color=color, markersize=5)
    axes.plot((-0.4, 17.0), (least, least), color=GREY, lw=1, ls="--")
    axes.plot((-0.4, 17.0), (best, best), color=COLORS[1], lw=1, ls=":")
    label(axes, 18.9, least, "threshold")
    label(axes, 18.9, best, "largest sum", COLORS[1])
    label(axes, 8.2, -1.0, "token id · bar: score · arrow: noise of the token")


PICTURES: dict[str, tuple[Callable[[Axes], None], tuple[float, float]]] = {
    "row": (row, (0.0, 5.8)),
    "cluster": (cluster, (-1.2, 6.0)),
    "grid": (grid, (0.0, 5.2)),
    "looped": (looped, (0.0, 4.0)),
    "split": (split, (-0.2, 5.0)),
    "column": (column, (-1.2, 7.2)),
    "slots": (slots, (-0.3, 4.4)),
    "counter": (counter, (-0.1, 3.8)),
    "stages": (stages, (0.4, 4.0)),
    "loss_words": (loss_words, (0.2, 5.4)),
    "launches": (launches, (-0.3, 4.4)),
    "sampling": (sampling, (-1.3, 5.8)),
}
"""The function that draws a picture, and the lower and the upper end of the picture."""


def cliffs(axes: Axes) -> None:
    """Estimated time over the floor of each CUDA strategy over the row length, for 4096 rows on an H200."""
    lengths = sorted(m << k for k in range(10, 20) for m in (2, 3))
    ratios: dict[str, list[tuple[int, float]]] = {"row": [], "cluster": [], "grid": [], "looped": []}
    for cols in lengths:
        found = explain((4096, cols), dtype="bfloat16", device="h200")
        for plan in (found.plan, *found.others):
            if isinstance(plan, Plan) and plan.backend == "cuda":
                ratios[plan.strategy].append((cols, plan.estimate_us / plan.floor_us))
    for color, (strategy, points) in zip(COLORS, ratios.items(), strict=False):
        axes.plot(*zip(*points, strict=True), color=color, marker="o", markersize=3, lw=1.5, label=strategy)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="columns", ylabel="times the floor", ylim=(1.0, 1.9))
    axes.legend(frameon=False, ncols=4, labelcolor=GREY, loc="upper right")
    axes.tick_params(colors=GREY)
    axes.xaxis.label.set_color(GREY)
    axes.yaxis.label.set_color(GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(GREY)


CALLS: dict[str, tuple[tuple[str, str], ...]] = {
    "logits, or\nany scores": (
        ("their softmax", "softmax"),
        ("their log-softmax", "log_softmax"),
        ("their logsumexp", "logsumexp"),
    ),
    "scores of\nattention": (("masked, scaled, causal", "softmax"),),
    "logits\nand targets": (
        ("the loss", "cross_entropy"),
        ("token log-probabilities", "token_logprobs"),
    ),
    "hidden states\nand a head": (
        ("the loss, without logits", "linear_cross_entropy"),
        ("token log-probabilities", "linear_token_logprobs"),
        ("their loss, as in PPO", "linear_token_loss"),
    ),
    "logits of the\nnext token": (
        ("a token", "sample"),
        ("the most probable tokens", "topk_logprobs"),
        ("which drafted tokens stay", "verify"),
    ),
    "logits\nof a gate": (("k experts for each token", "route"),),
    "an enormous\nvector": (("in memory", "softmax"), ("in parts", "State")),
    "classes over\nseveral GPUs": (
        ("the same functions", "distributed.softmax"),
        ("a head without logits", "distributed.linear_cross_entropy"),
    ),
    "a model that\nstays as it is": (("our functions in a block", "override"),),
    "files": (("a result in a file", "apply_file"),),
}
"""Functions of `onlinesoftmax`: for each thing that a caller has, one for each result that the caller may want."""


def calls(axes: Axes) -> None:
    """The tree of CALLS: what a caller has, what the caller wants, and the function to call."""
    y = 0.0
    for i, (has, wanted) in enumerate(CALLS.items()):
        height = max(len(wanted), 1 + has.count("\n") * 0.5)
        middle, color = y - height / 2, COLORS[i % len(COLORS)]
        axes.add_patch(Rectangle((0, y - height + 0.15), 4.4, height - 0.3, facecolor=color))
        label(axes, 2.2, middle, has, "white")
        for j, (result, function) in enumerate(wanted):
            at = middle + (len(wanted) - 1) / 2 - j
            axes.plot((4.4, 5.1, 5.7), (middle, at, at), color=color, lw=1)
            axes.text(6.0, at, result, color=GREY, va="center", fontsize=9)
            axes.plot((14.1, 14.7), (at, at), color=color, lw=1)
            axes.text(15.0, at, function, color=GREY, va="center", fontsize=9, family="monospace")
        y -= height + 0.2
    axes.set(xlim=(-0.1, 26.5), ylim=(y, 0.1))


def draw(folder: Path) -> None:
    """Write every picture to a folder, as SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    # The same picture has the same bytes.
    with mpl.rc_context({"svg.hashsalt": "onlinesoftmax", "svg.fonttype": "none"}):
        for name, (paint, height) in PICTURES.items():
            figure = Figure(figsize=(5.8, 2.5), layout="constrained")
            axes = figure.add_subplot()
            axes.axis("off")
            paint(axes)
            axes.set(xlim=(-2, WIDTH + 4.6), ylim=height)
            figure.savefig(folder / f"{name}.svg", transparent=True, metadata={"Date": None})
        figure = Figure(figsize=(5.8, 6.0), layout="constrained")
        axes = figure.add_subplot()
        axes.axis("off")
        calls(axes)
        figure.savefig(folder / "calls.svg", transparent=True, metadata={"Date": None})
        figure = Figure(figsize=(5.8, 3.0), layout="constrained")
        cliffs(figure.add_subplot())
        figure.savefig(folder / "cliffs.svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(__file__).parent / "figures")
