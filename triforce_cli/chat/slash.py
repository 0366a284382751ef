"""Commands of a chat: lines that begin with a slash."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from offload.errors import UsageError
from offload.files import write_whole
from triforce_cli.answering.citations import cited
from triforce_cli.answering.code import last_block
from triforce_cli.answering.thoughts import without_thoughts
from triforce_cli.chat import notes
from triforce_cli.chat.dialogue import Dialogue
from triforce_cli.documents.selection import Named
from triforce_cli.ground.text import counted
from triforce_cli.options.options import count
from triforce_cli.prompts.conversation import Conversation
from triforce_cli.render import answer_log as render_log
from triforce_cli.render.stats import stats_table
from triforce_cli.screen.utf8 import read_text, user_path

ESCAPED = "//"  # begins a message that starts with one slash
MOST_COPIED_BYTES = 74_994  # 100,000 characters of OSC 52, which is what many terminals take
NUM_LOGGED = 10


@dataclass(frozen=True)
class Slash:
    """A command of the chat. run(dialogue, argument) executes it; usage and about are shown by /help."""

    usage: str
    about: str
    run: Callable[[Dialogue, str], None]
    takes_path: bool = False

    @property
    def name(self) -> str:
        return self.usage.split()[0]


class Over(Exception):
    """The person ends the chat."""


def is_command(text: str) -> bool:
    return text.startswith("/") and not text.startswith(ESCAPED)


def run(dialogue: Dialogue, text: str) -> None:
    """Run a command. Raises UsageError for an unknown command, the errors of the command itself, and Over at /exit."""
    name, _, argument = text.strip().partition(" ")
    if name not in COMMANDS:
        raise UsageError(
            f"there is no command {name}; /exit leaves, /help lists all, and {ESCAPED} begins a message with a slash"
        )
    COMMANDS[name].run(dialogue, argument.strip())


def _help(dialogue: Dialogue, argument: str) -> None:
    dialogue.output.table(notes.commands([(slash.usage, slash.about) for slash in COMMANDS.values()]))


def _exit(dialogue: Dialogue, argument: str) -> None:
    raise Over


def _clear(dialogue: Dialogue, argument: str) -> None:
    dialogue.change(dialogue.conversation.clear())
    dialogue.output.note("a new conversation")


def _undo(dialogue: Dialogue, argument: str) -> None:
    conversation, question = dialogue.conversation.undo()
    dialogue.change(conversation)
    dialogue.offer(question)
    where = "; it stands in the line again" if dialogue.edits_drafts else ""
    dialogue.output.note(f"the last message and its reply are taken back{where}")


def _regen(dialogue: Dialogue, argument: str) -> None:
    dialogue.answer(dialogue.conversation.regenerate(), again=True)


def _edit(dialogue: Dialogue, argument: str) -> None:
    if argument or not dialogue.edits_drafts:
        dialogue.conversation.edit(argument)  # raises if there is no message
        message = dialogue.with_mentions(argument)
        dialogue.answer(dialogue.conversation.edit(message))
        return
    conversation, question = dialogue.conversation.undo()
    dialogue.change(conversation)
    dialogue.offer(question)


def _system(dialogue: Dialogue, argument: str) -> None:
    if argument:
        changed = dialogue.conversation.with_system("" if argument == "none" else argument)
        dialogue.format.closing_tokens(changed)  # raises if the template takes no system message
        dialogue.change(changed)
    dialogue.output.note(f"system message: {dialogue.conversation.system or 'none'}")


def _file(dialogue: Dialogue, argument: str) -> None:
    dialogue.add_documents(Named((_path(argument, "/file"),)))


def _drop(dialogue: Dialogue, argument: str) -> None:
    if not argument:
        raise UsageError("name what to drop: /drop NAME for a document, /drop N for the N oldest turns")
    named = {document.name for document in dialogue.conversation.documents}
    num_turns = count(argument)
    if num_turns is not None and argument not in named:
        dialogue.change(dialogue.conversation.drop_turns(num_turns))
    else:
        dialogue.change(dialogue.conversation.drop_document(argument))
    dialogue.output.note(notes.room(dialogue.num_used, dialogue.engine.limit))


def _compact(dialogue: Dialogue, argument: str) -> None:
    if argument == "undo":
        dialogue.undo_compaction()
        dialogue.output.note(f"the turns are back; {notes.room(dialogue.num_used, dialogue.engine.limit)}")
        return
    num_turns = count(argument)
    if argument and num_turns is None:
        raise UsageError(f"{argument} is no number of turns; /compact N for the N oldest ones, or /compact undo")
    dialogue.compact(num_turns)


def _save(dialogue: Dialogue, argument: str) -> None:
    path = _path(argument, "/save")
    _check_replaceable(path)
    _write(path, dialogue.conversation.to_json() + "\n")
    dialogue.output.note(f"saved {len(dialogue.conversation.turns)} turns to {path}")


def _load(dialogue: Dialogue, argument: str) -> None:
    path = _path(argument, "/load")
    loaded = dialogue.format.adopted(Conversation.from_json(read_text(path, "the conversation"), str(path)))
    dialogue.format.closing_tokens(loaded)  # raises if the template refuses it
    dialogue.change(loaded)
    dialogue.output.note(f"{len(loaded.turns)} turns; {notes.room(dialogue.num_used, dialogue.engine.limit)}")


def _stats(dialogue: Dialogue, argument: str) -> None:
    stats, plan = dialogue.engine.stats, dialogue.engine.plan
    if stats is None or plan is None or not stats.output_tokens:
        raise UsageError("there are no numbers before the first reply")
    dialogue.output.table(stats_table(stats, plan))


def _set(dialogue: Dialogue, argument: str) -> None:
    if argument:
        name, _, value = argument.partition(" ")
        if not value.strip():
            raise UsageError(f"name a value: /set {name} VALUE ({dialogue.settings})")
        dialogue.settings = dialogue.settings.changed(name, value.strip())
    dialogue.output.note(str(dialogue.settings))


def _tokens(dialogue: Dialogue, argument: str) -> None:
    parts = dialogue.format.parts(dialogue.conversation)
    dialogue.output.table(notes.parts_table(parts, dialogue.num_used, dialogue.engine.limit))


def _where(dialogue: Dialogue, argument: str) -> None:
    if not dialogue.wanted.cites:
        raise UsageError(
            "/where works in a chat that begins with --cite, and this one does not; triforce chat --cite goes on with "
            "it, by the same --session, or by /save PATH here and /load PATH there"
        )
    if not dialogue.citations:
        raise UsageError("the last reply attended to no document, or there is none yet")
    dialogue.output.note(cited(dialogue.citations))


def _copy(dialogue: Dialogue, argument: str) -> None:
    if argument not in ("", "code"):
        raise UsageError(f"/copy takes nothing or the word code, not {argument!r}")
    if not dialogue.conversation.turns:
        raise UsageError("there is no reply to copy yet")
    prompt = dialogue.format.prompt(dialogue.conversation.regenerate())
    reply = without_thoughts(dialogue.conversation.turns[-1].reply, prompt.marks, begun=prompt.begun)
    copied = last_block(reply) if argument else reply
    if copied is None:
        raise UsageError("the last reply has no code block; /copy copies all of it")
    num_bytes = len(copied.encode("utf-8"))
    if num_bytes > MOST_COPIED_BYTES:
        raise UsageError(f"that is {num_bytes:,} bytes, terminals take {MOST_COPIED_BYTES:,}; /save PATH writes a file")
    dialogue.output.copy(copied)
    what = "the last code block" if argument else "the last reply"
    dialogue.output.note(f"{what}, {counted(len(copied), 'character')}, is sent to the terminal's clipboard (OSC 52)")


def _log(dialogue: Dialogue, argument: str) -> None:
    from triforce_cli.ground.answer_log import AnswerLog

    log = AnswerLog.of_user()
    found, number = log.newest(NUM_LOGGED, argument.split())
    if not found:
        raise UsageError(f"{log.file} has no such entry" if argument else f"nothing is kept in {log.file} yet")
    dialogue.output.table(render_log.table(found, width=dialogue.output.width).rstrip("\n"))
    if len(found) < number:
        dialogue.output.note(f"the newest {len(found)} of {number:,}; triforce log ls lists more")


_ALL = (
    Slash("/help", "this list", _help),
    Slash("/exit", "leave (Ctrl-D)", _exit),
    Slash("/clear", "begin a new conversation; the system message stays", _clear),
    Slash("/undo", "take back the last message and its reply", _undo),
    Slash("/regen", "answer the last message again", _regen),
    Slash("/edit [TEXT]", "change the last message and answer it again", _edit),
    Slash("/system [TEXT|none]", "show or change the system message", _system),
    Slash("/file PATH", "put a document, or a folder, before the next message", _file, takes_path=True),
    Slash("/drop NAME|N", "forget a document, or the N oldest turns", _drop),
    Slash("/compact [N|undo]", "a summary in place of the N oldest turns; documents stay", _compact),
    Slash("/save PATH", "write the conversation to a file", _save, takes_path=True),
    Slash("/load PATH", "go on with a conversation from a file", _load, takes_path=True),
    Slash("/copy [code]", "copy the last reply, or its last code block", _copy),
    Slash("/log [WORDS]", "past questions, or those with WORDS (triforce log)", _log),
    Slash("/where", "places the last reply came from (chat --cite)", _where),
    Slash("/stats", "what the last reply cost", _stats),
    Slash("/set [KEY VALUE]", "show or change temperature, seed, max-tokens ...", _set),
    Slash("/tokens", "what takes how much of the context", _tokens),
)
COMMANDS = {slash.name: slash for slash in _ALL}


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise UsageError(f"{command} needs a path")
    quote = argument[0]
    quoted = len(argument) > 1 and quote in "\"'" and argument.endswith(quote)  # as terminals paste dropped files
    return user_path(argument[1:-1] if quoted else argument)


def _check_replaceable(path: Path) -> None:
    """Raises UsageError if `path` exists and is not a saved conversation: /save must not overwrite another file."""
    if not os.path.exists(path):  # Path.exists raises if the name is too long
        return
    try:
        Conversation.from_json(read_text(path, "the file"), str(path))
    except UsageError as error:
        raise UsageError(f"{path} is there and no saved conversation, so it stays; name another file") from error


def _write(path: Path, text: str) -> None:
    """Write `text` atomically: an older file is replaced only by the complete new one."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
