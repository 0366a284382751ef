"""The reader of requests: from a body of JSON to a prompt that the model can answer."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from offload.errors import DoesNotFit, TriforceError, UsageError
from offload.seeds import seed_after
from triforce_cli.answering.request import Prompt, Wanted
from triforce_cli.apis.api import PLACE, Api, ApiError, Fields
from triforce_cli.apis.billing import without_billing
from triforce_cli.apis.messages import Messages
from triforce_cli.batch.prompts import Prompts
from triforce_cli.batch.records import OF_MESSAGES, check_known, read_object, read_record
from triforce_cli.batch.sampling import SAMPLING
from triforce_cli.prompts.messages import Note
from triforce_cli.prompts.steps import TooMuchWork

MOST_SCORES = 1 << 17  # of an answer, some 500 bytes each: a token's own, and those of the likeliest in its place
_OF_FIELD = re.compile(rf"({re.escape(PLACE)}: |)(\S*)(.*)", re.DOTALL)
FIELDS = ("prompt", "messages", *OF_MESSAGES, "max_tokens", "stop", "timeout", "logprobs", "cite", *SAMPLING)
_MOST_NOTES = 4  # that the log has of a request


Asked = tuple[Prompt, Wanted]


def by_prompt(fields: Fields) -> list[Fields]:
    """The fields of each prompt, where there is a list of them. An empty list is refused as no prompt, later."""
    texts = fields.get("prompt")
    return [{**fields, "prompt": text} for text in texts] if isinstance(texts, list) and texts else [fields]


@dataclass(frozen=True)
class Readable:
    """A request that can be answered. body: as it came, but for a billing block. asked: the prompt and the wishes of
    each choice. notes: lines for the log on what was left out or changed."""

    body: Mapping[str, Any]
    asked: Sequence[Asked]
    notes: tuple[str, ...] = ()


class Reader:
    """Reads requests for a model, one at a time. context: tokens of a prompt and its answer together. most_choices: of
    a request. cites: citations can be asked for. defaults: for fields that a request leaves out. keeps_billing: see
    apis/billing."""

    def __init__(
        self,
        prompts: Prompts,
        defaults: Wanted,
        *,
        context: int,
        most_choices: int,
        cites: bool = False,
        keeps_billing: bool = False,
    ) -> None:
        self._prompts, self._defaults, self._cites = prompts, defaults, cites
        self._context, self._keeps_billing = context, keeps_billing
        self._most_choices = most_choices

    def read(self, api: Api, body: Mapping[str, Any]) -> Readable:
        """The request. Raises ApiError."""
        with self._refusing():
            notes = list[str]()
            given = self._kept(body, notes.append)
            with _named_as_in(given, api):
                asked = self._choices(api.fields(given, notes.append), api.num_choices(given))
                self._check_scores(asked)
            for prompt, _ in asked:
                notes += prompt.notes
            return Readable(given, asked, _few(tuple(dict.fromkeys(notes))))

    def num_tokens(self, api: Messages, body: Mapping[str, Any]) -> int:
        """The number of tokens of a request's prompt. Raises ApiError."""
        with self._refusing():
            given = self._kept(body, lambda note: None)
            with _named_as_in(given, api):
                return len(self._prompt(api.prompt_fields(given, lambda note: None))[0].tokens)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Raise errors as those of HTTP."""
        try:
            yield
        except (UsageError, TooMuchWork) as error:
            raise ApiError(400, str(error)) from error
        except DoesNotFit as error:  # the text is surely too long, so it was not encoded
            raise self._too_long("") from error
        except TriforceError as error:
            raise ApiError(500, str(error)) from error

    def _kept(self, body: Mapping[str, Any], note: Note) -> Mapping[str, Any]:
        return body if self._keeps_billing else without_billing(body, note)

    def _choices(self, fields: Fields, num: int) -> list[Asked]:
        """`num` choices for each prompt. Their seeds follow one another, from the one that is asked for."""
        each = by_prompt(fields)
        if (total := num * len(each)) > self._most_choices:
            raise UsageError(
                f"{PLACE}: {total:,} answers are asked for at once ({len(each):,} prompts, n is {num:,}); "
                f"{self._most_choices:,} can wait; ask for fewer, or start the server with a larger --max-waiting"
            )
        return [(prompt, _later(wanted, count)) for prompt, wanted in map(self._fitting, each) for count in range(num)]

    def _fitting(self, fields: Fields) -> Asked:
        """A prompt that leaves room for an answer. Raises ApiError."""
        prompt, wanted = self._prompt(fields)
        if len(prompt.tokens) >= self._context:
            raise self._too_long(f" ({len(prompt.tokens):,} tokens)")
        return prompt, wanted

    def _prompt(self, fields: Fields) -> Asked:
        check_known(fields, FIELDS, PLACE, f"there are {', '.join(FIELDS)}")
        if fields.get("thinking") == "hide":
            raise UsageError(f"{PLACE}: thinking is 'hide', which is for the server to say; it can be 'show' or 'off'")
        record = read_record(fields, 1, PLACE, self._defaults)
        if record.wanted.cites and not self._cites:
            raise UsageError(f"{PLACE}: cite is true, and this server finds no citations; start it with --cite")
        self._prompts.check(record)
        prompt = self._prompts.of(record, {"date_string": time.strftime("%d %b %Y")})
        if not prompt.tokens:
            raise UsageError(f"{PLACE}: the prompt has no tokens")
        return prompt.without_begin(), record.wanted

    def _check_scores(self, asked: Sequence[Asked]) -> None:
        """Raises UsageError if the scores of the answers would take too much memory."""
        if (logprobs := asked[0][1].logprobs) is None:
            return
        num_tokens = sum(min(wanted.max_tokens, self._context - len(prompt.tokens)) for prompt, wanted in asked)
        if num_tokens * (each := 1 + logprobs) > MOST_SCORES:
            raise UsageError(
                f"{PLACE}: log-probabilities of {num_tokens:,} tokens, {each} each, are {num_tokens * each:,}; "
                f"{MOST_SCORES:,} is the limit, so max_tokens can be {MOST_SCORES // each // len(asked):,}"
            )

    def _too_long(self, size: str) -> ApiError:
        message = (
            f"the prompt is too long{size}: this server's maximum context length is {self._context:,} tokens for "
            "prompt and answer together; shorten the messages, or start the server with a larger --context"
        )
        return ApiError(400, message, "context_length_exceeded")


def _later(wanted: Wanted, count: int) -> Wanted:
    """The wishes for the choice that comes `count` choices later."""
    return replace(wanted, sampling=replace(wanted.sampling, seed=seed_after(wanted.sampling.seed, count)))


def _few(notes: tuple[str, ...]) -> tuple[str, ...]:
    """The first notes, and how many more there are: a long conversation repeats its own with every request."""
    return notes if len(notes) <= _MOST_NOTES else (*notes[:_MOST_NOTES], f"{len(notes) - _MOST_NOTES} more such parts")


@contextmanager
def _named_as_in(body: Mapping[str, Any], api: Api) -> Iterator[None]:
    """Raise errors with the request's name of the field that they begin with: not our own, nor that of an option."""
    try:
        yield
    except UsageError as error:
        place, name, said = _OF_FIELD.fullmatch(str(error)).groups()  # type: ignore[union-attr]
        name = name.replace("-", "_") if name.replace("-", "_") in FIELDS else name
        theirs = api.names.get(name, name)
        if name in body and (body[name] is not True or theirs not in body):  # true: logprobs beside their number
            theirs = name
        raise UsageError(f"{place}{theirs}{said}") from error


def parsed(body: bytes) -> Mapping[str, Any]:
    """The object in a body of JSON. Raises ApiError, also for one that cannot be written again, as parts of it are in
    replies and messages."""
    try:
        return read_object(body, PLACE)
    except UsageError as error:
        raise ApiError(400, str(error)) from error
