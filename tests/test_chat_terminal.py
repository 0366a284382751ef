"""A chat as a person at a terminal has it, and as a pipe does."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kit.models import byte_tokenizer, random_model, save
from kit.programs import ProgramTerminal, run
from kit.terminals import ALT_ENTER, CTRL_C, CTRL_D, CTRL_U, ENTER, PROMPT_BEGINS, TAB, UP, Terminal, plain
from triforce_cli.prompts.conversation import Conversation

ROOT = Path(__file__).resolve().parent.parent
CONTEXT = 12288
LONG = "all work and no play " * 450  # tokens are bytes: a prefill of seconds
SETTINGS = ("--temperature", "0", "--dtype", "fp32", "--draft", "none")
COLOR = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3[0-7]|4[0-7]|9[0-7]|10[0-7]|38|48)[;m]")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It says letters, whatever it is asked, and never ends by itself."""
    model = random_model(vocab_size=264, seed=11, max_position_embeddings=CONTEXT)
    tokenizer = byte_tokenizer()
    letters = tokenizer.convert_tokens_to_ids(tokenizer.tokenize("abcdefghijklmnopqrstuvwxyz"))
    said = torch.zeros(264, 1)
    said[letters] = 1
    with torch.no_grad():
        model.lm_head.weight.mul_(said)
    return save(model, tmp_path_factory.mktemp("letters"), tokenizer=True)


def arguments(model: Path, *args: str) -> list[str]:
    return ["chat", "--model", str(model), *SETTINGS, *args]


def environment(state: Path, **more: str) -> dict[str, str]:
    mine = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    own = {"XDG_STATE_HOME": str(state), "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
    return {**mine, **own, **more}


Open = Callable[..., Terminal]


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Open]:
    """Another chat, at its first prompt: start(*args, rows=, columns=, **environment)."""
    opened = []

    def open_chat(*args: str, rows: int = 24, columns: int = 80, **more: str) -> Terminal:
        env = environment(tmp_path, **more)
        terminal = ProgramTerminal(arguments(model, *args), env=env, rows=rows, columns=columns)
        opened.append(terminal)
        terminal.until_prompt(1)
        return terminal

    yield open_chat
    for terminal in opened:
        terminal.close()


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Terminal]]:
    """The chat that most tests have in turn, since starting takes seconds."""
    folder = tmp_path_factory.mktemp("shared")
    running: list[Terminal] = []

    def at_prompt() -> list[Terminal]:
        if not running or not running[0].is_alive:
            running[:] = [ProgramTerminal(arguments(model, "--max-tokens", "40"), env=environment(folder))]
            running[0].until_prompt(1)
        return running

    yield at_prompt()
    for terminal in running:
        terminal.close()


@pytest.fixture
def chat(shared: list[Terminal]) -> Terminal:
    """At the prompt of a new conversation, 80 columns wide, replies of 40 letters."""
    (terminal,) = shared
    assert terminal.is_alive, "a test before this one has ended the chat"
    terminal.resize(24, 80)
    terminal.ask(CTRL_U * 9 + "/clear")
    terminal.ask("/system none")
    terminal.ask("/set max-tokens 40")
    return terminal


def saved(chat: Terminal, folder: Path) -> Conversation:
    """The conversation, as /save writes it."""
    path = folder / "saved.json"
    assert "saved" in chat.ask(f"/save {path}")
    return Conversation.from_json(path.read_text(), str(path))


def questions(conversation: Conversation) -> list[str]:
    return [turn.user for turn in conversation.turns]


def message_line(chat: Terminal) -> str:
    """The line that is being edited."""
    return next(line for line in reversed(chat.lines) if line.startswith(">"))


# A conversation


def test_a_conversation_is_taken_back_answered_again_and_edited(chat: Terminal, tmp_path: Path) -> None:
    first = chat.ask("one")
    second = chat.ask("two")
    before = saved(chat, tmp_path)
    assert questions(before) == ["one", "two"]
    assert all(turn.reply in shown for turn, shown in zip(before.turns, (first, second), strict=True))
    assert all(len(turn.reply) == 40 and not turn.complete for turn in before.turns)

    assert chat.ask("/regen").split()[0] == second.split()[0]
    assert saved(chat, tmp_path) == before

    chat.ask("/edit three")
    edited = saved(chat, tmp_path)
    assert questions(edited) == ["one", "three"]
    assert edited.turns[0] == before.turns[0]
    assert edited.turns[1].reply != before.turns[1].reply

    chat.ask("/undo")
    chat.until_shown("> three")
    assert questions(saved_after_clearing_the_line(chat, tmp_path)) == ["one"]


def saved_after_clearing_the_line(chat: Terminal, folder: Path) -> Conversation:
    chat.send(CTRL_U)
    return saved(chat, folder)


def test_edit_brings_the_last_message_back_to_be_edited(chat: Terminal, tmp_path: Path) -> None:
    chat.ask("a long questio")
    chat.ask("/edit")
    chat.until(lambda: message_line(chat) == "> a long questio", "the message")
    chat.ask("n")
    assert questions(saved(chat, tmp_path)) == ["a long question"]


def test_a_message_that_begins_with_a_slash_comes_back_as_it_was_typed(chat: Terminal, tmp_path: Path) -> None:
    """/undo offered "/etc", which is a command that there is not."""
    chat.ask("//etc")
    assert questions(saved(chat, tmp_path)) == ["/etc"]
    chat.ask("/undo")
    chat.until(lambda: message_line(chat).endswith("etc"), "the message")
    assert "no command" not in chat.ask("")
    assert questions(saved(chat, tmp_path)) == ["/etc"]


def stop_a_reply(chat: Terminal) -> str:
    """Send "go", and Ctrl-C when two lines of the reply are there; what was written."""
    chat.ask("/set max-tokens 6000")
    number = chat.num_prompts + 1
    chat.send("go" + ENTER)
    chat.until(lambda: re.search("[a-z]{80}", chat.shown), "a reply")
    assert chat.num_prompts == number - 1
    chat.send(CTRL_C)
    chat.until_prompt(number)
    written = chat.reply
    chat.ask("/set max-tokens 40")
    return written


def test_ctrl_c_in_a_reply_keeps_what_came(chat: Terminal, tmp_path: Path) -> None:
    written = stop_a_reply(chat)
    assert "stopped" in written
    (turn,) = saved(chat, tmp_path).turns
    assert 80 <= len(turn.reply) < 6000
    assert not turn.complete
    assert turn.reply + "\n" in written.replace("^C", "")
    counted = re.search(r"turn 1 +([\d,]+)", chat.ask("/tokens"))
    assert counted is not None
    assert int(counted[1].replace(",", "")) >= len(turn.reply)
    assert re.match("[a-z]{40}\n", chat.ask("go on"))
    assert questions(saved(chat, tmp_path)) == ["go", "go on"]


def test_a_stopped_reply_has_numbers_too(chat: Terminal) -> None:
    """/stats knew of no reply after one that was stopped."""
    stop_a_reply(chat)
    assert "ms/token" in chat.toolbar
    assert "plan" in chat.ask("/stats")


def test_ctrl_c_at_the_prompt_clears_the_line_only(chat: Terminal, tmp_path: Path) -> None:
    chat.ask("one")
    number = chat.num_prompts + 1
    chat.type("half a mess")
    chat.send(CTRL_C)
    chat.until_prompt(number)
    assert message_line(chat) == ">"
    assert questions(saved(chat, tmp_path)) == ["one"]


def test_keys_typed_before_the_first_prompt_are_in_it_and_not_beside_the_spinner(model: Path, tmp_path: Path) -> None:
    """The screen kept "startingWhat is" above the prompt."""
    terminal = ProgramTerminal(arguments(model), env=environment(tmp_path))
    try:
        terminal.until(lambda: "starting" in terminal.written, "the spinner")
        terminal.send("What is")
        terminal.until_prompt(1)
        terminal.until_shown("> What is")
    finally:
        terminal.close()
    assert terminal.written.count("What is") == 1
    assert "What is" not in terminal.written.partition(PROMPT_BEGINS)[0]


def test_keys_typed_while_a_reply_streams_are_in_the_next_prompt_and_not_in_the_reply(
    chat: Terminal, tmp_path: Path
) -> None:
    chat.ask("/set max-tokens 400")
    number = chat.num_prompts
    chat.send("go" + ENTER)
    chat.until(lambda: re.search("[a-z]{40}", chat.reply), "the beginning of the reply")
    chat.send("AND THEB\x7fN" + ALT_ENTER + "MORE")
    chat.until_prompt(number + 1)
    assert re.match("[a-z]{400}\n", chat.reply)
    chat.until_shown("MORE")
    chat.send(ENTER)
    chat.until_prompt(number + 2)
    assert questions(saved(chat, tmp_path)) == ["go", "AND THEN\nMORE"]


# Long texts


def test_a_long_document_is_read_while_the_person_types(chat: Terminal, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(LONG)
    added = chat.ask(f"/file {tmp_path / 'book.txt'}")
    assert re.search(r"book\.txt: 9,\d{3} tokens; 9,\d{3} of 12,288 tokens of context used, [\d,]+ left", added)
    chat.until(lambda: re.search(r"prefill \d+%", chat.toolbar), "how far the prefill is")
    chat.type("what does he do")
    number = chat.num_prompts + 1
    chat.send(ENTER)
    bar = r"prefill .* *\d+% of 9,\d{3} tokens, [\d,]+ tokens/s, [\d.]+ m?s left"
    chat.until(lambda: any(re.match(bar, line) for line in chat.lines), "percent, speed and time left")
    chat.until_prompt(number)
    assert not any(line.startswith("prefill") for line in chat.lines)
    assert re.search("^[a-z]{40}$", chat.shown, re.MULTILINE)
    assert "ms/token" in chat.toolbar
    new = re.search(r"prompt .* ([\d,]+) of 9,\d{3} new", chat.ask("/stats"))
    assert new is not None
    assert int(new[1]) < 100


def test_commands_do_not_begin_the_prefill_anew(chat: Terminal, tmp_path: Path) -> None:
    """Every command, every Ctrl-C and every empty line threw away what had been read of a document."""
    (tmp_path / "book.txt").write_text(LONG)
    chat.ask(f"/file {tmp_path / 'book.txt'}")

    def percent() -> int:
        found = re.search(r"prefill (\d+)%", chat.toolbar)
        return int(found[1]) if found else 0

    chat.until(lambda: percent() >= 20, "a fifth of it")
    seen = percent()
    chat.ask("/set")
    begin = len(chat.written)
    chat.ask("what is it")
    bars = re.findall(r"prefill \S+ +(\d+)% of", plain(chat.written[begin:]))
    assert min(map(int, bars), default=100) >= seen


def test_ctrl_c_before_the_first_word_gives_the_message_back(chat: Terminal, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(LONG)
    chat.ask(f"/file {tmp_path / 'book.txt'}")
    number = chat.num_prompts + 1
    chat.send("what is it" + ENTER)
    chat.until(lambda: any(line.startswith("prefill") for line in chat.lines), "the bar")
    chat.send(CTRL_C)
    chat.until_prompt(number)
    assert "stopped before the first word" in chat.reply
    assert message_line(chat) == "> what is it"
    chat.ask("?")
    assert questions(saved(chat, tmp_path)) == ["what is it?"]


def test_a_full_context_says_so_before_and_forgets_nothing(start: Open, tmp_path: Path) -> None:
    chat = start("--context", "512", "--max-tokens", "60", "--no-history", NO_COLOR="1")
    (tmp_path / "big").write_text("x" * 600)
    assert re.search(
        "error: .* tokens are needed and the context ends at 512", joined(chat.ask(f"/file {tmp_path}/big"))
    )
    (tmp_path / "notes").write_text("x" * 200)
    assert "nearly full" not in chat.ask(f"/file {tmp_path / 'notes'}")
    warned = ""
    while "nearly full" not in warned:
        warned = joined(chat.ask("go on"))
        assert "error" not in warned
    assert "/drop notes frees" in warned
    before = saved(chat, tmp_path)
    refused = joined(chat.ask("y" * 300))
    assert re.search(r"error: \d+ tokens are needed and the context ends at 512; /drop notes frees 2\d\d", refused)
    chat.until(lambda: "yyyyy" in chat.shown.rpartition(">")[2], "the message, to be edited")
    chat.send(CTRL_U * 9)
    assert saved(chat, tmp_path) == before
    assert re.search(r"\d+ of 512 tokens of context used, [23]\d\d left", joined(chat.ask("/drop notes")))
    assert re.match("[a-z]{60}\n", chat.ask("go on"))
    assert questions(saved(chat, tmp_path))[:-1] == questions(before)
    # NO_COLOR, --no-history
    chat.send(CTRL_D)
    assert chat.finish() == 0
    assert COLOR.search(chat.written) is None
    assert not list(tmp_path.rglob("chat_history"))


def joined(written: str) -> str:
    """Without the line ends between words."""
    return re.sub(r"\s+", " ", written)


# The window


def test_a_narrow_window_shows_the_line_and_the_status(chat: Terminal) -> None:
    chat.resize(10, 30)
    chat.ask("one")
    chat.until(lambda: len(chat.toolbar) <= 30 and chat.toolbar.endswith("…"), "a toolbar that was cut")
    chat.type("words that are together longer than thirty columns")
    assert any(line.startswith("> words that are") for line in chat.lines)
    chat.until(lambda: chat.toolbar.startswith("context"), "the toolbar, which is drawn last")


def test_resizing_while_typing_keeps_the_line(chat: Terminal, tmp_path: Path) -> None:
    typed = "words that are together longer than thirty columns"
    chat.type(typed)
    chat.resize(24, 30)
    chat.until(lambda: "".join(chat.lines).count("columns") == 1 and len(chat.toolbar) <= 30, "the line in two")
    chat.resize(24, 120)
    chat.until(lambda: message_line(chat) == f"> {typed}", "the line in one")
    chat.ask("")
    assert questions(saved(chat, tmp_path)) == [typed]


def test_resizing_while_a_reply_streams_loses_nothing(chat: Terminal, tmp_path: Path) -> None:
    chat.ask("/set max-tokens 2000")
    number = chat.num_prompts + 1
    chat.send("go" + ENTER)
    chat.until(lambda: re.search("[a-z]{80}", chat.shown), "a reply")
    assert chat.num_prompts == number - 1
    chat.resize(24, 30)
    chat.until_prompt(number)
    (turn,) = saved(chat, tmp_path).turns
    assert len(turn.reply) == 2000


# The line editor


def test_alt_enter_begins_a_new_line(chat: Terminal, tmp_path: Path) -> None:
    chat.type("first")
    chat.send(ALT_ENTER)
    chat.ask("second")
    assert questions(saved(chat, tmp_path)) == ["first\nsecond"]


def test_enter_between_triple_quotes_begins_a_new_line(chat: Terminal, tmp_path: Path) -> None:
    chat.type('"""first')
    chat.send(ENTER)
    chat.ask('second"""')
    assert questions(saved(chat, tmp_path)) == ["first\nsecond"]


def test_pasted_lines_are_one_message(chat: Terminal, tmp_path: Path) -> None:
    chat.send("\x1b[200~first\nsecond\n\x1b[201~")
    chat.until_shown("second")
    chat.ask("third")
    assert questions(saved(chat, tmp_path)) == ["first\nsecond\nthird"]


def test_commands_and_paths_are_completed(chat: Terminal, tmp_path: Path) -> None:
    chat.send("/st" + TAB)
    chat.until(lambda: message_line(chat) == "> /stats", "the command")
    chat.send(CTRL_U + "/s" + TAB)
    chat.until_shown("show or change the system message")
    chat.send(CTRL_U)
    (tmp_path / "remarkable.txt").write_text("x")
    chat.send(f"/file {tmp_path}/rem" + TAB)
    chat.until(lambda: "remarkable.txt" in re.sub(r"\s", "", chat.shown), "the path")
    assert "remarkable.txt: " in chat.ask("")


# Commands


def test_save_and_load_go_round(chat: Terminal, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("something")
    chat.ask("/system be brief")
    chat.ask(f"/file {tmp_path / 'notes'}")
    chat.ask("one")
    chat.ask("two")
    before = saved(chat, tmp_path)
    reply = chat.ask("three")
    chat.ask("/clear")
    chat.ask("/system none")
    chat.ask(f"/load {tmp_path / 'saved.json'}")
    assert saved(chat, tmp_path) == before
    assert before.system == "be brief"
    assert before.turns[0].documents[0].text == "something"
    assert chat.ask("three") == reply


def test_load_refuses_what_is_no_conversation_and_keeps_this_one(chat: Terminal, tmp_path: Path) -> None:
    chat.ask("one")
    before = saved(chat, tmp_path)
    (tmp_path / "other").write_text("{}")
    assert "is not a saved conversation" in joined(chat.ask(f"/load {tmp_path / 'other'}"))
    assert "cannot be read" in joined(chat.ask(f"/load {tmp_path / 'nowhere'}"))
    assert saved(chat, tmp_path) == before


def test_the_system_message_is_shown_changed_and_taken_away(chat: Terminal, tmp_path: Path) -> None:
    assert "system message: none" in chat.ask("/system")
    assert "system message: be brief" in chat.ask("/system be brief")
    assert saved(chat, tmp_path).system == "be brief"
    assert re.search(r"system +\d+", chat.ask("/tokens"))
    assert "system message: none" in chat.ask("/system none")


def test_settings_are_checked(chat: Terminal, tmp_path: Path) -> None:
    assert "there is no setting 'nonsense'" in joined(chat.ask("/set nonsense 1"))
    assert "must be above 0 and at most 1" in joined(chat.ask("/set top-p 7"))
    assert "must be a whole number" in joined(chat.ask("/set max-tokens x"))
    assert "max-tokens 40" in joined(chat.ask("/set"))
    assert "max-tokens 7" in joined(chat.ask("/set max-tokens 7"))
    chat.ask("one")
    assert len(saved(chat, tmp_path).turns[0].reply) == 7


def test_an_unknown_command_is_not_sent(chat: Terminal, tmp_path: Path) -> None:
    assert "there is no command /nope; /exit leaves, /help lists all" in joined(chat.ask("/nope"))
    assert saved(chat, tmp_path).turns == ()


def test_help_fits_and_names_every_command(chat: Terminal) -> None:
    text = chat.ask("/help")
    for name in ("/exit", "/undo", "/regen", "/edit", "/file", "/drop", "/tokens", "Alt-Enter", "Ctrl-C"):
        assert name in text
    assert max(map(len, text.splitlines())) <= 80


# The process


def test_stats_come_with_the_first_reply_and_ctrl_d_leaves_the_terminal_as_it_was(model: Path, tmp_path: Path) -> None:
    """Standard output is a file here: it holds replies, and nothing else."""
    with (tmp_path / "replies").open("wb") as replies:
        args = arguments(model, "--max-tokens", "40")
        terminal = ProgramTerminal(args, env=environment(tmp_path), stdout=replies.fileno())
    try:
        terminal.until_prompt(1)
        assert not terminal.is_as_it_was
        assert "there are no numbers before the first reply" in terminal.ask("/stats")
        terminal.ask("one")
        terminal.ask("//two")
        assert "plan" in terminal.ask("/stats")
        terminal.send(CTRL_D)
        terminal.until_ended()
        assert terminal.is_as_it_was
        assert terminal.finish() == 0
    finally:
        terminal.close()
    assert not terminal.is_cursor_hidden
    assert terminal.written.rindex("\x1b[?2004l") > terminal.written.rindex("\x1b[?2004h")
    assert re.fullmatch("[a-z]{40}\n[a-z]{40}\n", (tmp_path / "replies").read_text())
    assert not re.search("[a-z]{40}", terminal.shown)
    (history,) = tmp_path.rglob("chat_history")
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_what_was_typed_comes_back_in_the_next_run_and_is_for_its_owner_only(start: Open, tmp_path: Path) -> None:
    history = tmp_path / "triforce" / "chat_history"
    history.parent.mkdir()
    history.write_text("\n# 2026-01-01 00:00:00\n+something typed before\n")
    history.chmod(0o600)
    chat = start("--max-tokens", "8")
    chat.send(UP)
    chat.until_shown("> something typed before")
    chat.ask(" and more")
    chat.send("/exit" + ENTER)
    assert chat.finish() == 0
    assert "+something typed before and more" in history.read_text()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_a_dumb_terminal_gets_no_control_sequences(model: Path, tmp_path: Path) -> None:
    terminal = ProgramTerminal(arguments(model, "--max-tokens", "40"), env=environment(tmp_path, TERM="dumb"))
    try:
        terminal.until(lambda: terminal.shown.endswith("\n>"), "the prompt")
        terminal.send("one" + ENTER)
        terminal.until(lambda: re.search("[a-z]{40}", terminal.shown), "the reply")
        terminal.until(lambda: terminal.shown.endswith("\n>"), "the prompt")
        terminal.send("/exit" + ENTER)
        assert terminal.finish() == 0
    finally:
        terminal.close()
    assert "\x1b" not in terminal.written.replace("\x1b[?2004l", "")  # that it never switched on


# A pipe


def piped(model: Path, folder: Path, lines: str, *args: str) -> subprocess.CompletedProcess[str]:
    return run(arguments(model, "--max-tokens", "40", *args), env=environment(folder), stdin=lines)


def test_a_pipe_gets_a_reply_per_line_and_nothing_else(model: Path, tmp_path: Path) -> None:
    done = piped(model, tmp_path, f'one\n\n/tokens\n"""two\nlines"""\n//three\n/save {tmp_path}/saved.json\n')
    assert done.returncode == 0, done.stderr
    assert re.fullmatch("([a-z]{40}\n){3}", done.stdout)
    assert "turn 1" in done.stderr
    assert "\x1b" not in done.stderr
    saved = Conversation.from_json((tmp_path / "saved.json").read_text(), "saved")
    assert questions(saved) == ["one", "two\nlines", "/three"]
    assert done.stdout.split() == [turn.reply for turn in saved.turns]
    assert not list(tmp_path.rglob("chat_history"))


def test_an_error_in_a_pipe_ends_it_and_keeps_the_replies_so_far(model: Path, tmp_path: Path) -> None:
    done = piped(model, tmp_path, "one\n/set top-p 7\ntwo\n")
    assert done.returncode == 2
    assert re.fullmatch("[a-z]{40}\n", done.stdout)
    assert "error: top-p is 7.0" in done.stderr
    assert plain(done.stderr) == done.stderr
