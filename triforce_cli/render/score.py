"""Results of `triforce score` as text and as JSON objects. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triforce_cli import __version__
from triforce_cli.ground.text import line_text, significant

if TYPE_CHECKING:
    from offload.engine.scores import Scores
    from offload.plan.planner import Plan
    from triforce_cli.documents.texts import Text

TOTAL = "total"
NAME_WIDTH = 20  # least columns of a name

Piece = Callable[[int], str]  # a token as text
Row = tuple[str, ...]


@dataclass(frozen=True)
class Judged:
    """A model's scores of each text. model: its name as the user typed it. plan: of its run."""

    model: str
    scores: tuple[Scores, ...]
    plan: Plan


def report(texts: Sequence[Text], judged: Sequence[Judged], piece: Piece, *, worst: int, width: int) -> str:
    """The report; the first model is the reference of the others. No line except those of the worst tokens exceeds
    `width` columns, if that is at least 80."""
    blocks = [_likelihoods(texts, judged[0], width)]
    if len(judged) > 1:
        blocks.append(_models(judged, width))
    if worst:
        blocks.append("".join(f"{line}\n" for line in _worst(texts, judged[0], piece, worst)))
    return "\n".join(blocks)


def document(
    texts: Sequence[Text], judged: Sequence[Judged], piece: Piece, *, worst: int, tokens: bool
) -> dict[str, Any]:
    """All texts, and their total, as JSON. tokens: include the log-probability of each token."""
    return {
        "files": lines(texts, judged, piece, worst=worst, tokens=tokens),
        TOTAL: {
            "num_tokens": sum(len(text.tokens) for text in texts),
            **_likelihood(judged[0].scores),
            "against": [_against(judged[0].scores, other.scores, other.model) for other in judged[1:]],
        },
        "model": judged[0].model,
        "plan": judged[0].plan.as_dict(),
        "version": __version__,
    }


def lines(
    texts: Sequence[Text], judged: Sequence[Judged], piece: Piece, *, worst: int, tokens: bool
) -> list[dict[str, Any]]:
    """Each text as a JSON object."""
    own, others = judged[0], judged[1:]
    return [
        line(
            text,
            own.scores[number],
            {other.model: other.scores[number] for other in others},
            piece,
            worst=worst,
            tokens=tokens,
        )
        for number, text in enumerate(texts)
    ]


def line(
    text: Text, own: Scores, others: Mapping[str, Scores], piece: Piece, *, worst: int, tokens: bool
) -> dict[str, Any]:
    """A text as a JSON object, in nats; null is a number that no float holds, or belongs to a token that is not scored.
    others: by the model's name."""
    found: dict[str, Any] = {
        "file": text.name,
        "num_tokens": len(text.tokens),
        **_likelihood([own]),
        "worst": [_token(text, own, place, piece) for place in _least_likely(own, worst)],
    }
    if tokens:
        found |= {"tokens": list(text.tokens), "log_probabilities": [None, *own.log_probabilities.tolist()]}
    return found | {"against": [_text_against(own, scores, name, tokens=tokens) for name, scores in others.items()]}


def _text_against(own: Scores, scores: Scores, model: str, *, tokens: bool) -> dict[str, Any]:
    found = _against([own], [scores], model)
    if tokens and scores.divergences is not None:
        found["log_probabilities"] = [None, *scores.log_probabilities.tolist()]
        found["divergences"] = [None, *scores.divergences.tolist()]
    return found


def _likelihood(scores: Sequence[Scores]) -> dict[str, Any]:
    from offload.engine.scores import Likelihood

    found = Likelihood.of(scores)
    perplexity = found.perplexity if math.isfinite(found.perplexity) else None
    return {"num_scored": found.num_scored, "mean_log_likelihood": found.mean, "perplexity": perplexity}


def _against(reference: Sequence[Scores], scores: Sequence[Scores], model: str) -> dict[str, Any]:
    from offload.engine.scores import Distance

    found = Distance.of(reference, scores)
    return {
        "model": model,
        **_likelihood(scores),
        "mean_kl": found.mean,
        "kl_percentile_99": found.percentile_99,
        "largest_kl": found.largest,
        "same_likeliest": found.same_likeliest,
    }


def _least_likely(scores: Scores, count: int) -> list[int]:
    """The places of the `count` least likely tokens, the least likely first; of equal ones, the earlier first."""
    return [int(place) for place in scores.log_probabilities.argsort(stable=True)[:count]]


def _token(text: Text, scores: Scores, place: int, piece: Piece) -> dict[str, Any]:
    """The token after `place` as a JSON object."""
    token, likeliest, (row, column) = text.tokens[place + 1], int(scores.likeliest[place]), text.position(place + 1)
    return {
        "index": place + 1,
        "line": row,
        "column": column,
        "token": token,
        "text": piece(token),
        "log_probability": float(scores.log_probabilities[place]),
        "likeliest": likeliest,
        "likeliest_text": piece(likeliest),
        "likeliest_log_probability": float(scores.likeliest_log_probabilities[place]),
    }


def _likelihoods(texts: Sequence[Text], judged: Judged, width: int) -> str:
    rows: list[Row] = [("text", "tokens", "scored", "nats/token", "perplexity")]
    for text, scores in zip(texts, judged.scores, strict=True):
        rows.append((line_text(text.name), f"{len(text.tokens):,}", *_numbers(_likelihood([scores]))))
    if len(texts) > 1:
        rows.append((TOTAL, f"{sum(len(text.tokens) for text in texts):,}", *_numbers(_likelihood(judged.scores))))
    return _table(rows, width)


def _numbers(found: dict[str, Any]) -> Row:
    return f"{found['num_scored']:,}", f"{found['mean_log_likelihood']:.4f}", significant(found["perplexity"])


def _models(judged: Sequence[Judged], width: int) -> str:
    """The totals over all texts, by model."""
    rows: list[Row] = [("model", "nats/token", "perplexity", "mean KL", "99%", "largest", "same token")]
    rows.append((judged[0].model, *_numbers(_likelihood(judged[0].scores))[1:], *["-"] * 4))
    for other in judged[1:]:
        found = _against(judged[0].scores, other.scores, other.model)
        kl = [f"{found[name]:.3g}" for name in ("mean_kl", "kl_percentile_99", "largest_kl")]
        rows.append((other.model, *_numbers(found)[1:], *kl, f"{found['same_likeliest']:.2%}"))
    return _table(rows, width)


def _worst(texts: Sequence[Text], judged: Judged, piece: Piece, count: int) -> Iterator[str]:
    """Yield a line for each of the worst tokens, with its place as compilers write it."""
    yield "least likely tokens: log-probability; the likeliest there, and its own"
    for text, scores in zip(texts, judged.scores, strict=True):
        for place in _least_likely(scores, count):
            found = _token(text, scores, place, piece)
            likeliest = f"{found['likeliest_text']!r} {found['likeliest_log_probability']:.2f}"
            where = f"{line_text(text.name)}:{found['line']}:{found['column']}: token {found['index']:,}"
            yield f"{where} {found['text']!r} {found['log_probability']:.2f}; {likeliest}"


def _table(rows: Sequence[Row], width: int) -> str:
    """A table with its first column aligned left, cut at the left to `width`, and the others aligned right."""
    columns = [max(len(row[column]) for row in rows) for column in range(1, len(rows[0]))]
    room = max(width - sum(columns) - 2 * len(columns), NAME_WIDTH)
    names = [row[0] if len(row[0]) <= room else f"...{row[0][3 - room :]}" for row in rows]
    longest = max(map(len, names))
    lines = [
        "  ".join([name.ljust(longest), *(cell.rjust(n) for cell, n in zip(row[1:], columns, strict=True))])
        for name, row in zip(names, rows, strict=True)
    ]
    return "".join(f"{line}\n" for line in lines)
