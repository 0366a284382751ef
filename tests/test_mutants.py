"""The enumeration has teeth: each known way of getting speculation wrong, applied to the real source, fails a check.

A mutant is a replacement in a module's text, run as a fresh module; the rest of the stack is loaded over it. It must
die of a wrong distribution or of a broken protocol (what a cache holds, what a draw is from), not of its own exception.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal
from unittest.mock import patch

import pytest

from kit.enumeration import REAL, BookkeepingError, Decode
from test_exact_control import CHECKS as CONTROLLED
from test_exact_control import ROUNDED
from test_exactness import CHECKS as PLAIN
from test_exactness import EXACT

MODULES = (
    "warp",
    "random_source",
    "verify",
    "proposal",
    "gpu_draws",
    "lookup",
    "grammar_text",
    "grammar_proposer",
    "penalties",
    "distribution",
    "speculation",
    "generation",
)  # in the order of imports
CHECKS = PLAIN | CONTROLLED
WRONG = 1e-3  # far above rounding, far below the error of any mutant here


@dataclass(frozen=True)
class Edit:
    module: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """`fails` names the check of test_exactness that it must not pass."""

    description: str
    fails: str
    edits: Sequence[Edit]
    breaks: Literal["distribution", "protocol"] = "distribution"


def load(edits: Sequence[Edit]) -> Decode:
    """The decode modules from their source, edited; each edit must match exactly once."""
    loaded: dict[str, ModuleType] = {}
    with patch.dict(sys.modules):
        for name in MODULES:
            real = getattr(REAL, name)
            source = Path(real.__file__).read_text()
            for edit in [edit for edit in edits if edit.module == name]:
                assert source.count(edit.old) == 1, f"{name} has {source.count(edit.old)} times {edit.old!r}"
                source = source.replace(edit.old, edit.new)
            sys.modules[real.__name__] = loaded[name] = ModuleType(real.__name__)
            exec(compile(source, f"<edited {name}>", "exec"), loaded[name].__dict__)
    assert {edit.module for edit in edits} <= set(MODULES)
    return Decode.of(loaded)


def in_verify(old: str, new: str) -> list[Edit]:
    return [Edit("verify", old, new)]


def in_on_gpu(old: str, new: str) -> list[Edit]:
    return [Edit("gpu_draws", old, new)]


def in_speculation(old: str, new: str) -> list[Edit]:
    return [Edit("speculation", old, new)]


VERDICT = "verdict = verify(drafted, draft_probs, probs, self._random)\n"
RESIDUAL = "residual(target_probs[i], draft_probs[i], drafted[i])"
OWN_PROBS = "Round(emitted, probs, grades"
DRAFTS_PROBS = "torch.cat([*(each.probs for each in proposals), probs[-1:]])[: len(emitted)]"
COMMIT = "self._commit(len(sequence) + verdict.num_accepted, names, verdict)"
DRAFT_ROW = "return Proposal([token], row, grades"
OVER_SPECULATOR = "any(isinstance(proposer, Speculator) for proposer in self._proposers)"
DRAFTED = "            so_far.tail += proposal.tokens\n            proposals.append(proposal)\n"
REDRAW = (  # as the published code does: after a rejection, the distribution itself instead of the residual
    "        if {level} and verdict.num_accepted < len(drafted):\n"
    "            n = verdict.num_accepted\n"
    "            verdict = Verdict(n, self._random.draw(probs[n]))\n"
)
AT_MIDDLE = VERDICT + REDRAW.format(level=f"not {OVER_SPECULATOR}")
AT_TARGET = VERDICT + REDRAW.format(level=OVER_SPECULATOR)
SOFT = "if params.greedy: return logits.softmax(-1)\n    if False:"

ONE, TWO = "emits: one level, V 3, gamma 2", "emits: two levels, V 3, gamma 2, draft_gamma 1"
WARPED, TWO_WARPED = "emits: one level, warped", "emits: two levels, warped"
GREEDY = "emits: one level, greedy, V 3"
SEEDED = "emits: seeded source"
LOOKUPS_ON_GPU, MIXED_ON_GPU = "emits: on a GPU, lookups", "emits: on a GPU, lookups among drafted tokens"
ON_GPU, TWO_ON_GPU = "emits: on a GPU, gamma 1", "emits: on a GPU, gamma 2"
MIDDLE, DRAFT = "proposes: retrieval, 3 tokens, draft_gamma 2", "proposes: draft, warped"
CONFIDENT = "emits: one level, length by the distribution"
LOOKUPS, MIXED = "emits: lookups", "emits: lookups among drafted tokens"
MIDDLE_LOOKUPS = "proposes: retrieval, lookups"
TEXT = "generates: one level, ends at token 2, 1 pending"

MUTANTS = [
    Mutant(
        "the published bug at the middle level: after a rejection the distribution itself, not the residual",
        TWO,
        in_speculation(VERDICT, AT_MIDDLE),
    ),
    Mutant(
        "the same, seen in what the middle level hands up",
        MIDDLE,
        in_speculation(VERDICT, AT_MIDDLE),
    ),
    Mutant(
        "the published bug at the target only",
        TWO,
        in_speculation(VERDICT, AT_TARGET),
    ),
    Mutant(
        "the published bug with one level",
        ONE,
        in_verify(RESIDUAL, "target_probs[i]"),
    ),
    Mutant("everything is accepted", ONE, in_verify("if not random.accepts(ratio):", "if False:")),
    Mutant("nothing is accepted, as if all were rejected", ONE, in_verify("random.accepts(ratio)", "False")),
    Mutant(
        "acceptance by the target's probability alone",
        ONE,
        in_verify("(target.double() / draft)", "target.double()"),
    ),
    Mutant(
        "target and draft swapped in the ratio",
        ONE,
        in_verify("(target.double() / draft)", "(draft / target.double())"),
    ),
    Mutant(
        "target and draft swapped in the residual",
        ONE,
        in_verify("(target_probs - draft_probs).clamp_", "(draft_probs - target_probs).clamp_"),
    ),
    Mutant(
        "the residual by absolute difference",
        ONE,
        in_verify("(target_probs - draft_probs).clamp_(min=0.0)", "(target_probs - draft_probs).abs()"),
    ),
    Mutant(
        "the residual of the place before",
        ONE,
        in_verify(RESIDUAL, RESIDUAL.replace("draft_probs[i]", "draft_probs[max(i - 1, 0)]")),
    ),
    Mutant(
        "the residual not normalised",
        ONE,
        in_verify("return rest / total if total > 0 else target_probs", "return rest if total > 0 else target_probs"),
        breaks="protocol",
    ),
    Mutant(
        "the residual warped twice",
        WARPED,
        in_verify(
            "return rest / total if total > 0 else target_probs",
            "return rest.square() / rest.square().sum() if total > 0 else target_probs",
        ),
    ),
    Mutant(
        "the draft hands up its unwarped distribution",
        DRAFT,
        in_speculation(DRAFT_ROW, DRAFT_ROW.replace("], row", "], logits")),
    ),
    Mutant(
        "the same, seen in the text",
        WARPED,
        in_speculation(DRAFT_ROW, DRAFT_ROW.replace("], row", "], logits")),
    ),
    Mutant(
        "the draft hands up its distribution warped twice",
        WARPED,
        in_speculation(DRAFT_ROW, DRAFT_ROW.replace("], row", "], self._warp(row)")),
    ),
    Mutant(
        "the target verifies by its unwarped distribution",
        WARPED,
        in_speculation(
            "probs = self._warp(logits)",
            "probs = logits",
        ),
    ),
    *(
        Mutant(
            f"the retrieval level hands up the draft's distribution instead of its own{where}",
            check,
            in_speculation(OWN_PROBS, OWN_PROBS.replace("probs", DRAFTS_PROBS)),
        )
        for where, check in [("", TWO), (", seen in what it hands up", MIDDLE)]
    ),
    Mutant(
        "the retrieval level hands up the residual for a correction",
        TWO,
        in_speculation(
            OWN_PROBS,
            "Round(emitted, torch.cat([probs[: len(emitted) - 1], "
            "(probs[len(emitted) - 1] - torch.cat([each.probs for each in proposals])[len(emitted) - 1])"
            ".clamp(min=0)[None] "
            "if len(emitted) <= len(drafted) else probs[-1:]]), grades",
        ),
    ),
    Mutant(
        "the uniform that decided is used again for the draw that follows",
        SEEDED,
        [
            Edit(
                "random_source",
                "return self._uniform() < probability",
                "self._last = self._uniform(); return self._last < probability",
            ),
            Edit(
                "random_source",
                "torch.searchsorted(mass, self._uniform() * total, right=True)",
                "torch.searchsorted(mass, self.__dict__.pop('_last', self._uniform()) * total, right=True)",
            ),
        ],
    ),
    Mutant(
        "the uniform that drew a token decides on it too",
        SEEDED,
        [
            Edit("random_source", "return self._uniform() < probability", "return self._last < probability"),
            Edit(
                "random_source",
                "index = int(torch.searchsorted(mass, self._uniform() * total, right=True))",
                "self._last = self._uniform(); index = int(torch.searchsorted(mass, self._last * total, right=True))",
            ),
        ],
    ),
    Mutant(
        "a token of probability zero is accepted at a uniform of 0",
        SEEDED,
        [Edit("random_source", "return self._uniform() < probability", "return self._uniform() <= probability")],
    ),
    Mutant(
        "a draw at a threshold takes the token before it",
        SEEDED,
        [Edit("random_source", "self._uniform() * total, right=True", "self._uniform() * total, right=False")],
    ),
    *(
        Mutant(f"on a GPU: {description}", check, in_on_gpu(old, new))
        for description, check, old, new in [
            ("after a rejection the distribution itself", ON_GPU, "(accepted < n) & (total > 0)", "(accepted < 0)"),
            ("the residual after full acceptance too", ON_GPU, "(accepted < n) & (total > 0)", "total > 0"),
            ("target and draft swapped in the residual", ON_GPU, "(target - draft[0])", "(draft[0] - target)"),
            ("acceptance by the target's probability alone", ON_GPU, " / draft_probs.gather(-1, tokens).double()", ""),
            ("lookups are kept always", LOOKUPS_ON_GPU, "(decided <", "(decided * len(draft_probs) <"),
            ("a lookup's residual keeps it", LOOKUPS_ON_GPU, "_point_masses(drafted", "0 * _point_masses(drafted"),
            ("the point mass of the first lookup", LOOKUPS_ON_GPU, "drafted.index_select(0, at)", "drafted[:1]"),
            ("lookups are other tokens' point masses", MIXED_ON_GPU, "masses(at, like)", "masses((at + 1) % 3, like)"),

            ("a token after a rejected one is kept", TWO_ON_GPU, ".cumprod(0).sum(0", ".sum(0"),
            ("the uniform that decided draws too", ON_GPU, "index_select(0, n)", "index_select(0, 0 * n)"),
            ("a uniform equal to the ratio accepts", ON_GPU, "(decided < ratios", "(decided <= ratios"),
            ("a draw at a threshold takes the token before", ON_GPU, "right=True", "right=False"),
            ("the residual of the place before", TWO_ON_GPU, ".clamp(max=len(drafted) - 1)", ".sub(1).clamp(min=0)"),
        ]
    ),
    Mutant(
        "on a GPU: all drafted tokens are drawn by one uniform",
        TWO_ON_GPU,
        in_speculation("tokens, 1, draw, (uniform,))", "tokens, 1, draw, (uniforms[:1],))"),
    ),
    Mutant(
        "the bonus from the last drafted token's row",
        ONE,
        in_verify("random.draw(target_probs[n])", "random.draw(target_probs[n - 1])"),
    ),
    Mutant(
        "one token too few forgotten: the cache keeps a rejected one",
        ONE,
        in_speculation(COMMIT, COMMIT.replace("accepted,", "accepted + 1,")),
        breaks="protocol",
    ),
    Mutant(
        "one token too many forgotten: a kept one is computed again",
        ONE,
        in_speculation(COMMIT, COMMIT.replace("accepted,", "accepted - 1,")),
        breaks="protocol",
    ),
    Mutant(
        "the proposer is not told of a rejection",
        TWO,
        in_speculation("proposer.truncate(length)", "pass"),
        breaks="protocol",
    ),
    Mutant(
        "the proposer forgets all at every rejection",
        ONE,
        in_speculation("proposer.truncate(length)", "proposer.truncate(0)"),
        breaks="protocol",
    ),
    Mutant(
        "the level keeps what was rejected",
        ONE,
        in_speculation(
            "        self._level.truncate(length)\n        for proposer", "        for proposer"
        ),
        breaks="protocol",
    ),
    Mutant(
        "the target is not shown what is pending before the draft",
        ONE,
        in_speculation(
            "return Pass(self._level, pending + drafted, len(drafted) + 1)\n",
            "return Pass(self._level, pending[:-1] + drafted, len(drafted) + 1)\n",
        ),
        breaks="protocol",
    ),
    Mutant(
        "a drawn token is thrown away for what it is: unlikely ones are not verified",
        ONE,
        in_speculation(
            DRAFTED,
            "            if proposal.probs[-1, proposal.tokens[-1]] < 0.4: break\n" + DRAFTED,
        ),
    ),
    Mutant(
        "a drawn token is thrown away for its grade: by the distribution that it was drawn from, but after the draw",
        CONFIDENT,
        in_speculation(
            DRAFTED,
            "            if so_far[-1] == 2 and proposal.tokens[-1] == 0: break\n" + DRAFTED,
        ),
    ),
    Mutant(
        "the middle level drops a bonus that it finds unlikely",
        TWO,
        in_speculation(
            "return Proposal(step.tokens, step.probs, step.grades, step.seconds)",
            "n = len(step.tokens)\n"
            "        n -= n > 1 and bool(step.probs[-1, step.tokens[-1]] < 0.4)\n"
            "        return Proposal(step.tokens[:n], step.probs[:n], step.grades[:n], step.seconds)",
        ),
        breaks="protocol",
    ),
    *(
        Mutant(f"{description}{where}", check, in_verify(old, new))
        for description, old, new in [
            ("lookups are kept always", "random.accepts(ratio)", "(draft_probs[i] is None or random.accepts(ratio))"),
            ("the residual of a lookup keeps it", "rest[token] = 0.0", "pass"),
            ("the residual of a lookup is without another token", "rest[token] = 0.0", "rest[token - 1] = 0.0"),
            ("a lookup is taken for a token that was drawn with a half", "1.0 if row is None", "0.5 if row is None"),
        ]
        for where, check in [("", LOOKUPS), (" among drafted tokens", MIXED), (" at the middle level", MIDDLE_LOOKUPS)]
    ),
    Mutant(
        "greedy decided by soft probabilities, at all levels",
        GREEDY,
        [Edit("warp", "if params.greedy:", SOFT)],
    ),
    Mutant(
        "greedy drafts verified by the soft distribution of the target",
        GREEDY,
        in_speculation(
            "probs = self._warp(logits)",
            "probs = logits.softmax(-1)",
        ),
    ),
    Mutant(
        "an end token is looked for at the end of a run only",
        TEXT,
        [
            Edit(
                "generation",
                "for i, token in enumerate(tokens) if token in end_tokens)",
                "for i, token in enumerate(tokens) if token in end_tokens and i + 1 == len(tokens))",
            )
        ],
    ),
    Mutant(
        "what was accepted after an end token is kept",
        TEXT,
        [Edit("generation", "tokens = tokens[:ended]", "pass")],
    ),
    Mutant(
        "generation goes on after an end token",
        TEXT,
        [Edit("generation", "        if ended:\n            return\n", "")],
        breaks="protocol",
    ),
    Mutant(
        "the last round drafts past max_tokens",
        TEXT,
        [Edit("generation", "1 if first else remaining", "1 if first else 99")],
        breaks="protocol",
    ),
    *(
        Mutant(description, f"controlled: {check}", [Edit(module, old, new)])
        for description, check, module, old, new in [
            (
                "what was rejected stays in the text that penalties see",
                "two levels, occurrences",
                "distribution",
                "self._num_held = len(root)",
                "self._num_held = len(tokens)",
            ),
            (
                "a constraint is not rolled back",
                "two levels, a rule",
                "grammar_text",
                "if common < len(self._taken):",
                "if False:",
            ),
            (
                "the draft hands up its distribution without penalties",
                "one level, repetition",
                "speculation",
                DRAFT_ROW,
                "return Proposal([token], self._warp(asked.made[0]), grades",
            ),
            (
                "the draft hands up its distribution without the constraint",
                "one level, a rule",
                "speculation",
                DRAFT_ROW,
                "return Proposal([token], self._warp(asked.made[0]), grades",
            ),
            (
                "penalties after top-p",
                "top-p after penalties",
                "speculation",
                "logits = _adjusted(asked, self._adjust, tokens)",
                "logits = self._adjust(self._warp(asked.made[0]).log(), tokens)",
            ),
            (
                "drafted tokens do not count",
                "one level, occurrences",
                "penalties",
                "rows[row, text.tokens[place - 1]] += 1",
                "pass",
            ),
            (
                "a window that is one too short",
                "one level, occurrences in a window",
                "penalties",
                "max(start, place - window)",
                "max(start, place - window + 1)",
            ),
            (
                "what leaves a window goes on counting",
                "two levels, repetition in a window",
                "penalties",
                "rows[row, text.tokens[oldest(place - 1) : oldest(place)]] -= 1",
                "pass",
            ),
            (
                "the prompt counts as if it were generated",
                "one level, occurrences",
                "penalties",
                "_counts(text, text.num_prompt, first",
                "_counts(text, 0, first",
            ),
            (
                "runs that are one token shorter are forbidden",
                "one level, no triple twice",
                "penalties",
                "range(1, self.size)",
                "range(1, self.size - 1)",
            ),
            ("breakers break nothing", "one level, DRY", "penalties", "if ends)", "if False)"),
            (
                "a repetition begins with the window",
                "two levels, DRY in a window",
                "penalties",
                "max(place - self.window, 0) if self.window else 0",
                "0",
            ),
            (
                "the text may end a token too early",
                "two levels, end tokens wait",
                "penalties",
                "text.num_prompt + self.least",
                "text.num_prompt + self.least - 1",
            ),
            ("XTC always", "one level, XTC", "warp", "torch.lerp(probs, rest, probability)", "rest"),
            (
                "XTC leaves out what is just likely enough",
                "two levels, XTC",
                "warp",
                "torch.where(likely, probs, torch.inf).amin",
                "torch.where(likely, probs, 0.0).amax",
            ),
            (
                "biases are forgotten beside penalties",
                "biases and repetition",
                "distribution",
                "if self._biases is not None:",
                "if False:",
            ),
        ]
    ),
]  # fmt: skip


FIRST = {(mutant.edits[0].module, mutant.fails): mutant for mutant in reversed(MUTANTS)}  # tried by default


@pytest.mark.few(8)
@pytest.mark.parametrize(
    "mutant",
    [pytest.param(mutant, marks=[] if mutant in FIRST.values() else [pytest.mark.deep]) for mutant in MUTANTS],
    ids=lambda mutant: mutant.description,
)
def test_a_mutant_dies(mutant: Mutant) -> None:
    decode = load(mutant.edits)
    if mutant.breaks == "protocol":
        with pytest.raises(BookkeepingError):
            CHECKS[mutant.fails](decode=decode)
    else:
        assert CHECKS[mutant.fails](decode=decode) > WRONG


UNEDITED = {ONE, TWO, GREEDY, SEEDED, ON_GPU, MIXED_ON_GPU, DRAFT, MIDDLE_LOOKUPS, TEXT}
UNEDITED |= {f"controlled: {check}" for check in ("one level, repetition", "two levels, a rule", "one level, DRY")}


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=[] if check in UNEDITED else [pytest.mark.deep])
        for check in sorted({mutant.fails for mutant in MUTANTS})
    ],
)
def test_the_unedited_source_loaded_in_the_same_way_passes(check: str) -> None:
    """Else a mutant might die of how it was loaded. By default a check of each kind."""
    decode = load([])
    assert decode.verify.verify is not REAL.verify.verify
    assert decode.speculation.verify is decode.verify.verify
    assert CHECKS[check](decode=decode) < (ROUNDED if check in CONTROLLED else EXACT)


def test_an_edit_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(AssertionError, match="verify has 0 times"):
        load([Edit("verify", "no such line", "")])
