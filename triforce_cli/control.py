"""Options that control what is written: penalties, other samplers, biases, and what the text has to be."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from offload.decode.constraint import Constraint
from offload.decode.sampling import BREAKERS, SamplingParams
from offload.errors import UsageError
from triforce_cli import options
from triforce_cli.flags import SamplingFlags
from triforce_cli.options import number, option, switch, whole
from triforce_cli.utf8 import decode_argument, read_text, user_path

CONTROL = "What is written (docs/sampling.md)"
NEVER = ("-inf", "false")  # a bias with which a token is never taken


def _number(name: str, help_text: str, *, hidden: bool = False) -> Any:
    return option(name, help_text, CONTROL, metavar="X", parser=number, hidden=hidden)


def _whole(name: str, help_text: str, *, hidden: bool = False) -> Any:
    return option(name, help_text, CONTROL, metavar="N", parser=whole, hidden=hidden)


JsonSchema = Annotated[
    str | None,
    option("--json-schema", "The text is JSON of this schema; {} is any JSON.", options.SAMPLING, metavar="FILE|JSON"),
]
Regex = Annotated[str | None, option("--regex", "The whole text matches this.", CONTROL, metavar="REGEX", hidden=True)]
Choice = Annotated[
    list[str] | None,
    option(
        "--choice", "The text is one of these; repeat it for texts with commas.", CONTROL, metavar="A,B,C", hidden=True
    ),
]
GrammarFile = Annotated[
    Path | None,
    option("--grammar", "The text follows a grammar in llguidance's Lark.", CONTROL, metavar="FILE", hidden=True),
]
RepetitionPenalty = Annotated[
    float,
    option(
        "--repetition-penalty",
        "What was there before is less likely; 1 is off.",
        options.SAMPLING,
        metavar="X",
        parser=number,
    ),
]
PresencePenalty = Annotated[
    float, _number("--presence-penalty", "Taken from the logits of generated tokens; 0 is off.", hidden=True)
]
FrequencyPenalty = Annotated[
    float, _number("--frequency-penalty", "The same, as often as each was generated; 0 is off.", hidden=True)
]
PenaltyWindow = Annotated[
    int, _whole("--penalty-window", "Last tokens that these three look at; 0: the whole text.", hidden=True)
]
NoRepeatNgram = Annotated[
    int,
    _whole("--no-repeat-ngram", "Never write so many tokens in a row a second time; 0 is off.", hidden=True),
]
DryMultiplier = Annotated[
    float, _number("--dry-multiplier", "DRY: prolonging a repetition costs; 0 is off, 0.8 a usual value.", hidden=True)
]
DryBase = Annotated[float, _number("--dry-base", "DRY: each further token multiplies the cost by this.", hidden=True)]
DryAllowedLength = Annotated[int, _whole("--dry-allowed-length", "DRY: shorter repetitions cost nothing.", hidden=True)]
DryWindow = Annotated[int, _whole("--dry-window", "DRY: last tokens that are looked at; 0: all.", hidden=True)]
DryBreakers = Annotated[
    list[str] | None,
    option(
        "--dry-breaker",
        "DRY: a text that ends a repetition; can be repeated. Without it: new line, colon, quote, asterisk.",
        CONTROL,
        metavar="TEXT",
        hidden=True,
    ),
]
TypicalP = Annotated[
    float, _number("--typical-p", "Keep the most typical tokens up to this total probability; 1 is off.", hidden=True)
]
TopNSigma = Annotated[
    float,
    _number("--top-n-sigma", "Keep logits within this many standard deviations of the largest; 0 is off.", hidden=True),
]
XtcProbability = Annotated[
    float, _number("--xtc-probability", "XTC: how often the likeliest tokens are left out; 0 is off.", hidden=True)
]
XtcThreshold = Annotated[
    float, _number("--xtc-threshold", "XTC: all above this probability but the last one of them.", hidden=True)
]
LogitBias = Annotated[
    list[str] | None,
    option(
        "--logit-bias",
        "Add X to the logit of a token, by its id or its text; -inf: never. Can be repeated.",
        CONTROL,
        metavar="TOKEN=X",
        hidden=True,
    ),
]
MinTokens = Annotated[int, _whole("--min-tokens", "New tokens at least, before the text may end.", hidden=True)]
IgnoreEos = Annotated[
    bool, switch("--ignore-eos", "Write until --max-tokens: the text cannot end.", CONTROL, hidden=True)
]


@dataclass(frozen=True, kw_only=True)
class ControlFlags(SamplingFlags):
    """All of `SamplingParams`."""

    json_schema: JsonSchema = None
    regex: Regex = None
    choice: Choice = None
    grammar: GrammarFile = None
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: PresencePenalty = 0.0
    frequency_penalty: FrequencyPenalty = 0.0
    penalty_window: PenaltyWindow = 512
    no_repeat_ngram: NoRepeatNgram = 0
    dry_multiplier: DryMultiplier = 0.0
    dry_base: DryBase = 1.75
    dry_allowed_length: DryAllowedLength = 2
    dry_window: DryWindow = 0
    dry_breaker: DryBreakers = None
    typical_p: TypicalP = 1.0
    top_n_sigma: TopNSigma = 0.0
    xtc_probability: XtcProbability = 0.0
    xtc_threshold: XtcThreshold = 0.1
    logit_bias: LogitBias = None
    min_tokens: MinTokens = 0
    ignore_eos: IgnoreEos = False

    def params(self) -> SamplingParams:
        """Reads the files that are named. Raises UsageError."""
        own = {field.name for field in fields(SamplingParams)}
        given = {name: value for name, value in vars(self).items() if name in own}
        given["logit_bias"] = tuple(_bias(text) for text in self.logit_bias or ())
        breakers = tuple(decode_argument("--dry-breaker", text) for text in self.dry_breaker or BREAKERS)
        return SamplingParams(**given, dry_breakers=breakers, constraint=self._constraint())

    def _constraint(self) -> Constraint | None:
        found: list[Constraint] = []
        if self.json_schema is not None:
            found.append(Constraint("json-schema", _schema(self.json_schema)))
        if self.regex is not None:
            found.append(Constraint("regex", decode_argument("--regex", self.regex)))
        if self.choice:
            found.append(Constraint("choice", json.dumps(_choices(self.choice))))
        if self.grammar is not None:
            found.append(Constraint("grammar", read_text(user_path(str(self.grammar)), "the grammar")))
        if len(found) > 1:
            raise UsageError(f"{' and '.join(each.kind for each in found)} both say what the text is; give one of them")
        return found[0] if found else None


@dataclass(frozen=True, kw_only=True)
class GreedyControlFlags(ControlFlags):
    """The same for commands that are greedy by default."""

    temperature: options.Temperature = 0.0


def _schema(text: str) -> str:
    """The schema itself, or the content of the file."""
    if text.lstrip().startswith("{") or text.strip() in ("true", "false"):
        return decode_argument("--json-schema", text)
    return read_text(user_path(text), "the JSON schema")


def _choices(texts: list[str]) -> list[str]:
    """Of one text its parts between commas."""
    found = [decode_argument("--choice", text) for text in texts]
    return found[0].split(",") if len(found) == 1 else found


def _bias(text: str) -> tuple[int | str, float]:
    """From TOKEN=X. A TOKEN of digits is an id."""
    name, equals, value = decode_argument("--logit-bias", text).rpartition("=")
    if not equals or not name:
        raise UsageError(f"logit-bias is {text!r}, it must be TOKEN=X, such as 42=-5 or ' the'=-inf")
    try:
        bias = -math.inf if value.strip() in NEVER else float(value)
    except ValueError as error:
        raise UsageError(f"logit-bias of {name!r} is {value!r}, it must be a number or -inf") from error
    return int(name) if name.isdecimal() else name, bias
