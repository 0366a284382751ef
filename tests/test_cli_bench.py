"""`triforce bench` on tiny models: numbers from the runs, what it refuses, the table, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile

import pytest
import torch

from kit.programs import ProgramTerminal, begin
from kit.terminals import CTRL_C
from offload.bench.comparison import PLAIN, TRIFORCE, WAYS, Comparison, Run
from offload.model.level import Level
from offload.plan.options import Options
from test_cli_fake import environment, make_plan, make_stats
from triforce_cli.documents import prompt
from triforce_cli.render import bench as render_bench
from triforce_cli.screen.progress import TimeLeft

CONTEXT = 1024
TEXT = "".join(f"Line {i} of a long and rather dull text.\n" for i in range(22))  # about 900 tokens
LEVELS = ("--gamma", "4", "--draft-gamma", "2", "--budget", "64", "--chunk", "8", "--window", "32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from kit.models import save_pair  # with transformers' models, which golden files have no use for

    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder, context=CONTEXT)
    (folder / "text.txt").write_text(TEXT)
    return folder


def arguments(folder: Path, *args: str, text: str = "text.txt") -> list[str]:
    models = ("--model", str(folder / "target"), "--draft", str(folder / "draft"), "--dtype", "fp32")
    common = ("--prompt-file", str(folder / text), "--max-tokens", "12", "--repeats", "2")
    return ["bench", *models, *common, *args]


class Shell:
    def __init__(self, folder: Path, triforce: Callable[..., tuple[int, str, str]]) -> None:
        self._folder, self._triforce = folder, triforce

    def code(self, *args: str) -> tuple[int, str, str]:
        return self._triforce(*arguments(self._folder, *args))

    def refused(self, expected: int, *args: str) -> str:
        """The error message; checks that nothing was loaded."""
        code, out, err = self.code(*args)
        assert (code, out) == (expected, "")
        assert "load" not in err
        return err

    def document(self, *args: str) -> dict:
        code, out, err = self.code("--json", "--quiet", *args)
        assert (code, err) == (0, "")
        return json.loads(out)


@pytest.fixture
def shell(folder: Path, triforce: Callable[..., tuple[int, str, str]]) -> Shell:
    return Shell(folder, triforce)


def comparison(context: int, *, seconds: float = 0.020) -> Comparison:
    """Of three turns: TriForce takes `seconds` a token, plain decoding 2, 3, 4 times as long."""
    runs = [
        Run(
            way=way,
            turn=turn,
            tokens=(1, 2, 3),
            milliseconds_per_token=1000 * seconds * (1 if way == TRIFORCE else turn + 1),
            stats=make_stats(),
        )
        for way in WAYS
        for turn in (1, 2, 3)
    ]
    plan = make_plan(Options(), num_prompt_tokens=context - 100)
    return Comparison(plan=plan, greedy=True, prefill_rates={PLAIN: 812.0}, runs=tuple(runs))


class TestNumbers:
    @pytest.fixture
    def seconds(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
        """Seconds of a pass of each level, on a clock that only passes advance."""
        prices = {"target": 0.010, "retrieval": 0.004, "draft": 0.001, "self": 0.004}  # the last where passes are timed
        now, run = [0.0], Level.run

        def priced(self: Level, passes: object) -> None:
            now[0] += prices[self.stats.name]
            run(self, passes)

        monkeypatch.setattr(Level, "run", priced)
        monkeypatch.setattr("time.perf_counter", lambda: now[0])
        return prices

    def test_they_are_those_of_the_runs(self, shell, seconds):
        """Plain decoding is a full pass a token; TriForce is all the passes that its levels counted."""
        (found,) = shell.document("--contexts", "600", *LEVELS)["contexts"]
        plain, ours = found["milliseconds_per_token"][PLAIN], found["milliseconds_per_token"][TRIFORCE]
        assert plain == pytest.approx({"median": 10.0, "least": 10.0, "most": 10.0})
        assert found["prefill_tokens_per_second"] == pytest.approx({PLAIN: 588 / 0.010})
        run = next(run for run in found["runs"] if run["way"] == TRIFORCE)
        levels = {level["name"]: level["passes"] for level in run["stats"]["levels"]}
        levels["target"] -= 1  # the first token's
        spent = sum(passes * seconds[name] for name, passes in levels.items())
        assert levels["retrieval"] > 0
        assert ours["median"] == pytest.approx(1000 * spent / 11)
        assert found["ratios"][PLAIN]["median"] == pytest.approx(10.0 / ours["median"])
        target = run["stats"]["levels"][0]
        assert found["acceptance"] == pytest.approx(target["acceptance"])
        assert found["tokens_per_pass"] == pytest.approx(target["tokens_per_round"])

    def test_a_slower_pass_is_seen(self, shell, seconds):
        seconds["target"] = 0.030
        (found,) = shell.document("--contexts", "600", *LEVELS)["contexts"]
        assert found["milliseconds_per_token"][PLAIN]["median"] == pytest.approx(30.0)

    def test_time_left_follows_what_past_steps_took(self):
        now = 0.0
        left = TimeLeft([1.0, 3.0, 4.0], lambda: now)
        assert left.next_step() is None
        now = 5.0
        assert left.next_step() == pytest.approx(35.0)
        now = 10.0
        assert left.next_step() == pytest.approx(10.0)


class TestRuns:
    def test_json_is_one_object_with_environment_plans_and_every_run(self, shell, folder):
        found = shell.document("--contexts", "600,300", *LEVELS)
        assert [context["context"] for context in found["contexts"]] == [300, 600]
        assert {"environment", "model", "prompt", "sampling", "max_tokens", "repeats", "version"} <= found.keys()
        assert found["environment"]["torch"] == torch.__version__
        assert found["interrupted"] is False
        for context in found["contexts"]:
            assert context["plan"]["request"]["capacity"] == context["context"]
            assert context["plan"]["request"]["num_prompt_tokens"] == context["context"] - 12
            assert sorted((run["way"], run["turn"]) for run in context["runs"]) == [
                (way, turn) for way in WAYS for turn in (1, 2)
            ]
            assert context["first_difference_from_plain"] == {TRIFORCE: None}
            assert context["ratios"].keys() == {PLAIN}

    def test_it_writes_what_generate_writes(self, shell, folder, triforce):
        """The prompt is the beginning of the file, one token a byte."""
        (found,) = shell.document("--contexts", "400", *LEVELS)["contexts"]
        (folder / "beginning.txt").write_text(TEXT[:388])
        args = arguments(folder, "--temperature", "0", "--json", text="beginning.txt")
        generate = ["generate", *args[1 : args.index("--repeats")], *args[args.index("--repeats") + 2 :]]
        code, out, _ = triforce(*generate, "--quiet")
        assert code == 0
        assert json.loads(out)["tokens"] == found["runs"][0]["tokens"]

    def test_streams_where_it_is_told_to(self, shell):
        (found,) = shell.document("--contexts", "300", *LEVELS, "--offload", "kv", "--link-gbps", "2")["contexts"]
        assert found["plan"]["placement"]["offload"] == ["kv"]
        assert all(run["stats"]["decode_link"]["bytes_to_device"] > 0 for run in found["runs"])

    def test_the_table_says_that_the_texts_are_the_same(self, shell):
        code, out, err = shell.code("--contexts", "300,600", *LEVELS)
        assert code == 0
        assert out.splitlines()[0].split() == ["context", "300", "600"]
        assert "TriForce wrote the same tokens as plain decoding." in out
        for context in (300, 600):
            assert f"{context} tokens: plain " in err

    def test_lengths_are_left_to_the_text_and_the_model(self, shell, folder):
        assert [found["context"] for found in shell.document()["contexts"]] == [len(TEXT) + 12]
        (folder / "long.txt").write_text(TEXT * 2)
        found = shell.document("--prompt-file", str(folder / "long.txt"))
        assert [context["context"] for context in found["contexts"]] == [CONTEXT]

    def test_without_a_file_the_text_is_the_standard_library(self, monkeypatch, folder, triforce):
        text = prompt.library_text()
        assert len(text) > 500_000
        assert text == prompt.library_text()
        monkeypatch.setattr(prompt, "TEXT_MODULES", ("tokenize",))
        args = arguments(folder, "--contexts", "300", "--json")
        at = args.index("--prompt-file")
        code, out, err = triforce(*args[:at], *args[at + 2 :])
        assert code == 0
        assert json.loads(out)["prompt"]["source"] == prompt.LIBRARY
        assert f"the prompts are {prompt.LIBRARY}" in err


class TestRefusals:
    @pytest.mark.parametrize(
        ("code", "args", "said"),
        [
            (2, ("--contexts", "many"), "contexts has 'many'"),
            (2, ("--contexts", "300,"), "contexts has ''"),
            (2, ("--contexts", "12"), "a context of 12 has no room for --max-tokens 12"),
            (2, ("--max-tokens", "5000"), f"a context of {CONTEXT} has no room for --max-tokens 5000"),
            (2, ("--contexts", "1000"), f"the text has {len(TEXT)} tokens and a context of 1000 takes 988 of them"),
            (3, ("--contexts", "300,2000"), f"contexts has 2000 and the model's limit is {CONTEXT} tokens"),
            (2, ("--max-tokens", "1"), "max-tokens is 1, it must be 2 or more"),
            (2, ("--repeats", "0"), "repeats is 0"),
            (2, ("--temperature", "-1"), "temperature is -1.0"),
            (2, ("--prompt-file", "nowhere.txt"), "nowhere.txt"),
        ],
    )
    def test_silly_requests_are_refused_by_name(self, shell, code, args, said):
        assert said in shell.refused(code, *args)

    def test_a_python_without_sources_says_so(self, monkeypatch, shell):
        monkeypatch.setattr(prompt, "TEXT_MODULES", ("sys",))
        with pytest.raises(Exception, match="no source of its module sys"):
            prompt.library_text()


class TestReport:
    @pytest.mark.parametrize("width", [40, 60, 80, 200])
    def test_every_context_is_shown_within_any_width(self, width):
        contexts = [4096, 8192, 16384, 32768, 65536, 131072]
        text = render_bench.report([comparison(context) for context in contexts], width=width)
        assert max(map(len, text.splitlines())) <= width
        shown = [cell for line in text.splitlines() if line.startswith("context") for cell in line.split()[1:]]
        assert shown == [f"{context:,}" for context in contexts]

    def test_rows_are_medians_and_below_them_least_to_most(self):
        lines = render_bench.report([comparison(4096)], width=80).splitlines()
        rows = {
            line[:24].strip() or f"below {lines[i - 1][:24].strip()}": line[24:].strip() for i, line in enumerate(lines)
        }
        assert rows["prefill, tokens/s"] == "812"
        assert (rows["plain, ms/token"], rows["below plain, ms/token"]) == ("60.0", "40.0-80.0")
        assert (rows["TriForce, ms/token"], rows["below TriForce, ms/token"]) == ("20.0", "20.0-20.0")
        assert (rows["plain / TriForce"], rows["below plain / TriForce"]) == ("3.00x", "2.00-4.00")
        assert (rows["predicted"], rows["acceptance"], rows["tokens per full pass"]) == ("14.2", "0.90", "10.0")

    def test_a_text_that_differs_is_told_loudly(self):
        same = comparison(4096)
        runs = [replace(run, tokens=(1, 9, 3)) if run.way == TRIFORCE else run for run in same.runs]
        other = replace(same, runs=tuple(runs))
        text = " ".join(render_bench.report([same, other], width=80).split())
        assert "TRIFORCE WROTE OTHER TOKENS than plain decoding (from token 2 at 4,096)" in text
        assert render_bench.document(other)["first_difference_from_plain"] == {TRIFORCE: 1}

    def test_sampled_texts_are_not_compared(self):
        sampled = replace(comparison(4096), greedy=False)
        assert "Texts were sampled" in render_bench.report([sampled], width=80)
        assert render_bench.document(sampled)["first_difference_from_plain"] is None


SLOW = ("--contexts", "120,850", *LEVELS, "--offload", "kv", "--link-gbps", "0.015")


@pytest.mark.few(1)  # of a terminal and Ctrl-C below
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("as_json", [True, False])
def test_who_is_asked_to_end_keeps_the_contexts_that_are_finished(folder, as_json, number, code):
    (reading, errors), nothing = os.pipe(), os.open(os.devnull, os.O_RDONLY)
    with TemporaryFile() as output, open(reading) as said:
        args = arguments(folder, *SLOW, *["--json"] * as_json)
        process = begin(args, env=environment(), streams=(nothing, output.fileno(), errors))
        for end in (nothing, errors):
            os.close(end)
        for line in said:
            if line.startswith("120 tokens: plain"):
                break
        assert process.pid is not None
        os.kill(process.pid, number)
        err = said.read()
        process.join()
        out = os.pread(output.fileno(), 1 << 20, 0).decode()
    assert process.exitcode == code
    assert "Traceback" not in err
    if as_json:
        found = json.loads(out)
        assert ([context["context"] for context in found["contexts"]], found["interrupted"]) == ([120], True)
    else:
        assert out.splitlines()[0].split() == ["context", "120"]


def test_at_a_narrow_terminal_progress_is_gone_and_the_table_fits(folder):
    args = arguments(folder, "--contexts", "200,300,400,500", *LEVELS)
    terminal = ProgramTerminal(args, env=environment(), rows=70, columns=60)
    assert terminal.finish() == 0
    assert "left" in terminal.written
    assert not any("warm-up" in line or "left" in line for line in terminal.lines)
    assert "context                           200" in terminal.shown
    assert terminal.shown.count("plain / TriForce") == 2  # three contexts, then one
    terminal.close()


def test_at_a_terminal_ctrl_c_leaves_a_clean_screen(folder):
    terminal = ProgramTerminal(arguments(folder, *SLOW), env=environment(), rows=40)
    terminal.until_shown("ms/token")
    terminal.send(CTRL_C)
    assert terminal.finish() == 130
    assert "plain / TriForce" in terminal.shown
    assert not terminal.is_cursor_hidden
    terminal.close()
