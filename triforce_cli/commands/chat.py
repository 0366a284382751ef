"""`triforce chat`: a conversation about long texts."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offload.errors import TriforceError, UsageError
from offload.files import user_folder
from offload.interrupts import Terminated, resume
from triforce_cli.answering.ending import check_ends
from triforce_cli.answering.forms import Written
from triforce_cli.answering.recorder import Recorder
from triforce_cli.answering.request import Wanted
from triforce_cli.chat import notes
from triforce_cli.chat.keys import Keys
from triforce_cli.documents.selection import Named
from triforce_cli.options import options
from triforce_cli.options.answering import CHAT, ChatFlags, EndFlags, Files, Layout, System, setup, wanted
from triforce_cli.options.control import Sampling
from triforce_cli.options.flags import (
    CacheFlags,
    Changed,
    LogFlags,
    ModelFlags,
    PlacementFlags,
    ProgramFlags,
    SessionFlags,
    StoreFlags,
    named_documents,
    spread,
)
from triforce_cli.options.options import switch
from triforce_cli.screen.output import Output
from triforce_cli.screen.utf8 import decode_argument
from triforce_cli.setup.engine import Setup

if TYPE_CHECKING:
    from offload.session.store import Store
    from triforce_cli.chat.dialogue import Dialogue
    from triforce_cli.chat.reader import Reader
    from triforce_cli.prompts.conversation import Conversation
    from triforce_cli.prompts.formats import ChatFormat

MoreFiles = Annotated[
    list[Path] | None,
    typer.Argument(metavar="PATH", help="More of --file, as a shell writes them for *.pdf.", hidden=True),
]
AsJson = Annotated[bool, switch("--json", "Write a JSON object for each reply instead of text.", options.OUTPUT)]
NoHistory = Annotated[bool, switch("--no-history", "Do not keep what is typed for the next time.", CHAT)]


@dataclass(frozen=True, kw_only=True)
class Chat:
    """One `triforce chat`, parsed."""

    system: str
    documents: Named
    layout: Layout
    wanted: Wanted
    setup: Setup
    session: Path | None
    read_only: bool
    history: bool
    written: Written
    recorder: Recorder | None
    quiet: bool

    @property
    def as_json(self) -> bool:
        return self.written.as_json

    def run(self) -> None:
        """Load, then answer messages until there are no more."""
        output = Output(quiet=self.quiet)
        keys = Keys(edited=output.can_draw) if output.has_person else None
        with ExitStack() as stack:
            if keys is not None:
                stack.enter_context(keys.hidden())
            with output:
                prepared = self.setup.prepare(output, sampling=self.wanted.sampling)
                output.note(self.setup.models.answers_note)
                from triforce_cli.chat.dialogue import Dialogue
                from triforce_cli.chat.engine import ChatEngine

                engine = stack.enter_context(
                    ChatEngine(prepared, session=self.session, read_only=self.read_only, on_note=output.note)
                )
                chat_format = self.layout.format(prepared.prompt_tokenizer, self.wanted)
            interactive = output.has_person
            dialogue = Dialogue(
                engine,
                chat_format,
                self.wanted,
                output,
                conversation=self._beginning(engine.store, output),
                interactive=interactive,
                written=self.written,
                recorder=self.recorder,
            )
            stack.enter_context(closing(dialogue))
            chat_format.closing_tokens(dialogue.conversation.clear())  # raises if the template takes no system message
            self._greet(output, chat_format, interactive)
            if interactive and (last := notes.last_turn(dialogue.conversation)):
                output.note(last)
            if self.documents:
                dialogue.add_documents(self.documents)
            _converse(dialogue, self._reader(dialogue, output, keys))
            if engine.store is not None and not self.read_only:
                output.note(notes.kept(self.session, len(engine.store.tokens), engine.store.nbytes))
            if not interactive:  # a person has read how each reply ended
                check_ends(dialogue.ends)

    def _beginning(self, store: Store | None, output: Output) -> Conversation:
        """The session's conversation, or a new one."""
        from triforce_cli.prompts.conversation import Conversation

        if store is None or not store.extra:
            return Conversation(date=time.strftime("%d %b %Y")).with_system(self.system)
        if store.extra.get("kind") != "chat":
            raise UsageError(f"{self.session} was kept by generate, not by a chat; name another session")
        saved = Conversation.from_data(store.extra.get("conversation"), f"{self.session}: its conversation")
        output.note(notes.session(len(saved.turns), len(store.tokens), store.nbytes))
        return saved.with_system(self.system) if self.system else saved

    def _greet(self, output: Output, chat_format: ChatFormat, interactive: bool) -> None:
        output.note(chat_format.notice)
        if interactive:
            output.note("/help lists commands; Ctrl-C stops a reply, Ctrl-D leaves")

    def _reader(self, dialogue: Dialogue, output: Output, keys: Keys | None) -> Reader:
        from triforce_cli.chat.reader import LineReader, PromptReader
        from triforce_cli.chat.slash import COMMANDS

        if not dialogue.interactive:
            return LineReader()
        if not output.can_draw:
            dialogue.edits_drafts = False
            return LineReader(lambda: output.question(">"), keys=keys)
        slashes = COMMANDS.values()
        return PromptReader(
            history=_history_file() if self.history else None,
            commands=lambda: ((slash.name, slash.about) for slash in slashes),
            with_path=(slash.name for slash in slashes if slash.takes_path),
            toolbar=dialogue.status,
            output=output.for_prompt(),
        )


def _converse(dialogue: Dialogue, reader: Reader) -> None:
    """Answer messages until there are no more. The session is saved, also after SIGTERM."""
    try:
        _answer_all(dialogue, reader)
        _finish(dialogue, reader)
    except Terminated as ending:
        if not ending.forced:
            dialogue.keep()
        raise


def _finish(dialogue: Dialogue, reader: Reader) -> None:
    """Save the session. If that fails, a person can still save the conversation elsewhere, or make room."""
    try:
        dialogue.finish_ahead()
    except TriforceError as error:
        if not dialogue.interactive:
            raise
        dialogue.output.error(str(error))
        dialogue.output.note("the session is not kept: /save PATH writes the conversation, Ctrl-D tries again")
        _answer_all(dialogue, reader)
        dialogue.finish_ahead()


def _answer_all(dialogue: Dialogue, reader: Reader) -> None:
    """Answer every message. Interactive chats show an error and go on; scripts end with it."""
    from triforce_cli.chat.slash import Over

    while True:
        resume()
        try:
            dialogue.work_ahead()
            text = reader.read(dialogue.taken_draft())
            if text is None:
                break
            _handle(dialogue, text)
        except Over:
            break
        except KeyboardInterrupt:
            if not dialogue.interactive:
                raise
        except TriforceError as error:
            if not dialogue.interactive:
                raise
            dialogue.output.error(str(error))


def _handle(dialogue: Dialogue, text: str) -> None:
    from triforce_cli.chat import slash

    if slash.is_command(text):
        slash.run(dialogue, text)
    elif text.strip():
        message = dialogue.with_mentions(text.removeprefix("/") if text.startswith(slash.ESCAPED) else text)
        if message:
            dialogue.say(message)


def _history_file() -> Path:
    return user_folder("state") / "chat_history"


@spread
def chat(
    *,
    models: ModelFlags,
    system: System = "",
    file: Files = None,
    more_files: MoreFiles = None,
    include: options.Include = None,
    flags: ChatFlags,
    max_tokens: options.MaxTokens = 1024,
    sampling: Sampling,
    ends: EndFlags,
    decoding: CacheFlags,
    placement: PlacementFlags,
    session: SessionFlags,
    store: StoreFlags,
    log: LogFlags,
    changed: Changed,
    no_history: NoHistory = False,
    cite: options.Cite = False,
    logprobs: options.Logprobs = None,
    json: AsJson = False,
    quiet: options.Quiet = False,
    program: ProgramFlags,
) -> Chat:
    """Talk about long texts. What was read once is not read again: each turn computes only what is new.

    At a terminal: Enter sends, Alt-Enter begins a new line, /help lists commands. Without one it reads a message per
    line and writes a reply per message.

    Example: triforce chat --model path/to/model --file book.txt
    """
    if logprobs is not None and not json:
        raise UsageError("--logprobs go into JSON; add --json")
    started = setup(models, decoding, placement, store, cites=cite)
    return Chat(
        system=decode_argument("--system", system),
        documents=named_documents("--file", file, more_files, include),
        layout=flags.layout(),
        wanted=wanted(max_tokens, sampling, ends=ends, cites=cite, logprobs=logprobs, chat=flags),
        setup=started,
        session=session.path(),
        read_only=session.read_only,
        history=not no_history,
        written=Written(form="json" if json else "text", shows_thoughts=flags.how() == "show"),
        recorder=log.recorder("chat", started.models, changed),
        quiet=quiet,
    )
