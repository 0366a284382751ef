"""Samplers: this program's compared with those of transformers and llama.cpp, on one model and its real texts, all in
fp32.

usage: python benchmarks/samplers.py --model FILE_OR_DIR [--tokens 48] [--lengths 200,600,1500] [--peers-env DIR]

All programs use the model folder; a GGUF file is converted into one first (fp16). llama.cpp is the wheel xllamacpp as
in peers.py, and reads a GGUF file with the same numbers in fp32 and the model's own vocabulary, which has to be
byte-level for DRY's breakers.

texts: greedy texts of this program, with speculation by lookups and without it, compared with the other program's.
Where they differ first, `gap` is the difference between the two tokens' adjusted logits.

places: distributions at some places of a text, computed by this program from the same logits, compared with the other
program's; `effect` is the setting's change there. DRY is compared after prompts that repeat a passage of their own.
Logits and scores of transformers are from its `generate`. llama.cpp gives log-probabilities of the whole vocabulary
before its samplers, and probabilities after them; the constant between its log-probabilities and logits is taken from
transformers. XTC is the mixture of llama.cpp's results with probability 0 and 1.

A near tie is a gap below 1e-3, or a distribution that is equal after moving a threshold by 1e-5 of itself: rounding
decides. llama.cpp adds probabilities in fp32; a threshold may also move by the error of their sum. Ends with exit code
1 if anything else differs.
"""

from __future__ import annotations

import offload  # noqa: F401  # isort: skip  # before torch, which reads its threads' wait policy once

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import texts
import torch
from peer import model_files, wheel_python
from report import Document, about, emit, say
from sampler_peers import LlamaCpp, Transformers, Written
from torch import Tensor

from offload.bench.comparison import first_difference
from offload.config.gguf_header import is_gguf
from offload.decode.breakers import breakers_of
from offload.decode.distribution import Distribution
from offload.decode.sampling import BREAKERS, SamplingParams
from offload.engine.engine import Engine, load_tokenizer, plan_request
from offload.engine.request import GenerationRequest
from offload.errors import TriforceError
from offload.hub.convert import convert
from offload.plan.options import Options
from offload.text.tokenizer import Tokenizer

EQUAL, NEAR_TIE, DIFFERS = "equal", "near tie", "differs"
TASKS = ("continue", "quote", "summary")  # one of each length
GREEDY = SamplingParams(temperature=0.0, penalty_window=0)
SOFT = SamplingParams(temperature=1.0, top_p=1.0, penalty_window=0)
REPEATED = 8  # tokens of a repeated passage
PLACES = 8  # of each text, with distributions from transformers
GAP = 1e-3  # of logits, between two programs' fp32 arithmetic
DISTANCE = 1e-5  # of probabilities
THRESHOLDS = ("top_p", "min_p", "typical_p", "top_n_sigma", "xtc_threshold")
MOVED = 1e-5

Fields = dict[str, Any]

DRY: dict[str, Fields] = {
    "DRY 0.8": {"dry_multiplier": 0.8},
    "DRY 2, base 1.2, from 1": {"dry_multiplier": 2.0, "dry_base": 1.2, "dry_allowed_length": 1},
    "DRY 0.5, base 3, from 4": {"dry_multiplier": 0.5, "dry_base": 3.0, "dry_allowed_length": 4},
    "DRY 5, last 128": {"dry_multiplier": 5.0, "dry_window": 128},
}
TRUNCATIONS: dict[str, Fields] = {
    "temperature 0.7": {"temperature": 0.7},
    "top-k 40": {"top_k": 40},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "typical 0.9": {"typical_p": 0.9},
    "typical 0.5": {"typical_p": 0.5},
    "temperature 0.8, top-k 50, top-p 0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "temperature 1.3, top-p 0.9, min-p 0.02, typical 0.8": {
        "temperature": 1.3,
        "top_p": 0.9,
        "min_p": 0.02,
        "typical_p": 0.8,
    },
}
LLAMA_CPP_ONLY: dict[str, Fields] = {
    "top-n-sigma 1": {"top_n_sigma": 1.0},
    "top-n-sigma 2, temperature 1.5": {"top_n_sigma": 2.0, "temperature": 1.5},
    "XTC 1, above 0.1": {"xtc_probability": 1.0},
    "XTC 0.5, above 0.02": {"xtc_probability": 0.5, "xtc_threshold": 0.02},
    "XTC 0.3, min-p 0.02": {"xtc_probability": 0.3, "xtc_threshold": 0.05, "min_p": 0.02},
    "presence 0.5, frequency 0.2, of the whole text": {"presence_penalty": 0.5, "frequency_penalty": 0.2},
    "presence 0.5, last 64": {"presence_penalty": 0.5, "penalty_window": 64},
    "repetition 1.2, last 64": {"repetition_penalty": 1.2, "penalty_window": 64},
    "DRY 0.8, repetition 1.1, top-k 40, top-p 0.9": {
        "dry_multiplier": 0.8,
        "repetition_penalty": 1.1,
        "top_k": 40,
        "top_p": 0.9,
    },
    "DRY 0.8, top-n-sigma 1.5, XTC 0.5": {"dry_multiplier": 0.8, "top_n_sigma": 1.5, "xtc_probability": 0.5},
}


def penalties(plain: list[int]) -> dict[str, Fields]:
    """Settings that change logits and exist in transformers, too. plain: the text without them; its tokens are
    biased."""
    biases = {"logit_bias": tuple(dict.fromkeys(((plain[0], -torch.inf), (plain[5], 2.0), (plain[3], -1.5))))}
    return {
        "repetition 1.1": {"repetition_penalty": 1.1},
        "repetition 1.3": {"repetition_penalty": 1.3},
        "no 2-gram twice": {"no_repeat_ngram": 2},
        "no 3-gram twice": {"no_repeat_ngram": 3},
        "at least 24 tokens": {"min_tokens": 24},
        "biases": biases,
        "repetition 1.1, no 3-gram twice, at least 12 tokens": {
            "repetition_penalty": 1.1,
            "no_repeat_ngram": 3,
            "min_tokens": 12,
        },
        "biases, repetition 1.3, no 2-gram twice": {**biases, "repetition_penalty": 1.3, "no_repeat_ngram": 2},
    }


@dataclass(frozen=True)
class Found:
    """A comparison with `program` after one prompt. first_difference, gap: of texts, from 0. distance: the largest
    difference between two probabilities of a token (for "logits": two logits). effect: the largest difference between
    this program's probabilities with and without the setting."""

    what: str
    setting: str
    program: str
    task: str
    prompt_tokens: int
    compared: int
    verdict: str
    speculation: bool | None = None
    accepted: int | None = None
    first_difference: int | None = None
    gap: float | None = None
    distance: float | None = None
    effect: float | None = None


class Ours:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def write(
        self, prompt: list[int], sampling: SamplingParams, *, max_tokens: int, ends: frozenset[int], speculation: bool
    ) -> tuple[list[int], int]:
        """(tokens, number of accepted drafted tokens)."""
        request = GenerationRequest(prompt, sampling, max_tokens, end_tokens=ends, speculation=speculation)
        tokens = [token for step in self.engine.generate(request) for token in step.tokens]
        return tokens, sum(level.accepted for level in self.engine.stats.levels)

    def distribution(self, sampling: SamplingParams, num_prompt: int, ends: frozenset[int]) -> Distribution:
        return self.engine.distribution(sampling, num_prompt, self.engine.end_tokens | ends)


@dataclass(frozen=True)
class Bench:
    """All programs, with one prompt. llama_cpp: None without the wheel."""

    ours: Ours
    transformers: Transformers
    llama_cpp: LlamaCpp | None
    task: str
    prompt: list[int]
    max_tokens: int

    def run(self) -> Iterator[Found]:
        plain, _ = self._text(GREEDY, speculation=False)
        ends = frozenset({plain[2]})
        for name, fields in {"nothing": {}, **penalties(plain)}.items():
            own = ends if "min_tokens" in fields else frozenset[int]()
            yield from self.greedy_beside_transformers(name, replace(GREEDY, **fields), own)
        for name, fields in {**penalties(plain), **TRUNCATIONS}.items():
            own = ends if "min_tokens" in fields else frozenset[int]()
            yield self.places_beside_transformers(name, replace(SOFT, **fields), own)
        if self.llama_cpp is None:
            return
        for name, fields in {"nothing": {}, **DRY}.items():
            yield from self.greedy_beside_llama_cpp(name, replace(GREEDY, **fields), self.llama_cpp)
        settings = {"repetition 1.3": {"repetition_penalty": 1.3}, **TRUNCATIONS, **LLAMA_CPP_ONLY}
        yield from self.places_beside_llama_cpp(settings, [self.prompt], self.llama_cpp)
        breakers = breakers_of(self.ours.engine.tokenizer, BREAKERS).whole
        yield from self.places_beside_llama_cpp(DRY, repetitions(self.prompt, breakers), self.llama_cpp)

    def greedy_beside_transformers(self, name: str, sampling: SamplingParams, ends: frozenset[int]) -> Iterator[Found]:
        theirs = self.transformers.write(
            self.prompt, sampling, max_tokens=self.max_tokens, end_tokens=self.ours.engine.end_tokens | ends
        )
        for speculation in (False, True):
            tokens, accepted = self._text(sampling, speculation=speculation, ends=ends)
            place = first_difference(tokens, theirs.tokens)
            gap = None if place is None else self._gap(sampling, ends, tokens, theirs.tokens, place, theirs)
            yield self._text_found(name, "transformers", len(tokens), place, gap, speculation, accepted)

    def greedy_beside_llama_cpp(self, name: str, sampling: SamplingParams, program: LlamaCpp) -> Iterator[Found]:
        theirs = program.text(self.prompt, sampling, max_tokens=self.max_tokens)
        for speculation in (False, True):
            tokens, accepted = self._text(sampling, speculation=speculation)
            if tokens[-1] in self.ours.engine.end_tokens:
                tokens = tokens[:-1]
            place = first_difference(tokens, theirs)
            gap = None if place is None else self._gap(sampling, frozenset(), tokens, theirs, place)
            yield self._text_found(name, "llama.cpp", len(tokens), place, gap, speculation, accepted)

    def places_beside_transformers(self, name: str, sampling: SamplingParams, ends: frozenset[int]) -> Found:
        """Compare the distributions at the first places of a text that transformers draws."""
        written = self.transformers.write(
            self.prompt, sampling, max_tokens=PLACES, end_tokens=self.ours.engine.end_tokens | ends
        )
        tokens = [*self.prompt, *written.tokens[: len(written.logits) - 1]]
        theirs = written.scores.softmax(-1)

        def probs(sampling: SamplingParams) -> Tensor:
            return self.ours.distribution(sampling, len(self.prompt), ends).probs(written.logits, tokens)

        found = [judged(sampling, lambda moved, row=row: probs(moved)[row], theirs[row]) for row in range(len(theirs))]
        effect = (probs(sampling) - written.logits.softmax(-1)).abs().max().item()
        return self._places_found(name, "transformers", len(theirs), worst(found), effect)

    def places_beside_llama_cpp(
        self, settings: Mapping[str, Fields], places: list[list[int]], program: LlamaCpp
    ) -> Iterator[Found]:
        """Yield comparisons of the distributions after each text in `places`."""
        rows = [self.transformers.logits(tokens) for tokens in places]
        theirs = [program.logprobs(tokens) for tokens in places]
        logits = [(its + own.double().logsumexp(-1)).float() for its, own in zip(theirs, rows, strict=True)]
        distance = max((row - own).abs().max().item() for row, own in zip(logits, rows, strict=True))
        yield self._places_found("logits", "llama.cpp", len(places), (distance, EQUAL), None)
        for name, fields in settings.items():
            sampling, found, effect = replace(SOFT, **fields), [], 0.0
            for tokens, row, its in zip(places, logits, theirs, strict=True):
                probs, missed = partial(self._probs, tokens, row), abs(its.exp().sum().item() - 1)
                found.append(judged(sampling, probs, mixed(program, tokens, sampling), MOVED + missed))
                effect = max(effect, (probs(sampling) - probs(SOFT)).abs().max().item())
            yield self._places_found(name, "llama.cpp", len(places), worst(found), effect)

    def _probs(self, tokens: list[int], row: Tensor, sampling: SamplingParams) -> Tensor:
        """This program's probabilities. num_prompt is 0: llama.cpp's presence and frequency count the prompt, too."""
        return self.ours.distribution(sampling, 0, frozenset()).probs(row[None], tokens)[0]

    def _text(
        self, sampling: SamplingParams, *, speculation: bool, ends: frozenset[int] = frozenset()
    ) -> tuple[list[int], int]:
        return self.ours.write(self.prompt, sampling, max_tokens=self.max_tokens, ends=ends, speculation=speculation)

    def _gap(
        self,
        sampling: SamplingParams,
        ends: frozenset[int],
        ours: list[int],
        theirs: list[int],
        place: int,
        written: Written | None = None,
    ) -> float:
        """The gap between the adjusted logits of the two tokens at `place`, from transformers' logits."""
        if place >= min(len(ours), len(theirs)):
            return float("inf")  # one of them ends
        before = [*self.prompt, *ours[:place]]
        row = self.transformers.logits(before) if written is None else written.logits[place]
        adjusted = self.ours.distribution(sampling, len(self.prompt), ends).adjusted(row[None], before)[0]
        return abs(float(adjusted[ours[place]] - adjusted[theirs[place]]))

    def _text_found(
        self, name: str, program: str, count: int, place: int | None, gap: float | None, *rest: Any
    ) -> Found:
        verdict = EQUAL if gap is None else NEAR_TIE if gap < GAP else DIFFERS
        return Found("texts", name, program, self.task, len(self.prompt), count, verdict, *rest, place, gap)

    def _places_found(
        self, name: str, program: str, count: int, found: tuple[float, str], effect: float | None
    ) -> Found:
        distance, verdict = found
        shared = ("places", name, program, self.task, len(self.prompt), count)
        return Found(*shared, verdict, distance=distance, effect=effect)


def judged(
    sampling: SamplingParams, ours: Callable[[SamplingParams], Tensor], theirs: Tensor, share: float = MOVED
) -> tuple[float, str]:
    """(largest distance, verdict) of two distributions, [V]. ours: a function of the sampling. share: the relative
    amount by which a threshold may be moved."""
    distance = (ours(sampling).double() - theirs).abs().max().item()
    if distance < DISTANCE:
        return distance, EQUAL
    for moved in moved_thresholds(sampling, share):
        if (ours(moved).double() - theirs).abs().max().item() < DISTANCE:
            return distance, NEAR_TIE
    return distance, DIFFERS


def worst(found: list[tuple[float, str]]) -> tuple[float, str]:
    return max(found, key=lambda each: ((EQUAL, NEAR_TIE, DIFFERS).index(each[1]), each[0]))


def repetitions(prompt: list[int], breakers: frozenset[int]) -> list[list[int]]:
    """The prompt with a repeated passage of itself at its end: without a breaker in it or next, with one next, with one
    in it."""
    is_breaker = [token in breakers for token in prompt]

    def ends(inside: int | None, next_: bool) -> list[int]:
        wanted = [back == inside for back in range(REPEATED, 0, -1)] + [next_]
        return [end for end in range(REPEATED, len(prompt)) if is_breaker[end - REPEATED : end + 1] == wanted]

    cases = [found for found in (ends(None, False), ends(None, True), ends(4, False)) if found]
    return [[*prompt, *prompt[found[len(found) // 2] - REPEATED : found[len(found) // 2]]] for found in cases]


def moved_thresholds(sampling: SamplingParams, share: float) -> Iterator[SamplingParams]:
    for name in THRESHOLDS:
        value = getattr(sampling, name)
        for factor in (1 - share, 1 + share):
            if 0.0 < value < 1.0 / factor or name == "top_n_sigma":
                yield replace(sampling, **{name: value * factor})


def mixed(program: LlamaCpp, prompt: list[int], sampling: SamplingParams) -> Tensor:
    """llama.cpp's distribution; for XTC, which applies at random, the mixture of both cases."""
    share = sampling.xtc_probability
    if not share:
        return program.probs(prompt, sampling)
    without, with_ = (program.probs(prompt, replace(sampling, xtc_probability=side)) for side in (0.0, 1.0))
    return (1 - share) * without + share * with_


def names_of(tokenizer: Tokenizer, size: int) -> list[str]:
    names = {token: name for name, token in tokenizer.vocabulary().items()}
    return [names.get(token, f"[unused {token}]") for token in range(size)]


def rows_of(found: list[Found]) -> Iterator[list[str]]:
    """Yield a row for each setting, over all prompts."""
    for what, setting, program in dict.fromkeys((each.what, each.setting, each.program) for each in found):
        group = [each for each in found if (each.what, each.setting, each.program) == (what, setting, program)]
        parted = [
            f"{each.task} at {each.first_difference}, gap {each.gap:.2g}" if each.gap is not None else each.task
            for each in group
            if each.verdict != EQUAL
        ]
        distances = [each.distance for each in group if each.distance is not None]
        verdicts = [sum(each.verdict == verdict for each in group) for verdict in (EQUAL, NEAR_TIE, DIFFERS)]
        compared = f"{sum(each.compared for each in group)} {'tokens' if what == 'texts' else 'places'}"
        effects = [each.effect for each in group if each.effect is not None]
        numbers = [f"{max(each):.1e}" if each else "" for each in (distances, effects)]
        yield [setting, program, what, compared, *map(str, verdicts), *numbers, "; ".join(dict.fromkeys(parted))]


def shown(found: Found) -> str:
    return f"{found.accepted or 0} drafted" if found.distance is None else f"{found.distance:.1e}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="FILE_OR_DIR")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--lengths", default="200,600,1500", help="of three prompts, in tokens")
    parser.add_argument("--peers-env", default="", metavar="DIR", help="as in peers.py; none: without llama.cpp")
    return parser.parse_args()


def main() -> None:
    args, found = arguments(), list[Found]()
    python = wheel_python(args.peers_env)
    with ExitStack() as stack:
        model = args.model
        if is_gguf(model):
            model = Path(stack.enter_context(tempfile.TemporaryDirectory())) / model.stem
            convert(args.model, model, report=lambda *_: None)
        tokenizer = load_tokenizer(model, None)
        lengths = [int(length) for length in args.lengths.split(",")]
        prompts = [texts.prompt(task, tokenizer, length) for task, length in zip(TASKS, lengths, strict=True)]
        options = Options(dtype="fp32", device="cpu")
        plan = plan_request(model, None, options, num_prompt_tokens=max(lengths), max_tokens=args.tokens)
        ours = Ours(stack.enter_context(Engine.load(plan, model, None, tokenizer)))
        others = Transformers(model), None
        if isinstance(python, TriforceError):
            say(f"without llama.cpp: {python}")
        else:
            file = stack.enter_context(model_files())(model, "fp32", names_of(tokenizer, ours.engine.worker.vocab_size))
            size = ours.engine.worker.vocab_size
            llama_cpp = LlamaCpp(python, file, context=max(lengths) + args.tokens, vocab_size=size)
            stack.callback(llama_cpp.close)
            others = others[0], llama_cpp
        for task, prompt in zip(TASKS, prompts, strict=True):
            for each in Bench(ours, *others, task, prompt, args.tokens).run():
                say(f"{task}, {each.what}, {each.setting}, {each.program}: {each.verdict} {shown(each)}")
                found.append(each)
    columns = ["setting", "program", "what", "compared", EQUAL, NEAR_TIE, DIFFERS, "distance", "effect", "where"]
    title = f"{args.model.name}, fp32, prompts of {', '.join(str(len(prompt)) for prompt in prompts)} tokens"
    emit(columns, list(rows_of(found)), about(title, 0), documents(found))
    sys.exit(any(each.verdict == DIFFERS for each in found))


def documents(found: list[Found]) -> list[Document]:
    return [{name: value for name, value in asdict(each).items() if value is not None} for each in found]


if __name__ == "__main__":
    main()
