"""Acceptance of tokens drafted over a part of the KV cache: rules, budgets, chunks and block lengths on the same texts.

usage: python benchmarks/acceptance.py [--model DIR --draft DIR] [--length 7000] [--rules mass,published-once,...]

The target generates a text after each prompt, one token at a time, and its passes are recorded: each token's
distribution and the softmax masses. Then, once per rule, the retrieval level reads the text block by block, refreshed
from the rows of the block before as if all of them had been accepted. With its distribution p_hat of a token and the
target's p, a token drawn from p_hat is accepted with probability sum(min(p, p_hat)). Tokens per pass: the mean over
blocks of 1 + a_1 + a_1 a_2 + ..., where the retrieval level alone drafts a block's tokens.

The first value of each list is the base; the others vary one at a time unless --cross is given. The rules are those of
benchmarks/rules.py.
"""

from __future__ import annotations

import offload  # noqa: F401  # isort: skip  # before torch, which reads its threads' wait policy once

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

import published
import rules
import texts
import torch
from report import about, emit, say
from torch import Tensor
from torch.nn.functional import pad

from offload.decode.random_source import SeededSource
from offload.decode.sampling import SamplingParams
from offload.decode.warp import warp
from offload.engine.engine import Engine, load_tokenizer, plan_request
from offload.engine.request import GenerationRequest
from offload.kv.full import FullCache
from offload.kv.retrieval import RetrievalCache
from offload.kv.selection import Seen
from offload.model.passes import forward
from offload.plan.planner import Options

SEEN_ROWS = 8  # last rows of the prompt, used by the first refresh
_MAX_DECODED = 384  # up to this number of tokens that the cache lacks are decoded; more are prefilled with the prompt


@dataclass(frozen=True)
class Cell:
    """A way to choose chunks. gamma, budget, chunk in tokens; every: blocks from one selection to the next."""

    rule: str
    gamma: int
    budget: int
    chunk: int
    every: int

    @property
    def num_slots(self) -> int:
        return self.budget // self.chunk


@dataclass(frozen=True)
class Text:
    """The text that the target generated after a prompt, and the recordings of its passes, row by row.

    tokens: prompt and text. probs [N, V]: of each token of the text. From `SEEN_ROWS` rows before the prompt's last
    token on: masses [SEEN_ROWS + N, L, H_kv, C] in chunks of `chunk`, queries [SEEN_ROWS + N, L, H, D]. mean_keys,
    mean_values [L, H_kv, C, D]. draft_probs [N, V]: the draft's, None without a draft.
    """

    task: str
    sampling: SamplingParams
    tokens: list[int]
    probs: Tensor
    chunk: int
    masses: Tensor
    queries: Tensor
    mean_keys: Tensor
    mean_values: Tensor
    draft_probs: Tensor | None

    @property
    def first(self) -> int:
        """The position of the row that gives the distribution of the text's first token."""
        return len(self.tokens) - len(self.probs) - 1


@dataclass
class Outcome:
    """The measurements of one cell on one text, by position and by refresh."""

    task: str
    acceptance: list[float] = field(default_factory=list)
    second: list[float] = field(default_factory=list)  # of another draw without replacement, given a rejection
    grade: list[int] = field(default_factory=list)  # tenths of the largest probability in p_hat
    of_draft: list[float] = field(default_factory=list)  # acceptance of the draft's tokens by the retrieval level
    changed: list[float] = field(default_factory=list)  # chunks fetched at a refresh, as a share of the chosen ones
    seconds: list[float] = field(default_factory=list)
    recovered: list[Tensor] = field(default_factory=list)  # [L]: share of the block's softmax mass on chosen chunks


@dataclass(frozen=True)
class Window:
    """The recordings of `text` that a rule may use before the block that starts at row `row`. Implements
    `rules.Foreseen`."""

    text: Text
    row: int
    gamma: int
    chunk: int

    def mass(self, num_rows: int) -> Tensor:
        return self._sum(slice(self.row - num_rows, self.row))

    def mass_ahead(self) -> Tensor:
        return self._sum(slice(self.row, self.row + self.gamma))

    def mean_key_scores(self, chunk: int) -> Tensor:
        keys = self.text.mean_keys.unflatten(2, (-1, chunk // self.text.chunk)).mean(3)
        return published.scores_of(keys, self.text.queries[self.row - 1])

    def value_norms(self) -> Tensor:
        return self.text.mean_values.unflatten(2, (-1, self.chunk // self.text.chunk)).mean(3).norm(dim=-1)

    def _sum(self, rows: slice) -> Tensor:
        fine = self.text.masses[rows].sum(0)
        return fine.unflatten(2, (-1, self.chunk // self.text.chunk)).sum(3)


class Playback:
    """A selector that gives `rule` the recorded passes instead of the full cache's last one. row: the next block's."""

    def __init__(self, rule: rules.Timed, text: Text, cell: Cell) -> None:
        self._rule, self._text, self._cell = rule, text, cell
        self.row, self.is_due = SEEN_ROWS, True

    @property
    def selects_anew(self) -> bool:
        return self.is_due and self._rule.selects_anew

    def window(self) -> Window:
        return Window(self._text, self.row, self._cell.gamma, self._cell.chunk)

    def scores(self, full: Seen, num_rows: int, chunk: int, num_chunks: int) -> Tensor:
        return self._rule.scores(self.window(), num_rows, chunk, num_chunks)

    def forget(self) -> None:
        self._rule.forget()


class Bench:
    """An engine whose levels are run one by one."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.levels = engine, engine.levels
        assert engine.retrieval is not None
        self.retrieval: RetrievalCache = engine.retrieval
        self.full: FullCache = engine.retrieval.full
        self._queries = published.LastQueries(self.full)
        self._cached: list[int] = []

    def record(self, task: str, prompt: Sequence[int], sampling: SamplingParams, num_tokens: int) -> Text:
        """Generate `num_tokens` tokens by plain decoding, without stop conditions, and record the passes."""
        first = len(prompt) - 1
        self._fill_cache(list(prompt[: first - SEEN_ROWS]))
        random, tokens, probs = SeededSource(sampling.seed), list(prompt), list[Tensor]()
        masses, queries = list[Tensor](), list[Tensor]()
        for position in range(first - SEEN_ROWS, first + num_tokens):
            self.full.record_mass = True
            token_probs = warp(forward(self.levels["target"], [tokens[position]], 1), sampling)[0]
            masses.append(self.full.mass(1))
            queries.append(self._queries.of_row(0))
            if position >= first:
                probs.append(token_probs)
                tokens.append(random.draw(token_probs))
        self._cached = tokens[:-1]
        assert self.full.mass_chunk is not None
        width = -(-len(tokens) // self.full.shape.page_tokens) * self.full.shape.page_tokens // self.full.mass_chunk
        cut = [pad(mass, (0, max(width - mass.shape[-1], 0)))[..., :width] for mass in masses]
        draft_probs = self._draft_probs(tokens, num_tokens, sampling)
        return Text(
            task, sampling, tokens, torch.stack(probs), self.full.mass_chunk, torch.stack(cut), torch.stack(queries),
            *self._means(width), draft_probs,
        )  # fmt: skip

    @torch.inference_mode()
    def replay(self, text: Text, cell: Cell) -> Outcome:
        """Run the retrieval level over the text in blocks, refreshed before each."""
        outcome = Outcome(text.task)
        rule = rules.make(cell.rule, block=cell.gamma, num_slots=cell.num_slots)
        playback = Playback(rule, text, cell)
        self.retrieval.start_over(playback, budget=cell.budget, chunk=cell.chunk)
        self.full.truncate(text.first)
        for number in range(len(text.probs) // cell.gamma):
            playback.row, playback.is_due = SEEN_ROWS + number * cell.gamma, number % cell.every == 0
            selects = playback.selects_anew or self.retrieval.chunks is None
            self._refresh(cell.gamma if number else SEEN_ROWS, outcome, selects=selects, timed=number > 0)
            outcome.recovered.append(self._recovered(playback.window()))
            self._compare(text, number * cell.gamma, cell.gamma, outcome)
            self.full.advance(cell.gamma)  # its rows are cached already
        return outcome

    def _fill_cache(self, tokens: list[int]) -> None:
        """Make the full cache hold `tokens`, reusing the longest common prefix."""
        pairs = zip(self._cached, tokens, strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        target = self.levels["target"]
        if len(tokens) - common > _MAX_DECODED:
            for _ in self.engine.generate(GenerationRequest(tokens, SamplingParams(temperature=0.0), max_tokens=1)):
                pass
            common = len(tokens)
        target.truncate(common)
        if tokens[common:]:
            forward(target, tokens[common:], 1)

    def _means(self, num_chunks: int) -> Tensor:
        """Mean keys and values [2, L, H_kv, C, D] fp32, of chunks of `mass_chunk` tokens; past the end, zeros."""
        chunk = self.full.mass_chunk
        assert chunk is not None
        means = published.mean_rows(self.full, chunk, self.full.length)
        return pad(means, (0, 0, 0, num_chunks - means.shape[3]))

    def _draft_probs(self, tokens: list[int], num_tokens: int, sampling: SamplingParams) -> Tensor | None:
        draft = self.levels.get("draft")
        if draft is None:
            return None
        draft.truncate(0)
        first, probs = len(tokens) - num_tokens, []
        probs.append(warp(forward(draft, tokens[:first], 1), sampling))
        for start in range(first, len(tokens) - 1, 8):
            some = tokens[start : min(start + 8, len(tokens) - 1)]
            probs.append(warp(forward(draft, some, len(some)), sampling))
        return torch.cat(probs)

    def _refresh(self, num_rows: int, outcome: Outcome, *, selects: bool, timed: bool) -> None:
        before, start = self.retrieval.chunks, time.perf_counter()
        if selects:
            self.retrieval.refresh(num_rows)
        else:
            published.keep(self.retrieval)
        if timed:
            outcome.seconds.append(time.perf_counter() - start)
            outcome.changed.append(changed_share(before, self.retrieval.chunks))

    def _recovered(self, window: Window) -> Tensor:
        """The share of the next block's mass that is on chosen chunks or the tail: [L]."""
        mass, chunks = window.mass_ahead(), self.retrieval.chunks
        if chunks is None:
            return torch.ones(len(mass))
        missed = mass[..., : self.retrieval.num_chunks].scatter(-1, chunks, 0.0)
        return 1.0 - missed.sum((1, 2)) / mass.sum((1, 2))

    def _compare(self, text: Text, start: int, count: int, outcome: Outcome) -> None:
        """Compare the retrieval level's distributions of tokens `start` to `start + count` with the target's."""
        at, p = text.first + start, text.probs[start : start + count]
        p_hat = warp(forward(self.levels["retrieval"], text.tokens[at : at + count], count), text.sampling)
        outcome.acceptance += overlap(p, p_hat)
        outcome.second += [second_choice(*rows) for rows in zip(p, p_hat, strict=True)]
        outcome.grade += (p_hat.amax(-1) * 10.0).int().clamp(max=10).tolist()
        if text.draft_probs is not None:
            outcome.of_draft += overlap(p_hat, text.draft_probs[start : start + count])


def changed_share(before: Tensor | None, after: Tensor | None) -> float:
    """The share of the chosen chunks that were fetched: a chunk in another slot than before was in none."""
    if after is None:
        return 0.0
    if before is None:
        return 1.0
    padded = pad(before, (0, after.shape[-1] - before.shape[-1]), value=-1)
    return float((after != padded).float().mean())


def overlap(p: Tensor, q: Tensor) -> list[float]:
    """The probability that a token drawn from q is accepted under p: [n, V] each -> [n]."""
    return torch.minimum(p, q).sum(-1).clamp(max=1.0).tolist()


def second_choice(p: Tensor, q: Tensor) -> float:
    """The probability that a second token, drawn from q without the rejected first one, is accepted: p, q [V] each.

    The first token x was rejected with a probability proportional to max(q - p, 0); the second is verified against the
    residual. Only the 64 likeliest x are considered. 0 if nothing is ever rejected.
    """
    weights, first = (q - p).clamp(min=0.0).topk(min(64, len(q)))
    residual = (p - q).clamp(min=0.0)
    if weights.sum() < 1e-6 or residual.sum() < 1e-6:
        return 0.0
    some = (residual > 0.0).nonzero().squeeze(-1)  # the residual is zero at x: x itself needs no exclusion
    left = (1.0 - q[first]).clamp(min=torch.finfo(q.dtype).tiny)
    accepted = torch.minimum(residual[some] / residual.sum(), q[some] / left[:, None]).sum(-1)
    return float((weights / weights.sum()) @ accepted)


def tokens_per_pass(acceptance: Sequence[float], gamma: int) -> float:
    """Mean over blocks of the expected tokens of one full pass, correction or bonus included."""
    blocks = torch.tensor(acceptance).view(-1, gamma)
    return float(1.0 + blocks.cumprod(1).sum(1).mean())


def mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def summary(cell: Cell, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The results of one cell over all texts. by_quarter: acceptance in each quarter of the block."""
    positions = list(itertools.chain.from_iterable(outcome.acceptance for outcome in outcomes))
    blocks = torch.tensor(positions).view(-1, cell.gamma)
    quarters = blocks.unflatten(1, (4, -1)).mean((0, 2)).tolist() if cell.gamma % 4 == 0 else []
    by_task: dict[str, list[float]] = {}
    for outcome in outcomes:
        by_task.setdefault(outcome.task, []).extend(outcome.acceptance)
    return {
        **{item.name: getattr(cell, item.name) for item in fields(cell)},
        "acceptance": mean(positions),
        "tokens_per_pass": round(tokens_per_pass(positions, cell.gamma), 3),
        "by_task": {task: mean(values) for task, values in by_task.items()},
        "tokens_by_task": {task: round(tokens_per_pass(values, cell.gamma), 2) for task, values in by_task.items()},
        "by_quarter": [round(value, 4) for value in quarters],
        "changed": mean([value for outcome in outcomes for value in outcome.changed]),
        "refresh_milliseconds": mean([1000.0 * value for outcome in outcomes for value in outcome.seconds]),
        "draft_acceptance": mean([value for outcome in outcomes for value in outcome.of_draft]),
        "recovered_by_layer": [
            round(value, 3)
            for value in torch.stack([share for outcome in outcomes for share in outcome.recovered]).mean(0).tolist()
        ],
    }


def details(outcomes: Sequence[Outcome], most: int = 1024) -> dict[str, Any]:
    """Acceptance by grade, and at each of at most `most` positions for benchmarks/trees.py."""
    acceptance, second, grade = (
        list(itertools.chain.from_iterable(getattr(outcome, name) for outcome in outcomes))
        for name in ("acceptance", "second", "grade")
    )
    by_grade = {}
    for wanted in sorted(set(grade)):
        values = [value for value, own in zip(acceptance, grade, strict=True) if own == wanted]
        by_grade[wanted] = {"share": round(len(values) / len(grade), 4), "acceptance": mean(values)}
    return {
        "by_grade": by_grade,
        "positions": {
            "acceptance": " ".join(f"{value:.3f}" for value in acceptance[:most]),
            "second": " ".join(f"{value:.3f}" for value in second[:most]),
        },
    }


def row_of(result: dict[str, Any], tasks: Sequence[str]) -> list[str]:
    quarters = result["by_quarter"] or [float("nan")]
    changed, milliseconds = result["changed"], result["refresh_milliseconds"]
    return [
        result["rule"],
        *(str(result[name]) for name in ("gamma", "budget", "chunk", "every")),
        f"{result['temperature']:g}",
        f"{result['acceptance']:.3f}",
        *(f"{result['by_task'][task]:.3f}" for task in tasks),
        f"{result['tokens_per_pass']:.2f}",
        f"{quarters[0]:.3f}",
        f"{quarters[-1]:.3f}",
        "" if changed is None else f"{changed:.2f}",
        "" if milliseconds is None else f"{milliseconds:.1f}",
    ]


def cells_of(lists: Sequence[Sequence[Any]], *, cross: bool) -> list[Cell]:
    """Cells from one list of values per field: all combinations, or without `cross` the base with one value changed."""
    if cross:
        return [Cell(*values) for values in itertools.product(*lists)]
    base = Cell(*(values[0] for values in lists))
    others = [
        replace(base, **{item.name: value})
        for item, values in zip(fields(Cell), lists, strict=True)
        for value in values[1:]
    ]
    return [base, *others]


def tokens_of(text: str, length: int) -> int:
    """The number of tokens for "512" or for "/16", a sixteenth of the prompt's `length`."""
    return length // int(text[1:]) if text.startswith("/") else int(text)


def make_cells(args: argparse.Namespace) -> list[Cell]:
    lists = [
        args.rules.split(";"),
        list(map(int, args.gammas.split(","))),
        [tokens_of(item, args.length) for item in args.budgets.split(",")],
        list(map(int, args.chunks.split(","))),
        list(map(int, args.every.split(","))),
    ]
    cells = cells_of(lists, cross=args.cross)
    if wrong := [cell for cell in cells if args.tokens % cell.gamma]:
        raise SystemExit(f"--tokens {args.tokens} is not a multiple of gamma {wrong[0].gamma}")
    return cells


def load(args: argparse.Namespace, cells: Sequence[Cell]) -> Engine:
    """An engine with a retrieval level, and room for the prompt and the text."""
    options = Options(
        device="cpu",
        gamma=63,
        draft_gamma=1 if args.draft else 0,
        budget=max(cell.budget for cell in cells),
        chunk=min(cell.chunk for cell in cells),
    )
    plan = plan_request(
        args.model, args.draft, options, num_prompt_tokens=args.length, max_tokens=args.tokens + 2 * SEEN_ROWS
    )
    return Engine.load(plan, args.model, args.draft, load_tokenizer(args.model, args.draft))


def record_all(bench: Bench, args: argparse.Namespace) -> Iterator[Text]:
    """A recorded text for every task, temperature and seed."""
    wanted = itertools.product(args.tasks.split(","), map(float, args.temperatures.split(",")), range(args.seeds))
    for task, temperature, seed in wanted:
        start = time.perf_counter()
        prompt = texts.prompt(task, bench.engine.tokenizer, args.length)
        text = bench.record(task, prompt, SamplingParams(temperature=temperature, seed=seed), args.tokens)
        generated = bench.engine.tokenizer.decode(text.tokens[-args.tokens :])
        seconds = time.perf_counter() - start
        say(f"{task}, {len(prompt)} tokens, T {temperature:g}, seed {seed}, {seconds:.0f} s: {generated!r}")
        yield text


def run(bench: Bench, args: argparse.Namespace, cells: Sequence[Cell]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(results over all texts, results of each cell)."""
    outcomes: dict[tuple[float, Cell], list[Outcome]] = {}
    of_draft: list[float] = []
    for text in record_all(bench, args):
        start = time.perf_counter()
        for cell in cells:
            outcomes.setdefault((text.sampling.temperature, cell), []).append(bench.replay(text, cell))
        if text.draft_probs is not None:
            of_draft += overlap(text.probs, text.draft_probs)
        say(f"  {len(cells)} cells: {time.perf_counter() - start:.0f} s")
    results = [{"temperature": key[0], **summary(key[1], found)} for key, found in outcomes.items()]
    detailed = details(next(iter(outcomes.values())))
    return {"draft_acceptance_at_target": mean(of_draft), "base": detailed}, results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = Path(str(resources.files("triforce_cli"))) / "models"
    parser.add_argument("--model", type=Path, default=models / "demo-target")
    parser.add_argument("--draft", type=Path, default=None)
    parser.add_argument("--length", type=int, default=7000, help="tokens of each prompt, about")
    parser.add_argument("--tasks", default=",".join(texts.TASKS))
    parser.add_argument("--tokens", type=int, default=256, help="of each text")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--temperatures", default="0.6")
    parser.add_argument(
        "--rules", help="separated by ;",
        default="mass;mass:dilation=0;published-once;published;mass-once;recent;evict;oracle",
    )  # fmt: skip
    parser.add_argument("--gammas", default="16", help="tokens of a block")
    parser.add_argument("--budgets", default="512", help="tokens, or /16 for that part of the prompt")
    parser.add_argument("--chunks", default="16")
    parser.add_argument("--every", default="1", help="blocks from one selection to the next")
    parser.add_argument("--cross", action="store_true", help="all combinations")
    args = parser.parse_args()
    cells = make_cells(args)
    with load(args, cells) as engine:
        shared, measured = run(Bench(engine), args, cells)
    tasks, title = args.tasks.split(","), f"{args.model.name}, {args.length} tokens"
    columns = ["rule", "gamma", "budget", "chunk", "every", "T", "accept", *tasks, "tokens/pass", "first", "last"]
    rows = [row_of(result, tasks) for result in measured]
    emit([*columns, "changed", "ms"], rows, about(title, 0, **shared), measured)


if __name__ == "__main__":
    main()
