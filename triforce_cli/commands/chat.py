"""`triforce chat`: a conversation about long texts."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offload.errors import TriforceError, UsageError
from offload.files import user_folder
from offload.interrupts import Terminated, resume
from triforce_cli.answering.ending import check_ends
from triforce_cli.answering.forms import Written
from triforce_cli.chat import notes
from triforce_cli.chat.keys import Keys
from triforce_cli.options import options
from triforce_cli.options.answering import CHAT, Files, System, WantedFlags
from triforce_cli.options.call import Changed, spread
from triforce_cli.options.flags import (
    CacheFlags,
    EngineFlags,
    LogFlags,
    ModelFlags,
    PlacementFlags,
    SessionFlags,
    StoreFlags,
    named_documents,
)
from triforce_cli.options.options import switch
from triforce_cli.screen.output import Output
from triforce_cli.screen.utf8 import decode_argument

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


@spread
def chat(
    *,
    models: ModelFlags,
    system: System = "",
    file: Files = None,
    more_files: MoreFiles = None,
    include: options.Include = None,
    wanted: WantedFlags,
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
) -> None:
    """Talk about long texts. What was read once is not read again: each turn computes only what is new.

    At a terminal: Enter sends, Alt-Enter begins a new line, /help lists commands. Without one it reads a message per
    line and writes a reply per message.

    Example: triforce chat --model path/to/model --file book.txt
    """
    if logprobs is not None and not json:
        raise UsageError("--logprobs go into JSON; add --json")
    setup = EngineFlags(decoding=decoding, placement=placement).setup(models, store, cites=cite, quiet=quiet)
    system = decode_argument("--system", system)
    documents = named_documents("--file", file, more_files, include)
    layout = wanted.chat.layout()
    wishes = wanted.checked(cites=cite, logprobs=logprobs)
    path = session.path()
    written = Written(form="json" if json else "text", shows_thoughts=wanted.chat.how() == "show")
    recorder = log.recorder("chat", setup.models, changed)
    output = Output(quiet=quiet)
    keys = Keys(edited=output.can_draw) if output.has_person else None
    with ExitStack() as stack:
        if keys is not None:
            stack.enter_context(keys.hidden())
        with output:
            prepared = setup.prepare(output, sampling=wishes.sampling)
            output.note(setup.models.answers_note)
            from triforce_cli.chat.dialogue import Dialogue
            from triforce_cli.chat.engine import ChatEngine

            engine = stack.enter_context(
                ChatEngine(prepared, session=path, read_only=session.read_only, on_note=output.note)
            )
            chat_format = layout.format(prepared.prompt_tokenizer, wishes)
        dialogue = Dialogue(
            engine,
            chat_format,
            wishes,
            output,
            conversation=_beginning(engine.store, path, system, output),
            interactive=output.has_person,
            written=written,
            recorder=recorder,
        )
        stack.enter_context(closing(dialogue))
        chat_format.closing_tokens(dialogue.conversation.clear())  # raises if the template takes no system message
        _greet(dialogue, chat_format)
        if documents:
            dialogue.add_documents(documents)
        _converse(dialogue, _reader(dialogue, keys, history=not no_history))
        if engine.store is not None and not session.read_only:
            output.note(notes.kept(path, len(engine.store.tokens), engine.store.nbytes))
        if not dialogue.interactive:  # a person has read how each reply ended
            check_ends(dialogue.ends)


def _beginning(store: Store | None, session: Path | None, system: str, output: Output) -> Conversation:
    """The session's conversation, or a new one."""
    from triforce_cli.prompts.conversation import Conversation

    if store is None or not store.extra:
        return Conversation(date=time.strftime("%d %b %Y")).with_system(system)
    if store.extra.get("kind") != "chat":
        raise UsageError(f"{session} was kept by generate, not by a chat; name another session")
    saved = Conversation.from_data(store.extra.get("conversation"), f"{session}: its conversation")
    output.note(notes.session(len(saved.turns), len(store.tokens), store.nbytes))
    return saved.with_system(system) if system else saved


def _greet(dialogue: Dialogue, chat_format: ChatFormat) -> None:
    dialogue.output.note(chat_format.notice)
    if dialogue.interactive:
        dialogue.output.note("/help lists commands; Ctrl-C stops a reply, Ctrl-D leaves")
        dialogue.output.note(notes.last_turn(dialogue.conversation))


def _reader(dialogue: Dialogue, keys: Keys | None, *, history: bool) -> Reader:
    from triforce_cli.chat.reader import LineReader, PromptReader
    from triforce_cli.chat.slash import COMMANDS

    output = dialogue.output
    if not dialogue.interactive:
        return LineReader()
    if not output.can_draw:
        dialogue.edits_drafts = False
        return LineReader(lambda: output.question(">"), keys=keys)
    slashes = COMMANDS.values()
    return PromptReader(
        history=user_folder("state") / "chat_history" if history else None,
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
