"""Forms of an answer, files it goes to, an end by the clock, and the log: as processes on the stand-in."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from kit import programs
from offload.errors import TriforceError
from test_cli_fake import environment, fork, run
from triforce_cli import __version__
from triforce_cli.app import main
from triforce_cli.ground import log
from triforce_cli.ground.deadline import Deadline, TimedOut
from triforce_cli.ground.outfile import OutputFile
from triforce_cli.options.answering import destination
from triforce_cli.screen import output

TEXT = {"pieces": ["One", " two", ".\n"], "finish": "stop"}


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(tmp_path)


def events(output: bytes) -> list[dict]:
    return [json.loads(line) for line in output.splitlines()]


class TestEvents:
    def test_tell_what_happens_in_order(self, model):
        done = run("--model", model, "--prompt", "x", "--jsonl", "-q", script=TEXT)
        told = events(done.stdout)
        assert [event.pop("event") for event in told] == ["plan", "prefill", "token", "token", "token", "done"]
        assert told[0]["plan"]["request"]["capacity"] == 257
        assert told[1] == {"prompt_tokens": 1, "reused_tokens": 0, "seconds": 41.5}
        assert [event["text"] for event in told[2:5]] == TEXT["pieces"]
        assert told[2]["tokens"] == list(b"One")
        assert told[5]["finish_reason"] == "stop"
        assert told[5]["stats"]["output_tokens"] == 3
        assert told[5]["version"] == __version__
        assert not {"text", "tokens", "plan"} & set(told[5])

    def test_come_as_they_happen(self, model):
        script = {"pieces": ["first"], "hang": True}
        with fork("--model", model, "--prompt", "x", "--jsonl", script=script, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            names = [json.loads(process.stdout.readline())["event"] for _ in range(3)]
            assert names == ["plan", "prefill", "token"]
            assert process.poll() is None
            process.kill()

    def test_end_with_the_error(self, model):
        done = run(
            "--model", model, "--prompt", "x", "--jsonl", "-q", script={"pieces": ["half"], "fail": "DoesNotFit"}
        )
        said = {"kind": "does-not-fit", "message": "DoesNotFit happened; do something else", "exit_code": 3}
        assert events(done.stdout)[-1] == {"event": "error"} | said
        assert events(done.stderr) == [{"error": said}]
        assert done.returncode == 3

    def test_are_told_of_an_interrupt(self, model):
        script = {"pieces": ["first"], "hang": True}
        with fork("--model", model, "--prompt", "x", "--jsonl", script=script, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(3):
                process.stdout.readline()
            process.send_signal(signal.SIGINT)
            rest = process.stdout.read()
        assert [(event["event"], event["finish_reason"]) for event in events(rest)] == [("done", "interrupted")]
        assert process.returncode == 130

    def test_and_one_object_are_two_things(self, model):
        done = run("--model", model, "--prompt", "x", "--json", "--jsonl")
        assert done.returncode == 2
        assert b"give one of them" in done.stderr


class TestErrorsAsJson:
    def test_where_a_variable_asks_for_it(self, model):
        done = run("--model", model, "--max-tokens", "x", env={"TRIFORCE_JSON": "1"})
        assert events(done.stderr)[0]["error"]["kind"] == "usage"
        assert run("--model", model, "--max-tokens", "x", env={"TRIFORCE_JSON": "0"}).stderr.startswith(b"error: ")

    @pytest.mark.parametrize("form", ["--json", "--jsonl"])
    def test_of_a_bad_command_line(self, form, model):
        done = run("--model", model, form, "--max-tokens", "x")
        assert (done.returncode, done.stdout) == (2, b"")
        (error,) = events(done.stderr)
        assert error["error"]["kind"] == "usage"
        assert "'x' is not a whole number" in error["error"]["message"]

    def test_of_what_nobody_expected_with_its_traceback_when_asked(self, model):
        args = ("--model", model, "--prompt", "x", "--json", "-q")
        script = {"load_fail": "RuntimeError"}
        (error,) = events(run(*args, script=script).stderr)
        assert set(error["error"]) == {"kind", "message", "exit_code"}
        (error,) = events(run(*args, "--debug", script=script).stderr)
        assert "RuntimeError: lost" in error["error"]["traceback"]

    def test_of_other_commands(self, capfd):
        assert main(["sessions", "info", "none-such", "--json"]) == 4
        (error,) = events(capfd.readouterr().err.encode())
        assert error["error"]["kind"] == "session"


class TestEcho:
    def test_text_begins_with_the_prompt(self, model):
        done = run("--model", model, "--echo", "-q", stdin="naïve\n".encode(), script=TEXT)
        assert done.stdout == "naïve\nOne two.\n".encode()

    def test_json_has_it_beside_the_text(self, model):
        done = run("--model", model, "--echo", "--json", "-q", "--prompt", "x", script=TEXT)
        document = json.loads(done.stdout)
        assert (document["prompt"], document["text"]) == ("x", "One two.\n")
        assert "prompt" not in json.loads(run("--model", model, "--json", "--prompt", "x", script=TEXT).stdout)


class TestOutputFile:
    def test_gets_the_text_and_standard_output_nothing(self, model, tmp_path):
        file = tmp_path / "out.txt"
        file.write_text("old")
        done = run("--model", model, "--prompt", "x", "-o", str(file), script=TEXT | {"line_seconds": 0})
        assert (done.returncode, done.stdout, file.read_bytes()) == (0, b"", b"One two.\n")
        assert b"decode: " in done.stderr  # nobody sees the text come
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out.txt"]

    def test_gets_json_and_events(self, model, tmp_path):
        file = tmp_path / "out"
        run("--model", model, "--prompt", "x", "-o", str(file), "--json", script=TEXT)
        assert json.loads(file.read_text())["text"] == "One two.\n"
        run("--model", model, "--prompt", "x", "-o", str(file), "--jsonl", script=TEXT)
        assert events(file.read_bytes())[-1]["event"] == "done"

    def test_dash_is_standard_output(self, model):
        assert run("--model", model, "--prompt", "x", "-o", "-", script=TEXT).stdout == b"One two.\n"

    @pytest.mark.parametrize("name", ["-", "/dev/stdout"])
    def test_standard_output_has_two_names(self, name):
        assert destination(Path(name)) is None

    def test_that_is_a_pipe_gets_the_text_and_stays_a_pipe(self, model, tmp_path):
        """It was replaced by a file; so would a device have been, for a root user."""
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
            done = run("--model", model, "--prompt", "x", "-o", str(pipe), script=TEXT)
            if not pipe.is_fifo():
                reader.kill()
            assert (done.returncode, reader.communicate()[0]) == (0, b"One two.\n")
        assert pipe.is_fifo()

    def test_that_is_a_link_stays_a_link(self, model, tmp_path):
        file, link = tmp_path / "file", tmp_path / "link"
        file.write_text("old")
        link.symlink_to("file")
        assert run("--model", model, "--prompt", "x", "-o", str(link), script=TEXT).returncode == 0
        assert (link.is_symlink(), file.read_text()) == (True, "One two.\n")

    def test_of_two_runs_the_second_is_refused(self, model, tmp_path):
        """Their texts were mixed, and the first ended with an unexpected FileNotFoundError."""
        args = ("--model", model, "--prompt", "x", "-o", str(tmp_path / "out"))
        with OutputFile(tmp_path / "out", note=str) as file:
            file.write(b"first")
            second = run(*args, script=TEXT)
        assert second.returncode == 2
        assert b"out is being written by another process" in second.stderr
        assert (tmp_path / "out").read_bytes() == b"first"

    def test_that_was_finished_while_another_run_opened_it_is_left_alone(self, tmp_path, monkeypatch):
        first = OutputFile(tmp_path / "out", note=str).__enter__()
        first.write(b"first")

        def finish_first(file: object, how: int) -> None:
            monkeypatch.undo()
            first.__exit__(None, None, None)

        monkeypatch.setattr("triforce_cli.ground.outfile.fcntl.flock", finish_first)
        second = OutputFile(tmp_path / "out", note=str).__enter__()
        second.write(b"second")
        assert (tmp_path / "out").read_bytes() == b"first"
        assert (tmp_path / "out.partial").read_bytes() == b"second"

    def test_what_an_interrupt_left_stays_until_there_is_something_new(self, model, tmp_path):
        """A second run that could not even begin took it away."""
        file, partial = tmp_path / "out", tmp_path / "out.partial"
        partial.write_text("an hour's work")
        args = ("--model", model, "--prompt", "x", "-o", str(file), "-q")
        assert run(*args, script={"load_fail": "ModelError"}).returncode == 4
        assert partial.read_text() == "an hour's work"
        assert run(*args, script={"pieces": ["new"], "fail": "TriforceError"}).returncode == 1
        assert partial.read_text() == "new"
        assert run(*args, script={"pieces": [""]}).returncode == 0
        assert (file.read_text(), partial.exists()) == ("", False)

    def test_an_old_file_stays_until_the_new_one_is_whole(self, model, tmp_path):
        file = tmp_path / "out.txt"
        file.write_text("old")
        done = run(
            *("--model", model, "--prompt", "x", "-o", str(file), "-q"),
            script={"pieces": ["half"], "fail": "TriforceError"},
        )
        assert done.returncode == 1
        assert file.read_text() == "old"
        assert (tmp_path / "out.txt.partial").read_text() == "half"

    def test_what_came_before_an_interrupt_is_kept_and_said(self, model, tmp_path):
        file = tmp_path / "out.txt"
        script = {"pieces": ["half"], "hang": True, "tells": True}
        args = ("--model", model, "--prompt", "x", "-o", str(file))
        with fork(*args, script=script, stderr=subprocess.PIPE) as process:
            assert process.stderr is not None
            while b"decode" not in process.stderr.readline():
                pass
            process.send_signal(signal.SIGINT)
            said = process.stderr.read()
        assert process.returncode == 130
        assert (tmp_path / "out.txt.partial").read_text() == "half"
        assert f"what came until then is in {file}.partial".encode() in said

    def test_what_failed_before_it_began_leaves_nothing(self, model, tmp_path):
        args = ("--model", model, "--prompt", "x", "-o", str(tmp_path / "out"))
        assert run(*args, script={"load_fail": "ModelError"}).returncode == 4
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("name", "reason"),
        [("none/out", "No such file"), (".", "it is a folder"), ("/", "it is a folder"), ("x" * 300, "too long")],
    )
    def test_what_cannot_be_written_is_found_first(self, name, reason, model, tmp_path):
        args = ("--model", model, "--prompt", "x", "-o", str(tmp_path / name))
        done = run(*args, script={"load_fail": "ModelError"})
        assert done.returncode == 2
        assert reason in done.stderr.decode()

    def test_a_full_disk_is_told(self, tmp_path, monkeypatch):
        (tmp_path / "out.partial").symlink_to("/dev/full")
        with pytest.raises(TriforceError, match="No space left"), OutputFile(tmp_path / "out", note=str) as file:
            file.write(b"x")
        assert not (tmp_path / "out").exists()


class TestTimeout:
    def test_hands_over_what_has_come(self, model):
        script = {"pieces": ["a"] * 1000, "piece_seconds": 0.25, "pretended": True}
        done = run("--model", model, "--prompt", "x", "--json", "-q", "--timeout", "3", script=script)
        document = json.loads(done.stdout)
        assert done.returncode == 124
        assert document["finish_reason"] == "timeout"
        assert len(document["text"]) == 13  # the first takes no time
        assert events(done.stderr)[0]["error"]["kind"] == "timeout"

    def test_ends_a_long_prefill(self, model):
        script = {"prefill_ticks": 100, "tick_seconds": 0.1}
        done = run("--model", model, "--prompt", "x", "--timeout", "0.3", script=script)
        assert (done.returncode, done.stdout) == (124, b"")
        assert "error: the 0.3 s of --timeout are over" in done.stderr.decode()

    def test_comes_after_the_item_at_which_it_is_over(self):
        seconds = iter([0.0, 1.0, 2.0, 3.0])
        deadline = Deadline(2.0, clock=lambda: next(seconds))
        items = deadline.within("abcd", is_end=lambda item: False)
        assert next(items) == "a"
        assert next(items) == "b"
        with pytest.raises(TimedOut, match="the 2 s"):
            next(items)

    def test_does_not_come_after_the_item_that_ends_them(self):
        """A whole text ended with 124 where its last token took the time that was left."""
        deadline = Deadline(2.0, clock=iter([0.0, 1.0, 9.0]).__next__)
        assert list(deadline.within("ab", is_end=lambda item: item == "b")) == ["a", "b"]

    def test_of_a_text_that_has_to_follow_something_is_124_too(self, model):
        script = {"pieces": ["a"] * 1000, "piece_seconds": 0.25, "pretended": True}
        more = ("--regex", "a+", "--timeout", "3")
        assert run("--model", model, "--prompt", "x", "-q", *more, script=script).returncode == 124

    def test_never_where_there_is_none(self):
        never = Deadline(None, clock=lambda: 1e300)
        assert list(never.within("abc", is_end=lambda item: False)) == ["a", "b", "c"]

    @pytest.mark.parametrize("seconds", ["0", "-1", "nan", "1e10"])
    def test_has_limits(self, seconds, model):
        done = run("--model", model, "--prompt", "x", "--timeout", seconds)
        assert done.returncode == 2
        assert b"timeout is " in done.stderr


class TestLog:
    def test_has_stages_plan_numbers_and_no_text(self, model, tmp_path):
        file = tmp_path / "log"
        script = TEXT | {"notes": ["a note"]}
        for _ in range(2):
            done = run("--model", model, "--prompt", "SECRET", "--log-file", str(file), "-q", script=script)
            assert (done.returncode, done.stderr) == (0, b"")
        said = file.read_text()
        assert "SECRET" not in said
        assert "One" not in said
        for part in (f"triforce {__version__}: generate", " a note\n", "prefill done", 'plan {"', "ended (stop) {"):
            assert said.count(part) == 2, part

    def test_has_the_traceback_that_the_screen_has_not(self, model, tmp_path):
        file = tmp_path / "log"
        done = run("--model", model, "--prompt", "x", "--log-file", str(file), script={"load_fail": "RuntimeError"})
        assert b"Traceback" not in done.stderr
        assert "Traceback" in file.read_text()
        assert "RuntimeError: lost" in file.read_text()

    def test_that_cannot_be_written_is_told(self, model, tmp_path):
        done = run("--model", model, "--prompt", "x", "--log-file", str(tmp_path / "none" / "log"))
        assert done.returncode == 2
        assert b"No such file" in done.stderr

    def test_on_a_full_disk_disturbs_nothing(self, model):
        done = run("--model", model, "--prompt", "x", "--log-file", "/dev/full", "-q", script=TEXT)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"One two.\n", b"")

    def test_ends_with_the_command(self, tmp_path, capfd):
        assert main(["sessions", "ls", "--log-file", str(tmp_path / "log")]) == 0
        before = (tmp_path / "log").read_text()
        assert main(["sessions", "ls"]) == 0
        log.event("nobody hears this")
        assert (tmp_path / "log").read_text() == before
        assert "nobody" not in capfd.readouterr().err


def test_version_names_what_runs(capfd):
    assert main(["version"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capfd.readouterr().out.splitlines())
    assert rows["triforce"].startswith(f"{__version__}, Python ")
    assert {"torch", "driver", "attention"} <= set(rows)
    assert main(["version", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["version"] == __version__


class TestCompletion:
    def complete(self, shell: str, **variables: str) -> str:
        return programs.run([], env=environment(_TRIFORCE_COMPLETE=f"complete_{shell}") | variables).stdout

    def test_in_bash(self):
        assert self.complete("bash", COMP_WORDS="triforce gen", COMP_CWORD="1").split() == ["generate"]
        found = self.complete("bash", COMP_WORDS="triforce generate --output", COMP_CWORD="2").split()
        assert sorted(found) == ["--output", "--output-jsonl"]

    @pytest.mark.parametrize("shell", ["zsh", "fish"])
    def test_in_other_shells(self, shell):
        words = "triforce sessions pr"
        found = self.complete(shell, _TYPER_COMPLETE_ARGS=words, _TYPER_COMPLETE_FISH_ACTION="get-args")
        assert "prune" in found
        assert "ls" not in found.split()

    @pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
    def test_the_script_of_a_shell_is_shown(self, shell):
        done = programs.run([], env=environment(_TRIFORCE_COMPLETE=f"source_{shell}"))
        assert f"_TRIFORCE_COMPLETE=complete_{shell}" in done.stdout
        if shell == "bash":
            assert subprocess.run(["bash", "-n"], input=done.stdout, text=True).returncode == 0
        assert os.sep not in done.stdout.split("triforce")[0]


@pytest.mark.parametrize("stuck", [False, True])
def test_what_follows_an_interrupt_is_lost_only_where_nobody_reads(stuck, monkeypatch):
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as reader, os.fdopen(writing, "w") as stream:
        flush = stream.flush

        def interrupted() -> None:
            if not stuck:
                flush()
            raise KeyboardInterrupt

        if stuck:
            os.set_blocking(writing, False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(writing, bytes(4096))
        monkeypatch.setattr(stream, "flush", interrupted)
        with pytest.raises(KeyboardInterrupt):
            output._write(stream, b"first")
        monkeypatch.undo()
        if stuck:
            assert os.fstat(writing).st_rdev == os.stat(os.devnull).st_rdev
        else:
            output._write(stream, b", last")
            assert reader.read(100) == b"first, last"
