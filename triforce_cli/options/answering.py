"""Options of commands that answer: stop conditions, output forms and thoughts, with the checks of the typed values."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from offload import strict_json
from offload.engine.request import check_logprobs
from offload.errors import UsageError
from triforce_cli.answering.forms import FormName, Written
from triforce_cli.answering.recorder import Recorder
from triforce_cli.answering.request import Wanted
from triforce_cli.answering.single import SingleAnswer
from triforce_cli.answering.thoughts import NAMES, Thinking
from triforce_cli.options import options
from triforce_cli.options.control import Sampling
from triforce_cli.options.flags import SessionFlags
from triforce_cli.options.options import OUTPUT, SAMPLING, number, option, switch, whole
from triforce_cli.screen.utf8 import STDIN, decode_argument, user_path
from triforce_cli.setup.engine import Setup
from triforce_cli.tools.tools import checked_variables

if TYPE_CHECKING:
    from offload.text.tokenizer import Tokenizer
    from triforce_cli.prompts.formats import ChatFormat

CHAT = "Conversation"

Stop = Annotated[
    list[str] | None,
    option(
        "--stop",
        "Stop before this text; repeatable.",
        SAMPLING,
        metavar="TEXT",
    ),
]
Timeout = Annotated[
    float | None,
    option(
        "--timeout",
        "Stop an answer after so many seconds.",
        SAMPLING,
        metavar="SECONDS",
        parser=number,
    ),
]
AsEvents = Annotated[
    bool,
    switch("--jsonl", "Write a JSON line for each event as it happens.", OUTPUT),
]
Destination = Annotated[
    Path | None,
    option(
        "--output",
        "Write to this file instead of standard output, atomically; an interrupted run leaves FILE.partial.",
        OUTPUT,
        short="-o",
        metavar="FILE",
    ),
]
Extract = Annotated[
    bool,
    switch("--extract", "Write the last code block of the answer alone.", OUTPUT, short="-x"),
]
ShowStats = Annotated[bool, switch("--stats", "After the text, print statistics to standard error.", OUTPUT)]
Compare = Annotated[
    bool,
    switch("--compare", "Then decode plainly, too; compare time and text.", OUTPUT),
]
GoesOn = Annotated[
    bool,
    switch("--continue", "Go on with the session's last answer.", options.SESSION),
]
System = Annotated[
    str,
    option("--system", "What the model is told before the first message.", CHAT, metavar="TEXT", show_default=False),
]
Files = Annotated[
    list[Path] | None,
    option(
        "--file",
        "A document to put before the first message, a folder or a pattern of them; can be repeated.",
        CHAT,
        short="-f",
        metavar="PATH",
    ),
]
Template = Annotated[
    str,
    option(
        "--template",
        "How messages are laid out for the model: auto (its own template; plain where it has none), llama2, chatml, "
        "vicuna or plain.",
        CHAT,
        metavar="NAME",
    ),
]
ThinkingOption = Annotated[
    str,
    option(
        "--thinking",
        "Thoughts of models that write some: show (standard error), hide, or off: none are written.",
        CHAT,
        metavar="HOW",
    ),
]
ThinkingTokens = Annotated[
    int | None,
    option("--thinking-tokens", "Thoughts end after so many tokens.", CHAT, metavar="N", parser=whole, hidden=True),
]
TemplateArguments = Annotated[
    list[str] | None,
    option(
        "--template-arg",
        "A variable of the chat template, its value in JSON, else a text. Can be repeated.",
        CHAT,
        metavar="NAME=VALUE",
        hidden=True,
    ),
]


def check_goes_on(**given: object) -> None:
    """Check the options beside --continue. given: those that the session's answer has already, by name. Raises
    UsageError."""
    names = [name if name.isupper() else f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    if names:
        raise UsageError(
            f"--continue goes on with the answer to the session's own prompt; leave out {', '.join(names)}"
        )


@dataclass(frozen=True, kw_only=True)
class EndFlags:
    """Stop conditions of an answer besides the model's end tokens."""

    stop: Stop = None
    timeout: Timeout = None

    def stops(self) -> tuple[str, ...]:
        """The stop strings. Raises UsageError."""
        stops = tuple(decode_argument("--stop", text) for text in self.stop or ())
        if "" in stops:
            raise UsageError("stop is empty, it must be at least one character")
        return stops

    def seconds(self) -> float | None:
        """The timeout of the answer in seconds, or None. Raises UsageError."""
        return options.checked_seconds("timeout", self.timeout)


@dataclass(frozen=True)
class Layout:
    """A chat template by name, with its variables."""

    template: str
    variables: Mapping[str, Any]

    def format(self, tokenizer: Tokenizer, wanted: Wanted) -> ChatFormat:
        """The chat format for replies with these wishes."""
        from triforce_cli.prompts.formats import ChatFormat

        return ChatFormat(
            tokenizer,
            self.template,
            variables=self.variables,
            thinks=wanted.may_think,
            may_call=wanted.sampling.constraint is None,
        )


@dataclass(frozen=True, kw_only=True)
class ChatFlags:
    """The chat template, and thoughts."""

    template: Template = "auto"
    thinking: ThinkingOption = "show"
    thinking_tokens: ThinkingTokens = None
    template_arg: TemplateArguments = None

    def given(self) -> dict[str, object]:
        """The options that shape a prompt, if they are not the defaults, by name."""
        template = "" if self.template == "auto" else self.template
        return {"template": template, "template_arg": self.template_arg, "thinking off": self.thinking == "off"}

    def layout(self, **variables: Any) -> Layout:
        """The template with its variables. variables: in addition to those of --template-arg. Raises UsageError."""
        from triforce_cli.prompts.formats import NAMES as TEMPLATES

        if self.template not in TEMPLATES:
            raise UsageError(f"template is {self.template!r}, it must be one of {', '.join(TEMPLATES)}")
        return Layout(self.template, self._variables() | variables)

    def how(self) -> Thinking:
        """The treatment of thoughts. Raises UsageError."""
        if self.thinking_tokens is not None and self.thinking_tokens < 0:
            raise UsageError(f"thinking-tokens is {self.thinking_tokens}, it must be 0 or more")
        found = next((name for name in NAMES if name == self.thinking), None)
        if found is None:
            raise UsageError(f"thinking is {self.thinking!r}, it must be one of {', '.join(NAMES)}")
        return found

    def _variables(self) -> dict[str, Any]:
        """The template's variables, each from NAME=VALUE."""
        found: dict[str, Any] = {}
        for text in self.template_arg or ():
            name, equals, value = decode_argument("--template-arg", text).partition("=")
            if not equals or not name.isidentifier():
                raise UsageError(f"template-arg is {text!r}, it must be NAME=VALUE, such as enable_thinking=false")
            found[name] = value
            with suppress(ValueError, RecursionError):
                found[name] = strict_json.parse(value)
        return checked_variables(found)


@dataclass(frozen=True, kw_only=True)
class WantedFlags:
    """Wishes for an answer."""

    chat: ChatFlags
    max_tokens: options.MaxTokens = 1024
    sampling: Sampling
    ends: EndFlags

    def checked(self, *, cites: bool = False, logprobs: int | None = None) -> Wanted:
        """The wishes. Raises UsageError."""
        options.check_max_tokens(self.max_tokens)
        options.check_min_tokens(self.sampling.min_tokens, self.max_tokens)
        check_logprobs(logprobs)
        return Wanted(
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            stops=self.ends.stops(),
            logprobs=logprobs,
            cites=cites,
            thinks=self.chat.how() != "off",
            thought_tokens=self.chat.thinking_tokens,
            timeout=self.ends.seconds(),
        )


@dataclass(frozen=True, kw_only=True)
class AnswerFlags:
    """The output form of an answer, and additions such as statistics and citations."""

    output: Destination = None
    extract: Extract = False
    stats: ShowStats = False
    compare: Compare = False
    cite: options.Cite = False
    logprobs: options.Logprobs = None
    json: options.AsJson = False
    jsonl: AsEvents = False
    quiet: options.Quiet = False

    def written(self, **more: Any) -> Written:
        """The output settings. more: those that are no options. Raises UsageError."""
        if self.json and self.jsonl:
            raise UsageError("--json and --jsonl are two forms of one answer; give one of them")
        if self.extract and (self.json or self.jsonl):
            raise UsageError("--extract writes a code block and --json all of the answer; give one of them")
        forms: dict[FormName, bool] = {"json": self.json, "jsonl": self.jsonl, "code": self.extract}
        return Written(form=next((form for form, chosen in forms.items() if chosen), "text"), stats=self.stats, **more)

    def single(
        self,
        wanted: Wanted,
        setup: Setup,
        session: SessionFlags,
        *,
        written: Written,
        recorder: Recorder | None,
        goes_on: bool,
        forms: str = "--json or --jsonl",
    ) -> SingleAnswer:
        """One answer on an engine of its own. goes_on: with the session's last answer. forms: output forms that can
        show scores. Raises UsageError."""
        if wanted.logprobs is not None and not written.as_json:
            raise UsageError(f"--logprobs go into JSON; add {forms}")
        if goes_on and session.path() is None:
            raise UsageError("--continue goes on with the answer of a session, and none is named; add --session NAME")
        return SingleAnswer(
            wanted=wanted,
            setup=setup,
            session=session.path(),
            read_only=session.read_only,
            compares=self.compare,
            written=written,
            file=destination(self.output),
            recorder=recorder,
            quiet=self.quiet,
        )


def destination(named: Path | None) -> Path | None:
    """The named file as a path; None: standard output."""
    return None if named in (None, STDIN, Path("/dev/stdout")) else user_path(str(named))
