"""`triforce chat`: a conversation about long texts."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from offload.errors import TriforceError, UsageError
from triforce_cli import options, render_chat
from triforce_cli.options import Models
from triforce_cli.output import Output
from triforce_cli.prompt import decode_argument, read_text

if TYPE_CHECKING:
    from offload.plan.planner import Options
    from offload.session.store import Store
    from triforce_cli.chat.conversation import Conversation
    from triforce_cli.chat.dialogue import Dialogue
    from triforce_cli.chat.formats import ChatFormat
    from triforce_cli.chat.reader import Reader
    from triforce_cli.chat.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Chat:
    """One `triforce chat`, parsed."""

    system: str
    files: tuple[Path, ...]
    template: str
    settings: Settings
    options: Options
    models: Models
    session: Path | None
    read_only: bool
    history: bool
    quiet: bool

    def run(self) -> None:
        """Load, then answer messages until there are no more."""
        output = Output(quiet=self.quiet)
        with ExitStack() as stack:
            with output:
                output.wait("starting")
                from triforce_cli.chat.dialogue import Dialogue
                from triforce_cli.chat.formats import ChatFormat
                from triforce_cli.chat.partner import Partner

                partner = stack.enter_context(
                    Partner(
                        self.models,
                        self.options,
                        session=self.session,
                        read_only=self.read_only,
                        on_note=output.note,
                    )
                )
                chat_format = ChatFormat(partner.tokenizer, self.template)
            interactive = output.has_person
            dialogue = Dialogue(
                partner,
                chat_format,
                self.settings,
                output,
                conversation=self._beginning(partner.store, output),
                interactive=interactive,
            )
            stack.enter_context(closing(dialogue))
            self._greet(output, chat_format, interactive)
            if interactive and (last := render_chat.last_turn(dialogue.conversation)):
                output.note(last)
            self._add_files(dialogue)
            _converse(dialogue, self._reader(dialogue, output))
            if partner.store is not None and not self.read_only:
                output.note(render_chat.kept(self.session, len(partner.store.tokens), partner.store.nbytes))

    def _beginning(self, store: Store | None, output: Output) -> Conversation:
        """What the session holds, or a new conversation."""
        from triforce_cli.chat.conversation import Conversation

        if store is None or not store.tokens:
            return Conversation(date=time.strftime("%d %b %Y")).with_system(self.system)
        if store.extra.get("kind") != "chat":
            raise UsageError(f"{self.session} was kept by generate, not by a chat; name another session")
        saved = Conversation.from_data(store.extra.get("conversation"), f"{self.session}: its conversation")
        output.note(render_chat.session(len(saved.turns), len(store.tokens), store.nbytes))
        return saved.with_system(self.system) if self.system else saved

    def _greet(self, output: Output, chat_format: ChatFormat, interactive: bool) -> None:
        if self.models.embedded:
            output.note(f"no --model given: using the embedded demo model ({self.models.target})")
        if chat_format.notice:
            output.note(chat_format.notice)
        if interactive:
            output.note("/help lists commands; Ctrl-C stops a reply, Ctrl-D leaves")

    def _add_files(self, dialogue: Dialogue) -> None:
        from triforce_cli.chat.conversation import Document

        for path in self.files:
            document = Document(path.name, read_text(path, "the document"))
            if document not in dialogue.conversation.documents:  # a session may hold it already
                dialogue.add(document)

    def _reader(self, dialogue: Dialogue, output: Output) -> Reader:
        from triforce_cli.chat.reader import LineReader, PromptReader
        from triforce_cli.chat.slash import COMMANDS

        if not dialogue.interactive:
            return LineReader()
        if not output.can_draw:
            dialogue.edits_drafts = False
            return LineReader(lambda: output.question(">"))
        slashes = COMMANDS.values()
        return PromptReader(
            history=_history_file() if self.history else None,
            commands=lambda: ((slash.name, slash.about) for slash in slashes),
            with_path=(slash.name for slash in slashes if slash.takes_path),
            toolbar=dialogue.status,
            output=output.for_prompt(),
        )


def _converse(dialogue: Dialogue, reader: Reader) -> None:
    """Until there are no more messages. A person hears of an error and goes on; a script ends with it."""
    from triforce_cli.chat.slash import Over

    while True:
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
    dialogue.finish_ahead()


def _handle(dialogue: Dialogue, text: str) -> None:
    from triforce_cli.chat import slash

    if slash.is_command(text):
        slash.run(dialogue, text)
    elif text.strip():
        dialogue.say(text.removeprefix("/") if text.startswith(slash.ESCAPED) else text)


def _history_file() -> Path:
    import platformdirs

    return Path(platformdirs.user_state_dir("triforce", appauthor=False)) / "chat_history"


def chat(
    *,
    model: options.Model = None,
    draft: options.Draft = None,
    system: options.System = "",
    file: options.Files = None,
    template: options.Template = "auto",
    max_tokens: options.MaxTokens = 1024,
    temperature: options.Temperature = 0.6,
    top_p: options.TopP = 0.9,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    context: options.Context = None,
    budget: options.Budget = None,
    chunk: options.Chunk = None,
    gamma: options.Gamma = None,
    draft_gamma: options.DraftGamma = None,
    no_lookup: options.NoLookup = False,
    pace: options.Pace = "auto",
    sinks: options.Sinks = 16,
    window: options.Window = 240,
    no_speculation: options.NoSpeculation = False,
    selection: options.Selection = "mass",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    offload: options.Offload = "auto",
    device_memory: options.DeviceMemory = None,
    link_gbps: options.LinkGbps = None,
    session: options.Session = None,
    cache: options.CacheFile = None,
    read_only: options.ReadOnly = False,
    no_history: options.NoHistory = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> Chat:
    """Talk about long texts. What was read once is not read again: each turn computes only what is new.

    At a terminal: Enter sends, Alt-Enter begins a new line, /help lists commands. Without one it reads a message per
    line and writes a reply per message.

    Example: triforce chat --model path/to/model --file book.txt
    """
    from offload.plan.planner import Options
    from triforce_cli.chat.formats import NAMES
    from triforce_cli.chat.settings import Settings

    options.check_max_tokens(max_tokens)
    if template not in NAMES:
        raise UsageError(f"template is {template!r}, it must be one of {', '.join(NAMES)}")
    return Chat(
        system=decode_argument("--system", system),
        files=tuple(file or ()),
        template=template,
        settings=Settings(
            temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, max_tokens=max_tokens
        ),
        options=Options(
            context=context,
            budget=budget,
            chunk=chunk,
            gamma=gamma,
            draft_gamma=draft_gamma,
            lookup=not no_lookup,
            pace=pace,
            sinks=sinks,
            window=window,
            device=device,
            dtype=dtype,
            offload=options.offloaded(offload),
            device_memory=device_memory,
            link_gbps=link_gbps,
            speculation=not no_speculation,
            selection=selection,
        ),
        models=options.choose_models(model, draft),
        session=options.session_path(session, cache, read_only=read_only),
        read_only=read_only,
        history=not no_history,
        quiet=quiet,
    )
