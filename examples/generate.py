"""Generate text with a Hugging Face transformers model: a static cache, `onlinesoftmax.sample`, a CUDA graph per step.

Run `python examples/generate.py`.  It needs onlinesoftmax with the extra torch, and transformers; it takes seconds on a
CPU.  `--help` lists the options.  Nothing is downloaded: a small Llama model learns the help topics that come with
Python.  A token is a word with the space before it, or a sign; rare words are left out.

Each row of the batch has its own seed, temperature and filters, and one is greedy; one call of `sample` takes them all.
The offset of the noise is the position of the token, so a text depends on its seed alone.  A step reads and writes the
same tensors every time: the last token, the position, the cache and the text.  So on a GPU, one step is captured as a
CUDA graph, and the rest of the text is replays.

The script prints the texts, the mean log-probability of their tokens, and the tokens per second beside the same loop
with PyTorch's operations: a sort, two cumulative sums and an argmax.  Then it checks that the text is that of a loop
without the cache and the graph; if it is not, the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import onlinesoftmax as osm


class Settings(NamedTuple):
    """Sizes of the model and of its training."""

    vocabulary: int = 1024
    width: int = 128
    batch: int = 16
    length: int = 32
    """Tokens of a training sequence."""
    steps: int = 200
    rate: float = 5e-3


LARGE = Settings(vocabulary=128256, width=512, batch=64, length=64, steps=200, rate=2e-3)
"""Sizes on a GPU: the vocabulary of a present-day model, few tokens of which occur in the text."""

PROMPT = "The value of a"


class Row(NamedTuple):
    """How the text of a row is sampled; 0 and 1 are filters that keep all."""

    name: str
    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


ROWS = (
    Row("greedy", 0, temperature=0.0),
    Row("temperature 0.7, top-p 0.9", 1, temperature=0.7, top_p=0.9),
    Row("top-k 20", 2, top_k=20),
    Row("top-p 0.8, min-p 0.05", 3, top_p=0.8, min_p=0.05),
)


class Text(NamedTuple):
    """The training text as tokens, and the string of each token."""

    tokens: Tensor
    strings: list[str]

    def encode(self, text: str) -> list[int]:
        """The tokens of a text of known words."""
        return [self.strings.index(word) for word in words_of(text)]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens."""
        return "".join(self.strings[token] for token in tokens)


class Parameters(NamedTuple):
    """Parameters of all rows, each a tensor (rows,)."""

    seed: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


Sampler = Callable[[Tensor, Parameters, Tensor], tuple[Tensor, Tensor]]
"""Map logits (rows, vocabulary), the parameters and the position to tokens and their log-probabilities, (rows,)."""


def ours(logits: Tensor, given: Parameters, position: Tensor) -> tuple[Tensor, Tensor]:
    """One call, and one launch on a GPU."""
    found = osm.sample(logits, offset=position, **given._asdict())
    return found.token, found.logprob


def by_pytorch(logits: Tensor, given: Parameters, position: Tensor) -> tuple[Tensor, Tensor]:
    """PyTorch's operations: filters on the sorted probabilities.

    The token with the largest p / e for exponential noise e is what `torch.multinomial` returns.  That function itself
    waits for the GPU, so a CUDA graph cannot capture it.
    """
    greedy = given.temperature == 0
    temperature = given.temperature.where(~greedy, 1.0).unsqueeze(1)
    p, tokens = (logits.float() / temperature).softmax(-1).sort(dim=-1, descending=True)
    rank = torch.arange(p.shape[1], device=p.device)
    limit = torch.where((given.top_k > 0) & ~greedy, given.top_k, greedy + p.shape[1] * ~greedy)
    p = p.masked_fill(rank >= limit.unsqueeze(1), 0.0)
    p = p / p.sum(-1, keepdim=True)
    p = p.masked_fill(p.cumsum(-1) - p >= given.top_p.unsqueeze(1), 0.0)
    p = p.masked_fill(p < given.min_p.unsqueeze(1) * p[:, :1], 0.0)
    column = (p / torch.empty_like(p).exponential_()).argmax(-1, keepdim=True)
    logprob = (p.gather(1, column) / p.sum(-1, keepdim=True)).log()
    return tokens.gather(1, column).squeeze(1), logprob.squeeze(1)


class Loop:
    """The loop over the tokens, of which each step reads and writes the same tensors."""

    def __init__(self, model: nn.Module, prompt: Sequence[int], length: int, rows: Sequence[Row], sampler: Sampler):
        from transformers import StaticCache

        on = next(model.parameters()).device
        self.model, self.prompt, self.sampler = model, torch.tensor(prompt, device=on).expand(len(rows), -1), sampler
        _, *columns = zip(*rows, strict=True)
        self.given = Parameters(*(torch.tensor(column, device=on) for column in columns))
        self.length = len(prompt) + length
        self.cache = StaticCache(config=model.config, max_cache_len=self.length)
        self.position = torch.zeros(1, dtype=torch.int64, device=on)
        self.tokens = torch.zeros(len(rows), self.length, dtype=torch.int64, device=on)
        self.logprobs = torch.zeros(len(rows), self.length, device=on)
        self.graph: torch.cuda.CUDAGraph | None = None

    def forward(self, tokens: Tensor, positions: Tensor) -> None:
        """Read tokens (rows, n) at n positions, and write the token that follows them."""
        # A mask of the whole cache has the same shape at every position.
        mask = torch.arange(self.length, device=positions.device) <= positions.unsqueeze(1)
        logits = self.model(
            tokens, attention_mask=mask.expand(len(tokens), 1, -1, -1), position_ids=positions.unsqueeze(0),
            past_key_values=self.cache, use_cache=True,
        ).logits[:, -1]  # fmt: skip
        self.position.copy_(positions[-1:] + 1)
        token, logprob = self.sampler(logits, self.given, self.position)
        self.tokens.index_copy_(1, self.position, token.unsqueeze(1))
        self.logprobs.index_copy_(1, self.position, logprob.unsqueeze(1))

    def step(self) -> None:
        """Read the last token, and write the next one."""
        self.forward(self.tokens.index_select(1, self.position), self.position)

    def begin(self) -> None:
        """Read the prompt, and write the first token."""
        self.cache.reset()
        prompt = self.prompt.shape[1]
        self.tokens[:, :prompt] = self.prompt
        self.forward(self.prompt, torch.arange(prompt, device=self.position.device))

    def capture(self) -> None:
        """Capture a step as a CUDA graph.  The steps before it compile kernels, outside the usual stream."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.begin()
            self.step()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()

    @torch.no_grad()
    def run(self) -> float:
        """Write the texts; the tokens per second of all rows after the first token."""
        on_gpu = self.position.is_cuda
        if on_gpu and self.graph is None:
            self.capture()
        self.begin()
        step = self.graph.replay if self.graph else self.step
        count = self.length - self.prompt.shape[1] - 1
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            step()
        if on_gpu:
            torch.cuda.synchronize()
        return len(self.tokens) * count / (time.perf_counter() - start)


def words_of(text: str) -> list[str]:
    """Words, each with the space before it, and signs."""
    return re.findall(r" ?\w+| ?[^\w\s]", " " + text)


def training_text(vocabulary: int) -> Text:
    """The help topics of Python, without the words that are too rare for the vocabulary."""
    # Without markup and empty lines, sentences remain.
    text = re.sub(r"([^\w\s.])\1+|[*`\"|>\\]", "", "\n".join(topics[name] for name in sorted(topics)))
    words = words_of(" ".join(text.split()))
    strings = [word for word, _ in Counter(words).most_common(vocabulary)]
    known = {word: token for token, word in enumerate(strings)}
    return Text(torch.tensor([known[word] for word in words if word in known]), strings)


def trained_model(text: Text, settings: Settings, device: str, seed: int = 0) -> nn.Module:
    """A Llama model that has learned the text."""
    # transformers reads the variable when it is imported.  The example needs no file of the hub.
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=settings.vocabulary, hidden_size=settings.width, intermediate_size=2 * settings.width,
        num_hidden_layers=1, num_attention_heads=settings.width // 32, max_position_embeddings=1024,
        tie_word_embeddings=True,
    )  # fmt: skip
    model, data, length = LlamaForCausalLM(config).to(device), text.tokens.to(device), settings.length
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, settings.steps)
    for _ in range(settings.steps):
        starts = torch.randint(len(data) - length, (settings.batch, 1), device=device)
        tokens = data[starts + torch.arange(length + 1, device=device)]
        hidden = model.model(tokens[:, :-1]).last_hidden_state
        osm.linear_cross_entropy(hidden, model.lm_head.weight, tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()


@torch.no_grad()
def without_cache(model: nn.Module, loop: Loop) -> Tensor:
    """The tokens (rows, length) of the same prompt, seeds and parameters, by forward passes over the whole text."""
    tokens = loop.prompt
    for position in range(tokens.shape[1], loop.length):
        token, _ = ours(model(tokens, use_cache=False).logits[:, -1], loop.given, torch.tensor(position))
        tokens = torch.cat([tokens, token.unsqueeze(1)], 1)
    return tokens


def positive(text: str) -> int:
    """A number from 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, generate and print; the exit code is 1 if the text is another without the cache and the graph."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=positive, help="steps of the training")
    parser.add_argument("--length", type=positive, default=40, help="tokens to generate")
    parser.add_argument("--prompt", default=PROMPT, help="words with which each text begins")
    options = parser.parse_args(arguments)
    on_gpu = options.device.startswith("cuda")
    settings = LARGE if on_gpu else Settings()
    settings = settings._replace(steps=options.steps or settings.steps)
    text = training_text(settings.vocabulary)
    try:
        if not (prompt := text.encode(options.prompt)):
            parser.error("--prompt: needs a word")
    except ValueError as error:
        parser.error(f"--prompt: {error}: only words of the training text can be read")
    model = trained_model(text, settings, options.device)
    loops: dict[str, Any] = {
        name: Loop(model, prompt, options.length, ROWS, sampler)
        for name, sampler in (("sample()", ours), ("PyTorch", by_pytorch))
    }
    speeds = {name: loop.run() for name, loop in loops.items()}
    loop = loops["sample()"]
    for row, tokens, logprobs in zip(ROWS, loop.tokens.tolist(), loop.logprobs, strict=True):
        mean = float(logprobs[len(prompt) :].mean())
        print(f"{row.name} (seed {row.seed}, mean log-probability {mean:.2f}):\n  {text.decode(tokens).strip()}\n")
    how = "a CUDA graph for each step" if on_gpu else "no graph on a CPU"
    print(f"{len(ROWS)} rows, {settings.vocabulary} tokens to choose from, {how}:")
    for name, speed in speeds.items():
        print(f"  {name:<9}{speed:>10,.0f} tokens/s")
    same = torch.equal(without_cache(model, loop), loop.tokens)
    print(f"\nWithout the cache{' and the graph' * on_gpu}, the texts are {'the same' if same else 'OTHERS'}.")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
