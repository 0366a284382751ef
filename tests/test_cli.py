"""`triforce generate` as a process among others: streams, pipes, signals, exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kit import programs
from test_cli_fake import ROOT, command, environment, fork, run, start
from triforce_cli import __version__

PIPES = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(tmp_path)


def shell(line: str, *args: str, script: dict | None = None, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run `line`, in which "$@" is `triforce generate ARGS` on the stand-in."""
    return subprocess.run(
        ["bash", "-c", line, "bash", *command(*args)],
        env=environment(script, **variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )


def read_until(process: subprocess.Popen[bytes], text: bytes) -> bytes:
    """The output of `process` up to `text`; it keeps running."""
    assert process.stdout is not None
    data = b""
    while not data.endswith(text):
        byte = process.stdout.read(1)
        assert byte, f"the stream ended at {data!r}"
        data += byte
    return data


class TestText:
    def test_is_all_there_is_on_standard_output(self, model):
        done = run("--model", model, "--prompt", "x", script={"pieces": ["One", " two", ".\n"]})
        assert (done.returncode, done.stdout) == (0, b"One two.\n")

    def test_gets_no_newline_in_a_pipe(self, model):
        done = run("--model", model, "--prompt", "x", script={"pieces": ["no newline"]})
        assert done.stdout == b"no newline"

    def test_appears_as_it_is_accepted(self, model):
        with fork("--model", model, "--prompt", "x", script={"pieces": ["first"], "hang": True}, **PIPES) as process:
            assert read_until(process, b"first") == b"first"
            assert process.poll() is None
            process.kill()

    @pytest.mark.parametrize(
        "locale",
        [
            pytest.param({"LC_ALL": "C"}, marks=pytest.mark.deep),  # Python itself makes it another
            {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        ],
    )
    def test_is_utf8_in_any_locale(self, locale, model):
        script = {"pieces": ["naïve ", "€ 😀"], "notes": ["a note: é"]}
        done = run("--model", model, "--prompt", "x", "--stats", script=script, env=locale, how=start)
        assert (done.returncode, done.stdout) == (0, "naïve € 😀".encode())

    def test_reaches_a_full_disk_with_a_plain_message(self, model):
        done = shell('"$@" > /dev/full', "--model", model, "--prompt", "x", "--quiet")
        assert done.returncode == 1
        assert done.stderr == b"error: the text cannot be written to standard output: No space left on device\n"


class TestClosedPipe:
    def test_ends_quietly_with_0(self, model):
        line = 'set -o pipefail; "$@" --quiet | head -c 5'
        done = shell(line, "--model", model, "--prompt", "x", script={"pieces": ["0123456789"], "endless": True})
        assert (done.returncode, done.stdout, done.stderr) == (0, b"01234", b"")

    def test_of_json_ends_quietly(self, model):
        line = 'set -o pipefail; "$@" --quiet --json | true'
        done = shell(line, "--model", model, "--prompt", "x", script={"pieces": ["x" * 100_000]})
        assert (done.returncode, done.stderr) == (0, b"")

    def test_of_standard_error_ends_quietly(self, model):
        line = 'set -o pipefail; "$@" 2>&1 >/dev/null | true; echo ${PIPESTATUS[0]}'
        script = {"ticks": 20, "tick_seconds": 0.005}
        done = shell(line, "--model", model, "--prompt", "x", script=script)
        assert done.stdout == b"0\n"

    @pytest.mark.parametrize("redirection", [">&-", pytest.param(">&- 2>&-", marks=pytest.mark.deep)])
    def test_from_the_start_ends_quietly(self, redirection, model):
        done = shell(f'"$@" --quiet {redirection}', "--model", model, "--prompt", "x")
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")

    def test_of_standard_error_alone_leaves_the_text(self, model):
        done = shell(
            '"$@" --stats 2>&-', "--model", model, "--prompt", "x", script={"pieces": ["text"], "notes": ["n"]}
        )
        assert (done.returncode, done.stdout) == (0, b"text")

    def test_of_help_is_quiet(self):
        line = 'set -o pipefail; "$@" --help | true'
        assert shell(line).stderr == b""


class TestInterrupt:
    def test_keeps_the_partial_text_and_ends_with_130(self, model):
        script = {"pieces": ["partial", " text"], "hang": True}
        with start("--model", model, "--prompt", "x", "--quiet", script=script, **PIPES) as process:
            read_until(process, b"partial text")
            out, err = self.interrupted(process)
        assert (out, err) == (b"", b"")

    def test_of_json_gives_the_object_with_what_came(self, model):
        script = {"pieces": ["partial"], "hang": True, "notes": ["ready"], "tells": True}
        with fork("--model", model, "--prompt", "x", "--json", script=script, **PIPES) as process:
            self.wait_for(process, b"decode")
            out, _ = self.interrupted(process)
        document = json.loads(out)
        assert (document["text"], document["finish_reason"]) == ("partial", "interrupted")
        assert document["tokens"] == list(b"partial")
        assert document["stats"]["output_tokens"] == 1

    def test_before_the_first_token_gives_json_too(self, model):
        script = {"ticks": 2000, "tick_seconds": 0.1, "tells": True}
        with fork("--model", model, "--prompt", "x", "--json", script=script, **PIPES) as process:
            self.wait_for(process, b"load")
            out, err = self.interrupted(process)
        assert b"Traceback" not in err
        document = json.loads(out)
        assert (document["text"], document["finish_reason"], document["stats"]) == ("", "interrupted", None)

    def test_prints_the_stats_asked_for(self, model):
        script = {"pieces": ["partial"], "hang": True}
        with fork("--model", model, "--prompt", "x", "--stats", "--quiet", script=script, **PIPES) as process:
            read_until(process, b"partial")
            _, err = self.interrupted(process)
        assert b"acceptance" in err

    def test_before_the_first_token_prints_no_empty_table(self, model):
        script = {"pieces": [], "hang": True, "tells": True}
        with fork("--model", model, "--prompt", "x", "--stats", script=script, **PIPES) as process:
            self.wait_for(process, b"decode")
            _, err = self.interrupted(process)
        assert err == b""

    @staticmethod
    def interrupted(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
        """Standard output and error from here on."""
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
        assert process.returncode == 130
        return out, err

    @staticmethod
    def wait_for(process: subprocess.Popen[bytes], start_of_line: bytes) -> None:
        assert process.stderr is not None
        while not (line := process.stderr.readline()).startswith(start_of_line):
            assert line, "the stream ended"


class TestJson:
    def test_is_one_object_and_nothing_else(self, model):
        script = {"pieces": ["One", " zwölf"], "finish": "stop"}
        done = run("--model", model, "--prompt", "abc", "--json", "--gamma", "5", script=script)
        assert done.returncode == 0
        assert done.stdout.count(b"\n") == 1
        assert '"One zwölf"'.encode() in done.stdout
        document = json.loads(done.stdout)
        assert list(document) == ["text", "tokens", "finish_reason", "stats", "plan", "model", "version"]
        assert document["text"] == "One zwölf"
        assert document["tokens"] == list("One zwölf".encode())
        assert document["finish_reason"] == "stop"
        assert document["stats"]["levels"][0]["acceptance"] == 0.9
        assert document["plan"]["composition"]["gamma"] == 5
        assert document["model"] == {"target": model, "draft": None}
        assert document["version"] == __version__

    def test_of_a_failed_run_has_what_had_come(self, model):
        script = {"pieces": ["ha", "lf"], "fail": "TriforceError"}
        done = run("--model", model, "--prompt", "x", "--json", "--quiet", script=script)
        document, error = json.loads(done.stdout), json.loads(done.stderr)["error"]
        assert (document["text"], document["finish_reason"]) == ("half", "error")
        assert error == {
            "kind": "runtime",
            "message": "TriforceError happened; do something else",
            "exit_code": done.returncode,
        }
        assert done.returncode == 1

    def test_of_a_run_that_failed_before_the_first_token_is_nothing(self, model):
        done = run("--model", model, "--prompt", "x", "--json", script={"load_fail": "ModelError"})
        assert (done.returncode, done.stdout) == (4, b"")
        assert json.loads(done.stderr.splitlines()[-1])["error"]["kind"] == "model"


class TestStandardError:
    def test_of_a_short_run_in_a_pipe_has_no_progress(self, model):
        """Fourteen lines on stages of a second stood over an answer of nine words."""
        done = run("--model", model, "--prompt", "x" * 500)
        assert done.stderr.decode().splitlines() == ["the text ends here, at --max-tokens 256"]

    def test_is_empty_when_quiet(self, model):
        done = run("--model", model, "--prompt", "x", "--quiet", script={"notes": ["a note"]})
        assert (done.returncode, done.stderr) == (0, b"")

    def test_has_the_error_also_when_quiet(self, model):
        done = run("--model", model, "--prompt", "x", "--quiet", script={"load_fail": "DoesNotFit"})
        assert done.stderr == b"error: DoesNotFit happened; do something else\n"

    def test_has_the_notes_of_the_plan(self, model):
        done = run("--model", model, "--prompt", "x", script={"notes": ["--max-tokens 256 cut to 7"]})
        assert b"--max-tokens 256 cut to 7\n" in done.stderr

    def test_has_the_stats_after_the_text_also_when_quiet(self, model):
        done = run("--model", model, "--prompt", "x", "--stats", "--quiet", script={"pieces": ["text"]})
        assert done.stdout == b"text"
        assert done.stderr.startswith(b"load ")
        assert b"tokens/round" in done.stderr

    def test_says_what_the_text_takes_without_speculation(self, model):
        script = {"pieces": ["te", "xt"]}
        args = ("--model", model, "--prompt", "x", "--compare", "--quiet")
        done = run(*args, "--temperature", "0", script=script)
        assert (done.returncode, done.stdout) == (0, b"text")
        said = b"2 tokens in 8.0 s; without speculation 8.0 s, 1.0 times as long, and the text is "
        assert done.stderr == said + b"the same\n"
        done = run(*args, "--stats", script=script)
        assert done.stderr.startswith(said + b"sampled anew; at --temperature 0 it is the same\n")
        assert b"2 tokens" in done.stderr.partition(b"decode")[2]
        done = run(*args, script={"pieces": ["text"]})
        assert (done.returncode, done.stderr) == (0, b"the text is too short to be compared\n")

    def test_has_an_error_where_the_text_is_another_without_speculation(self, model):
        script = {"pieces": ["te", "xt"], "plain_pieces": ["te", "st", "!"]}
        args = ("--model", model, "--prompt", "x", "--compare", "--stats", "--temperature", "0")
        done = run(*args, "--json", script=script)
        assert done.returncode == 5
        assert json.loads(done.stdout)["stats"]["output_tokens"] == 2  # of the text, not of the other
        assert b"without speculation the text is another" in done.stderr
        args = ("--model", model, "--prompt", "x", "--compare")
        assert run(*args, "--temperature", "1", script=script).returncode == 0

    def test_has_no_escape_sequences_in_a_pipe(self, model):
        args, script = ("--model", model, "--prompt", "x", "--stats"), {"fail": "ModelError"}
        done = run(*args, env={"FORCE_COLOR": "1"}, script=script)
        assert b"\x1b[?25l" not in done.stderr  # the bar would hide the cursor
        assert b"\x1b" not in run(*args).stderr


class TestExitCode:
    @pytest.mark.parametrize(
        ("name", "code"), [("TriforceError", 1), ("UsageError", 2), ("DoesNotFit", 3), ("ModelError", 4)]
    )
    def test_is_that_of_the_error(self, name, code, model):
        done = run("--model", model, "--prompt", "x", "--quiet", script={"pieces": ["half"], "fail": name})
        assert (done.returncode, done.stdout) == (code, b"half")
        assert done.stderr == f"error: {name} happened; do something else\n".encode()

    def test_of_an_unexpected_error_is_1_in_one_line(self, model):
        done = run("--model", model, "--prompt", "x", "--quiet", script={"load_fail": "RuntimeError"})
        assert done.returncode == 1
        assert done.stderr.startswith(b"error: unexpected RuntimeError: lost (")
        assert done.stderr.count(b"\n") == 1
        assert b"TRIFORCE_DEBUG=1" in done.stderr

    @pytest.mark.parametrize(("args", "env"), [(["--debug"], {}), ([], {"TRIFORCE_DEBUG": "1"})])
    def test_comes_with_a_traceback_when_debugging(self, args, env, model):
        script = {"load_fail": "RuntimeError"}
        done = run("--model", model, "--prompt", "x", "--quiet", *args, script=script, env=env)
        assert done.returncode == 1
        assert done.stderr.startswith(b"Traceback")
        assert b"\nerror: unexpected RuntimeError" in done.stderr

    def test_comes_without_a_traceback_when_debugging_is_off(self, model):
        done = run("--model", model, "--prompt", "", "--quiet", env={"TRIFORCE_DEBUG": "0"})
        assert done.returncode == 2
        assert b"Traceback" not in done.stderr


class TestProgram:
    """`python -m triforce_cli`, without the stand-in."""

    @staticmethod
    def triforce(*args: str, code: str = "") -> subprocess.CompletedProcess[bytes]:
        program = ["-c", code] if code else ["-m", "triforce_cli"]
        return subprocess.run(
            [sys.executable, *program, *args],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )

    def test_alone_shows_its_help_and_ends_with_2(self):
        done = programs.run([], env=environment())
        assert done.returncode == 2
        assert "generate" in done.stdout
        assert done.stderr == ""

    def test_says_its_version(self):
        done = self.triforce("--version")
        assert (done.returncode, done.stdout) == (0, f"triforce {__version__}\n".encode())

    def test_unknown_command_ends_with_2(self):
        done = programs.run(["generat"], env=environment())
        assert (done.returncode, done.stdout) == (2, "")
        assert "did you mean 'generate'" in done.stderr.lower()

    def test_needs_no_heavy_module_to_parse(self):
        """What is wrong, either; of --help see test_startup.py."""
        code = (
            "import sys; from triforce_cli.app import main; main(sys.argv[1:]); main(['nope']); "
            "sys.stderr.write('loaded: ' + ' '.join(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules))))"
        )
        assert self.triforce("generate", "--max-tokens", "0", code=code).stderr.endswith(b"loaded: ")
