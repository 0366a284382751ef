"""Whether `--cite` names the passage that answers a question, on documents of offices and on a novel.

Questions about ten documents (office_files.py) and about sentences planted in a novel are asked greedily. For each rule
that ranks passages it is counted how often the passage with the answer comes first, and how often among three. It
counts as cited where at least half of its marked words are in the citation. The rule was chosen by the first, third ...
question of each document; the others are the second half.

usage: python benchmarks/citations.py --model DIR [--documents NAME ...] [--novel CHARACTERS ...] [--questions N]
"""

from __future__ import annotations

import offload  # noqa: F401  # isort: skip  # before torch, which reads its threads' wait policy once

import argparse
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from office_files import PROGRAMS, Question, source, write
from report import about, emit, say
from texts import NOVEL
from torch import Tensor

from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine, load_tokenizer, plan_request
from offload.engine.passages import BESIDE, Attended, Masses, Passage, ranked
from offload.engine.request import GenerationRequest
from offload.plan.options import Options
from offload.text.tokenizer import Tokenizer
from triforce_cli.answering import bm25
from triforce_cli.answering.citations import ASKED, SHOWN, Citation, citations, located
from triforce_cli.documents import Document
from triforce_cli.documents.reading import read_documents
from triforce_cli.documents.selection import Named
from triforce_cli.prompts.conversation import Conversation
from triforce_cli.prompts.formats import ChatFormat

MAX_TOKENS = 96
_DATE = "28 Nov 2026"


class Recording(Engine):
    """An engine that hands over the masses of the latest request."""

    latest: Attended

    def _attended(self, num_prompt: int) -> Attended:
        self.latest = super()._attended(num_prompt)
        return self.latest


@dataclass(frozen=True)
class Asked:
    """An answered question. attended, masses: the attention of its rows. tokens: of the prompt."""

    document: Document
    question: Question
    tokens: Sequence[int]
    tokenizer: Tokenizer
    attended: Attended
    masses: Masses
    answer: str

    @cached_property
    def windows(self) -> list[Citation | None]:
        """The citation of the passage around each chunk; None outside the document."""
        chunk, last = self.attended.chunk, len(self.masses.text)
        spans = [(max(best - BESIDE, 0), min(best + BESIDE + 1, last)) for best in range(last)]
        passages = [Passage(start * chunk, stop * chunk, (1.0,) * (stop - start)) for start, stop in spans]
        return located(passages, self.tokens, [self.document], self.tokenizer)

    def by(self, scores: Tensor) -> list[Citation]:
        """The citations in the order of scores [C]."""
        passages = ranked(scores, torch.ones_like(scores), ASKED, chunk=self.attended.chunk, above=float("-inf"))
        found = located(passages, self.tokens, [self.document], self.tokenizer)
        return [each for each in found if each is not None]

    def by_words(self, query: str) -> list[Citation]:
        scores = bm25.scores(query, ["" if each is None else each.text for each in self.windows])
        return self.by(torch.tensor(scores))

    def cited(self, passages: Sequence[Passage], answer: str = "") -> list[Citation]:
        """The citations, in the order of their shares unless there is an answer whose words count, too."""
        return citations(passages, self.tokens, [self.document], self.tokenizer, answer)

    def is_cited(self, citation: Citation) -> bool:
        """Whether a citation has at least half of the characters of the passage with the answer."""
        pattern = r"\s+".join(map(re.escape, self.question.passage.split()))
        [wanted] = re.finditer(pattern, self.document.text)
        start = self.document.text.index(citation.text)
        shared = min(wanted.end(), start + len(citation.text)) - max(wanted.start(), start)
        return 2 * shared >= wanted.end() - wanted.start()

    @property
    def is_right(self) -> bool:
        """Whether the answer has at least half of the numbers and longer words of the passage that the question does
        not have: most likely it is right."""
        telling = {word for word in bm25.words(self.question.passage) if len(word) > 3 or word.isdigit()}
        telling -= set(bm25.words(self.question.text))
        return 2 * len(telling & set(bm25.words(self.answer))) >= len(telling) > 0

    def judged(self, found: Sequence[Citation]) -> tuple[float, float]:
        """(1 if the passage is cited first, 1 if it is among SHOWN), else 0."""
        cited = [self.is_cited(citation) for citation in found[:SHOWN]]
        return float(cited[:1] == [True]), float(any(cited))

    def at_random(self) -> tuple[float, float]:
        """The same of passages drawn at random from the document's, as chances."""
        found = [each for each in self.windows if each is not None]
        chance = sum(map(self.is_cited, found)) / len(found)
        return chance, 1 - (1 - chance) ** SHOWN


def without_sink(mass: Tensor) -> Tensor:
    return torch.cat([torch.full((1,), float("-inf")), mass[1:]])


def base(asked: Asked) -> Tensor:
    assert asked.masses.base is not None
    return asked.masses.base


RULES: dict[str, Callable[[Asked], list[Citation]]] = {
    "mass, sink left in": lambda asked: asked.by(asked.masses.text),
    "mass without the first chunk": lambda asked: asked.by(without_sink(asked.masses.text)),
    "mass less the baseline": lambda asked: asked.by(asked.masses.text - base(asked)),
    "share": lambda asked: asked.cited(asked.attended.passages(ASKED)),
    "words of the answer": lambda asked: asked.by_words(asked.answer),
    "words of question and answer": lambda asked: asked.by_words(f"{asked.question.text} {asked.answer}"),
    "share and words of the answer": lambda asked: asked.cited(asked.attended.passages(ASKED), asked.answer),
}


def novel(num_characters: int) -> Document:
    """A part of the novel with the planted sentences as paragraphs, at equal distances."""
    text = NOVEL.read_text(encoding="utf-8")
    start = text.index("\n\n", 5000) + 2
    paragraphs, lines = text[start : start + num_characters].split("\n\n"), source("planted")[0]
    for number, line in reversed(list(enumerate(lines))):
        paragraphs.insert((2 * number + 1) * len(paragraphs) // (2 * len(lines)), line.text)
    return Document("novel.txt", "\n\n".join(paragraphs))


def silent(*_: object, **__: object) -> None:
    """Say nothing of a document that is read."""


def office(name: str) -> Document:
    with tempfile.TemporaryDirectory() as folder:
        named = Named((write(name, Path(folder)),))
        [reading] = read_documents(named, "the document", note=silent, on_read=silent)
    return reading.document


def sets(args: argparse.Namespace) -> Iterator[tuple[str, Document, list[Question]]]:
    """(name, document, its questions)."""
    for name in args.documents:
        yield name, office(name), source(name)[1][: args.questions]
    for length in args.novel:
        yield f"novel {length}", novel(length), source("planted")[1][: args.questions]


def runs(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What each rule cites for each question: whether the passage is first, and among three."""
    tokenizer, documents = load_tokenizer(args.model, None), list(sets(args))
    chat = ChatFormat(tokenizer)
    prompts = [
        [chat.prompt(Conversation(date=_DATE).with_document(document).asked(each.text)).tokens for each in questions]
        for _, document, questions in documents
    ]
    plan = plan_request(
        args.model,
        None,
        Options(device="cpu", masses=True, speculation=False),
        num_prompt_tokens=max(len(prompt) for some in prompts for prompt in some),
        max_tokens=MAX_TOKENS,
    )
    with Recording.load(plan, args.model, None, tokenizer) as engine:
        assert isinstance(engine, Recording)
        for (name, document, questions), some in zip(documents, prompts, strict=True):
            for number, (question, prompt) in enumerate(zip(questions, some, strict=True)):
                start = time.perf_counter()
                sampling = SamplingParams(temperature=0.0)
                request = GenerationRequest(prompt, sampling, max_tokens=MAX_TOKENS, passages=ASKED, reuse=True)
                answer = "".join(step.text for step in engine.generate(request))
                masses = engine.latest.masses()
                assert masses is not None
                asked = Asked(document, question, prompt, tokenizer, engine.latest, masses, answer)
                say(f"{name} {number + 1}, {time.perf_counter() - start:.1f} s: {question.text} {answer!r}")
                yield {
                    "document": name,
                    "tokens": len(prompt),
                    "question": question.text,
                    "answer": answer,
                    "half": number % 2 + 1,
                    "right": asked.is_right,
                    "cited": {rule: asked.judged(find(asked)) for rule, find in RULES.items()},
                    "at random": asked.at_random(),
                }


GROUPS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "half 1": lambda run: not is_novel(run) and run["half"] == 1,
    "half 2": lambda run: not is_novel(run) and run["half"] == 2,
    "half 2, right": lambda run: not is_novel(run) and run["half"] == 2 and run["right"],
    "novel": lambda run: is_novel(run),
}


def is_novel(run: dict[str, Any]) -> bool:
    return bool(run["document"].startswith("novel"))


def rows(found: Sequence[dict[str, Any]]) -> list[list[str]]:
    """How many questions each group has, and for each rule the shares of them whose passage is first and in three."""
    groups = [[run for run in found if is_in(run)] for is_in in GROUPS.values()]

    def row(rule: str, pairs: Sequence[Sequence[tuple[float, float]]]) -> list[str]:
        return [rule, *(f"{mean(some):.2f}" if some else "-" for each in pairs for some in _apart(each))]

    counts = [cell for group in groups for cell in (str(len(group)), "")]
    random = row("at random", [[run["at random"] for run in group] for group in groups])
    by_rule = [row(rule, [[run["cited"][rule] for run in group] for group in groups]) for rule in RULES]
    return [["questions", *counts], random, *by_rule]


def _apart(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [first for first, _ in pairs], [three for _, three in pairs]


def short(run: dict[str, Any]) -> dict[str, Any]:
    """The run without its answer, with the rules that are right by their numbers."""
    right = [[i for i, rule in enumerate(RULES) if run["cited"][rule][place]] for place in (0, 1)]
    return {name: run[name] for name in run if name not in ("answer", "cited")} | {"first": right[0], "three": right[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--documents", nargs="*", default=list(PROGRAMS), choices=list(PROGRAMS), metavar="NAME")
    parser.add_argument("--novel", nargs="*", type=int, default=[28000], metavar="CHARACTERS")
    parser.add_argument("--questions", type=int, help="of each document; all if not given")
    args = parser.parse_args()
    found = list(runs(args))
    columns = ["rule", *(cell for group in GROUPS for cell in (f"{group}: first", "in three"))]
    shared = about("citations", 0, model=args.model.name, rules=list(RULES))
    emit(columns, rows(found), shared, map(short, found))


if __name__ == "__main__":
    main()
