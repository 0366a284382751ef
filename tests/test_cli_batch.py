"""`triforce generate --input-jsonl`: lines in, lines out, and what a stop leaves."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kit.models import random_model, save
from offload.decode.sampling import SamplingParams
from offload.errors import TriforceError, UsageError
from test_cli_fake import fork, run
from triforce_cli.answering.request import Wanted
from triforce_cli.app import main
from triforce_cli.batch.records import Record, after, read_records
from triforce_cli.batch.results import ResultFile

SAMPLING = SamplingParams()
DEFAULTS = Wanted(max_tokens=7, sampling=SAMPLING, stops=("END",))


def read(*lines: str, defaults: Wanted = DEFAULTS) -> list[Record]:
    return read_records("\n".join(lines), "in.jsonl", defaults)


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


class TestRecords:
    def test_what_a_line_does_not_say_is_as_for_one_prompt(self):
        (record,) = read('{"prompt": "x"}')
        assert record == Record(number=1, id=1, prompt="x", wanted=DEFAULTS)

    def test_what_a_line_says_wins(self):
        line = {"id": "a", "prompt": "x", "max_tokens": 3, "stop": ["1", "2"], "meta": {"k": [1]}}
        sampling = {"temperature": 0, "top_p": 1, "top_k": 5, "min_p": 0.5, "seed": 3}
        (record,) = read(json.dumps(line | sampling))
        assert (record.id, record.wanted.max_tokens, record.wanted.stops, record.meta) == (
            "a",
            3,
            ("1", "2"),
            {"k": [1]},
        )
        assert record.wanted.sampling == SamplingParams(**sampling)
        assert read('{"prompt": "x", "stop": "one"}')[0].wanted.stops == ("one",)

    def test_equal_prompts_get_seeds_of_their_own(self):
        defaults = Wanted(max_tokens=7, sampling=replace(SAMPLING, seed=10), stops=())
        records = read('{"prompt": "x"}', "", '{"prompt": "x"}', '{"prompt": "x", "seed": 5}', defaults=defaults)
        assert [(r.number, r.wanted.sampling.seed) for r in records] == [(1, 10), (3, 12), (4, 5)]
        highest = Wanted(max_tokens=7, sampling=replace(SAMPLING, seed=2**63 - 1), stops=())
        assert [r.wanted.sampling.seed for r in read('{"prompt": "x"}', '{"prompt": "x"}', defaults=highest)] == [
            2**63 - 1,
            0,
        ]

    def test_a_line_may_hold_other_line_separators(self):
        assert read('{"prompt": "a\u2028b\x85c"}')[0].prompt == "a\u2028b\x85c"

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("{", "line 2 is not JSON"),
            ("[" * 100_000, "line 2 is not JSON"),
            ("3", "line 2 is 3; it must be an object"),
            ("{}", 'line 2 has no "prompt"'),
            ('{"prompt": 3}', "prompt is 3; it must be a text"),
            ('{"prompt": ""}', 'prompt is ""; it must be a text of 1 or more'),
            ('{"prompt": "\\ud800"}', "prompt has half of a surrogate pair"),
            (
                '{"prompt": "x", "max_token": 3}',
                "there is no field 'max_token'; did you mean 'max_tokens'? docs/batch.md",
            ),
            ('{"prompt": "x", "max_tokens": 0}', "max_tokens is 0; it must be a whole number from 1"),
            ('{"prompt": "x", "max_tokens": 16777217}', "max_tokens is 16777217; it must be a whole number from 1"),
            ('{"prompt": "x", "max_tokens": true}', "max_tokens is true"),
            ('{"prompt": "x", "temperature": "hot"}', 'temperature is "hot"; it must be a number'),
            ('{"prompt": "x", "temperature": NaN}', "line 2 is not JSON that can be answered (NaN is not"),
            ('{"prompt": "x", "temperature": 1' + "0" * 400 + "}", "temperature is 1000"),
            ('{"prompt": "x", "temperature": 1e400}', "1e400 is not a JSON number"),
            ('{"prompt": "x", "seed": 1' + "0" * 5000 + "}", "a number has 5001 digits, 4300 is the limit"),
            ('{"prompt": "x", "seed": 1' + "0" * 400 + "}", "line 2: seed is 1000"),
            ('{"prompt": "x", "meta": {"k": [1, NaN]}}', "NaN is not a JSON number"),
            ('{"prompt": "x", "meta": {"k": -Infinity}}', "-Infinity is not a JSON number"),
            ('{"prompt": "x", "meta": {"k": 1e999}}', "1e999 is not a JSON number"),
            ('{"prompt": "x", "meta": {"k": ["\\ud800"]}}', "without halves of surrogate pairs"),
            ('{"prompt": "x", "meta": {"\\udc00": 1}}', "without halves of surrogate pairs"),
            ('{"prompt": "x", "meta": {"k": ' + "[" * 99 + "]" * 99 + "}}", "it is nested deeper than 64"),
            ('{"prompt": ' + "[" * 900 + "]" * 900 + "}", "it is nested deeper than 64"),
            (
                '{"prompt": "x", "prompt": "y"}',
                "line 2 is not JSON that can be answered (a field occurs twice: 'prompt')",
            ),
            ('{"prompt": "x", "meta": {"a": {"b": 1, "b": 1}}}', "a field occurs twice: 'b'"),
            ('{"prompt": "x", "temperature": -1}', "line 2: temperature is -1"),
            ('{"prompt": "x", "top_k": 1.5}', "top_k is 1.5; it must be a whole number"),
            ('{"prompt": "x", "seed": "1"}', 'seed is "1"; it must be a whole number of 64 bits or null'),
            ('{"prompt": "x", "stop": [""]}', "stop is"),
            (json.dumps({"prompt": "x", "stop": ["a"] * 65}), "a list of up to 64 texts"),
            (json.dumps({"prompt": "x", "stop": "a" * 1001}), "of up to 1,000 characters"),
            ('{"prompt": "x", "id": 1.5}', "id is 1.5; it must be a text or a whole number"),
            ('{"prompt": "x", "meta": 1}', "meta is 1; it must be an object"),
            ('{"prompt": "x", "id": 1}', "lines 1 and 2 have the same id 1"),
        ],
    )
    def test_what_is_wrong_is_refused_by_line(self, line, message):
        with pytest.raises(UsageError) as error:
            read('{"prompt": "fine"}', line)
        assert "in.jsonl" in str(error.value)
        assert message in str(error.value)

    @pytest.mark.parametrize(
        "meta",
        [
            '{"k": 1' + "0" * 4299 + "}",
            '{"k": -1.7e308, "": 5e-324}',
            '{"k": "\\u0000\\u2028\\ud83d\\ude00"}',
            '{"k": ' + "[" * 62 + "]" * 62 + "}",
        ],
    )
    def test_what_is_accepted_can_be_written(self, meta, tmp_path):
        """A NaN in meta was found out when the result was written, after the work, and again by every next run."""
        (record,) = read(f'{{"prompt": "x", "meta": {meta}}}')
        with ResultFile(tmp_path / "out") as results:
            results.add({"id": record.id, "text": "", "meta": record.meta})
        assert json.loads((tmp_path / "out").read_bytes())["meta"] == json.loads(meta)

    def test_nothing_is_refused(self):
        with pytest.raises(UsageError, match="holds no line"):
            read("", "  ")

    def test_what_is_done_is_left_out_in_whatever_order_it_came(self):
        records = read('{"prompt": "x", "id": "a"}', '{"prompt": "x"}', '{"prompt": "x", "id": "c"}')
        assert after(records, ["a", 2], "out") == records[2:]
        assert after(records, ["c", "a"], "out") == [records[1]]
        with pytest.raises(UsageError, match="result 2 has the id 'b', which this input has not"):
            after(records, ["c", "b"], "out")
        with pytest.raises(UsageError, match="result 3 has the id 'a', which came before"):
            after(records, ["a", 2, "a"], "out")


class TestResultFile:
    def test_goes_on_after_the_last_whole_line(self, tmp_path):
        file = tmp_path / "out.jsonl"
        before = b'{"id": 1, "text": ""}\n{"id": "b", "text": "x"}\n'
        added = '{"id": "c", "text": "ü"}\n'.encode()
        for cut in range(len(added)):
            file.write_bytes(before + added[:cut])
            with ResultFile(file) as results:
                assert results.done == [1, "b"]
                results.add({"id": "c", "text": "ü"})
            assert file.read_bytes() == before + added

    @pytest.mark.parametrize("end", [b"", b"\n"])
    @pytest.mark.parametrize(
        "line",
        [b"text", b"{}", b"[]", b'{"id": null, "text": ""}', b'{"id": 1, "prompt": "x"}', b"\xff", b"[" * 100_000],
    )
    @pytest.mark.parametrize("before", [b"", b'{"id": 1, "text": ""}\n'])
    def test_a_file_of_something_else_is_left_alone(self, tmp_path, before, line, end):
        """One without a line end was emptied: it counted as a result that a stop had cut."""
        file = tmp_path / "out.jsonl"
        file.write_bytes(before + line + end)
        with pytest.raises(UsageError, match=f"line {2 if before else 1}"), ResultFile(file):
            pass
        assert file.read_bytes() == before + line + end

    def test_a_full_disk_is_told_and_the_next_run_goes_on(self, tmp_path):
        """It was an unexpected error: what the buffer still had failed once more when the file was closed."""
        file, result = tmp_path / "out.jsonl", {"id": 1, "text": "x" * 80}
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))
        try:
            with ResultFile(file) as results, pytest.raises(TriforceError, match="written: File too large"):
                results.add(result)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        with ResultFile(file) as results:
            assert (file.read_bytes(), results.done) == (b"", [])
            results.add(result)
        assert lines_of(file) == [result]

    def test_a_result_is_on_the_disk_before_the_next_is_computed(self, tmp_path, monkeypatch):
        file, synced = tmp_path / "out.jsonl", []
        monkeypatch.setattr(os, "fsync", lambda fd: synced.append(file.read_bytes()))
        with ResultFile(file) as results:
            results.add({"id": 1, "text": "x"})
            assert synced == [b'{"id": 1, "text": "x"}\n']

    def test_what_is_no_file_is_refused(self):
        with (
            pytest.raises(UsageError, match="/dev/null is no file; without --output-jsonl"),
            ResultFile(Path("/dev/null")),
        ):
            pass

    def test_two_do_not_mix(self, tmp_path):
        with ResultFile(tmp_path / "out"), pytest.raises(UsageError, match="written by another process"):
            ResultFile(tmp_path / "out").__enter__()

    def test_a_place_that_cannot_be_written_is_named(self, tmp_path):
        with pytest.raises(UsageError, match="File name too long"):
            ResultFile(tmp_path / ("x" * 300)).__enter__()
        with pytest.raises(UsageError, match="No such file"):
            ResultFile(tmp_path / "none" / "out").__enter__()


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(tmp_path)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "in.jsonl"
    file.write_text(
        '{"prompt": "one", "id": "a", "meta": {"k": 1}}\n{"prompt": "two", "max_tokens": 9, "stop": "own"}\n'
        '{"prompt": "naïve", "seed": 7}\n'
    )
    return file


class TestOnTheStandIn:
    def test_results_come_in_order_one_line_each(self, model, source, tmp_path):
        out = tmp_path / "out.jsonl"
        args = ("--model", model, "--input-jsonl", str(source), "--output-jsonl", str(out), "--stop", "END", "--echo")
        done = run(*args)
        assert (done.returncode, done.stdout) == (0, b"")
        results = lines_of(out)
        assert [r["id"] for r in results] == ["a", 2, 3]
        assert [r["prompt"] for r in results] == ["one", "two", "naïve"]
        assert (results[0]["meta"], "meta" in results[1]) == ({"k": 1}, False)
        asked = [json.loads(r["text"]) for r in results]
        assert [a["max_tokens"] for a in asked] == [256, 9, 256]
        assert [a["stop"] for a in asked] == [["END"], ["own"], ["END"]]
        assert [a["sampling"]["seed"] for a in asked] == [None, None, 7]
        assert all(a["plan"] == asked[0]["plan"] for a in asked)  # one engine
        assert asked[0]["plan"]["request"]["capacity"] == len("naïve".encode()) + 256
        assert results[0]["finish_reason"] == "length"
        assert results[0]["stats"]["output_tokens"] == 1
        again = run(*args)
        assert again.returncode == 0
        assert f"3 of 3 results are in {out}" in again.stderr.decode()
        assert lines_of(out) == results

    def test_the_plan_has_room_for_the_prompt_and_the_output_that_are_longest_together(self, model):
        """Planned for the longest prompt, the short prompt's output was cut."""
        lines = json.dumps({"prompt": "x" * 90, "max_tokens": 5}) + '\n{"prompt": "short", "max_tokens": 200}\n'
        done = run("--model", model, "--input-jsonl", "-", "--quiet", stdin=lines.encode())
        asked = [json.loads(json.loads(line)["text"]) for line in done.stdout.splitlines()]
        assert [a["plan"]["request"]["capacity"] for a in asked] == [205, 205]
        assert [a["max_tokens"] for a in asked] == [5, 200]

    def test_a_run_that_goes_on_has_the_plan_of_all_prompts(self, model, tmp_path):
        """With the plan of the rest, seeds would give other texts than a run that was not stopped."""
        source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text(json.dumps({"prompt": "x" * 90, "max_tokens": 50}) + '\n{"prompt": "short"}\n')
        out.write_text('{"id": 1, "text": ""}\n')
        run("--model", model, "--input-jsonl", str(source), "--output-jsonl", str(out), "--max-tokens", "5")
        assert json.loads(lines_of(out)[1]["text"])["plan"]["request"]["capacity"] == 140

    def test_without_a_file_they_go_to_standard_output(self, model, source):
        done = run("--model", model, "--input-jsonl", "-", "--quiet", stdin=source.read_bytes())
        assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == ["a", 2, 3]
        assert done.stderr == b""

    def test_standard_output_can_be_named(self, model, source):
        done = run("--model", model, "--input-jsonl", str(source), "--output-jsonl", "-")
        assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == ["a", 2, 3]

    def test_the_prompts_are_no_place_for_the_results(self, model, tmp_path):
        """Its last line, if it had no line end, became a result."""
        source = tmp_path / "in.jsonl"
        source.write_text('{"id": 1, "prompt": "one"}\n{"id": 2, "prompt": "two"}')
        done = run("--model", model, "--input-jsonl", str(source), "--output-jsonl", str(source))
        assert done.returncode == 2
        assert "is no result of triforce" in done.stderr.decode()
        assert source.read_text() == '{"id": 1, "prompt": "one"}\n{"id": 2, "prompt": "two"}'

    def test_results_of_another_input_are_not_continued(self, model, source, tmp_path):
        out = tmp_path / "out.jsonl"
        out.write_text('{"id": "a", "text": ""}\n{"id": "b", "text": ""}\n')
        done = run("--model", model, "--input-jsonl", str(source), "--output-jsonl", str(out))
        assert (done.returncode, done.stdout) == (2, b"")
        assert b"holds the results of another input: result 2 has the id 'b', which this input has not" in done.stderr
        assert out.read_text() == '{"id": "a", "text": ""}\n{"id": "b", "text": ""}\n'

    def test_nothing_is_loaded_before_every_line_is_good(self, model, source, tmp_path):
        source.write_text(source.read_text() + "{}\n")
        out = tmp_path / "out.jsonl"
        args = ("--model", model, "--input-jsonl", str(source), "--output-jsonl", str(out))
        done = run(*args, script={"load_fail": "ModelError"})
        assert done.returncode == 2
        assert 'line 4 has no \\"prompt\\"' in done.stderr.decode()
        assert not out.exists()

    def test_an_interrupt_keeps_what_is_done_and_the_next_run_goes_on(self, model, source, tmp_path):
        out = tmp_path / "out.jsonl"
        args = ("--model", model, "--input-jsonl", str(source), "--output-jsonl", str(out))
        run(*args)
        whole = out.read_text().splitlines(keepends=True)
        out.write_text(whole[0])
        script = {"pieces": ["half"], "hang": True, "tells": True}
        with fork(*args, script=script, stderr=subprocess.PIPE) as process:
            assert process.stderr is not None
            until(process, b"1 of 3 results are in")
            until(process, b"prefill done")
            process.send_signal(signal.SIGINT)
            _, err = process.communicate()
        assert process.returncode == 130
        assert f"1 of 3 results are in {out}; the same command goes on from there".encode() in err
        assert out.read_text() == whole[0]
        again = run(*args)
        assert b"2 of 3: id 2, " in again.stderr
        assert [r["id"] for r in lines_of(out)] == ["a", 2, 3]

    def test_an_error_of_one_keeps_those_before(self, model, source, tmp_path):
        out = tmp_path / "out.jsonl"
        done = run(
            *("--model", model, "--input-jsonl", str(source), "--output-jsonl", str(out), "-q"),
            script={"pieces": ["half"], "fail": "TriforceError"},
        )
        assert done.returncode == 1
        assert json.loads(done.stderr)["error"]["message"].startswith("TriforceError happened")
        assert out.read_bytes() == b""

    def test_time_is_for_each_prompt(self, model, source):
        args = ("--model", model, "--input-jsonl", str(source), "--timeout", "0.3")
        done = run(*args, script={"pieces": ["a", "b"], "ticks": 4, "tick_seconds": 0.1, "pretended": True})
        results = [json.loads(line) for line in done.stdout.splitlines()]
        assert done.returncode == 124
        assert [(r["finish_reason"], r["text"]) for r in results] == [("timeout", "")] * 3
        said = "line 1 (id 'a') and 2 others were cut because the time was over; raise --timeout (see finish_reason)"
        assert json.loads(done.stderr.splitlines()[-1])["error"] == {
            "kind": "timeout",
            "message": said,
            "exit_code": 124,
        }

    def test_a_line_has_a_time_of_its_own(self, model, source):
        source.write_text(
            '{"prompt": "one", "timeout": 0.3}\n{"prompt": "two", "timeout": null}\n{"prompt": "three"}\n'
        )
        args = ("--model", model, "--input-jsonl", str(source), "--timeout", "100")
        done = run(*args, script={"pieces": ["a", "b"], "ticks": 4, "tick_seconds": 0.1, "pretended": True})
        assert done.returncode == 124
        assert b"line 1 (id 1) was cut because the time was over" in done.stderr
        finished = {r["id"]: r["finish_reason"] for r in map(json.loads, done.stdout.splitlines())}
        assert finished == {1: "timeout", 2: "length", 3: "length"}

    def test_time_that_is_over_in_a_prefill_takes_nothing_from_the_others(self, model, source):
        """The first one's deadline passes while the second one's prompt is read."""
        source.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
        args = ("--model", model, "--input-jsonl", str(source), "--timeout", "2", "--batch", "2")
        done = run(*args, script={"pieces": ["a", "b"], "prefill_ticks": 3, "tick_seconds": 0.4, "pretended": True})
        results = [json.loads(line) for line in done.stdout.splitlines()]
        assert done.returncode == 124
        assert [(r["id"], r["finish_reason"]) for r in results] == [(1, "timeout"), (2, "length")]

    def test_at_the_end_it_is_said_how_many_were_cut(self, model, source):
        args = ("--model", model, "--input-jsonl", str(source))
        done = run(*args)
        assert (done.returncode, done.stderr.splitlines()[-1]) == (0, b"3 of 3 results were cut at max_tokens")
        assert run(*args, "-q").stderr == b""
        whole = run(*args, script={"finish": "stop"})
        assert (whole.returncode, b"were cut" in whole.stderr) == (0, False)

    @pytest.mark.parametrize(
        ("script", "more", "error"),
        [
            ({}, (), ("unfinished", 6, "line 2 (id 'b') was cut and may not match its regex; raise max_tokens")),
            (
                {"pieces": ["a", "b"], "ticks": 4, "tick_seconds": 0.1, "pretended": True},
                ("--timeout", "0.3"),
                ("timeout", 124, "line 1 (id 1) and 2 others were cut because the time was over; raise --timeout"),
            ),
        ],
        ids=["max_tokens", "time"],
    )
    def test_results_that_were_cut_and_may_not_match_end_with_6_and_late_ones_with_124(
        self, model, tmp_path, script, more, error
    ):
        """All are written before; in a run that goes on those of earlier runs count, too. Late results ended with 6, or
        with 0 where they had to follow nothing."""
        source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text('{"prompt": "one"}\n{"prompt": "two", "id": "b", "regex": "a+"}\n{"prompt": "three"}\n')
        args = ("--model", model, "--input-jsonl", str(source), "--output-jsonl", str(out), *more)
        kind, code, said = error
        for number in (3, 3, 2):  # written; left from before; the last one is written again
            out.write_text("".join(out.read_text().splitlines(keepends=True)[:number]) if out.exists() else "")
            done = run(*args, "-q", script=script)
            assert done.returncode == code
            failure = {"kind": kind, "message": f"{said} (see finish_reason)", "exit_code": code}
            assert json.loads(done.stderr)["error"] == failure
            assert [result["id"] for result in lines_of(out)] == [1, "b", 3]
        out.unlink()
        assert run(*args, script={"finish": "stop"}).returncode == 0
        source.write_text("".join(json.dumps({"prompt": "x", "choice": ["a", "b"]}) + "\n" for _ in range(4)))
        out.unlink()
        assert b"line 1 (id 1) and 3 others were cut and may not match their constraints" in run(*args).stderr

    def test_whatever_is_done_first_comes_first(self, model, source, tmp_path):
        """With a stop in between the rest is answered, and nothing twice."""
        out = tmp_path / "out.jsonl"
        args = ("--model", model, "--input-jsonl", str(source), "--output-jsonl", str(out), "--batch", "3")
        out.write_text('{"id": 3, "text": "x"}\n')
        assert run(*args).returncode == 0
        assert [r["id"] for r in lines_of(out)] == [3, "a", 2]

    def test_at_the_end_it_is_said_how_fast_all_were(self, model, source):
        done = run("--model", model, "--input-jsonl", str(source), script={"pieces": ["ab", "c"]})
        assert b"3 results, 9 new tokens in " in done.stderr

    @pytest.mark.parametrize("number", ["0", "-1", "two", "1.5"])
    def test_a_wrong_number_at_a_time_is_refused(self, model, source, number):
        done = run("--model", model, "--input-jsonl", str(source), "--batch", number)
        assert done.returncode == 2
        assert f"batch is '{number}', it must be auto or a whole number from 1".encode() in done.stderr

    def test_one_prompt_is_no_batch(self, model):
        done = run("--model", model, "--prompt", "x", "--batch", "2")
        assert done.returncode == 2
        assert b"--batch are for many prompts; name them with --input-jsonl FILE" in done.stderr

    @pytest.mark.parametrize("more", [("--prompt", "x"), ("--jsonl",), ("-o", "f"), ("--session", "s"), ("--stats",)])
    def test_what_does_not_go_with_many_prompts_is_refused(self, model, source, more):
        done = run("--model", model, "--input-jsonl", str(source), *more)
        assert done.returncode == 2
        assert b"leave out" in done.stderr

    def test_results_without_prompts_are_refused(self, model, tmp_path):
        done = run("--model", model, "--output-jsonl", str(tmp_path / "out"))
        assert done.returncode == 2
        assert b"--input-jsonl" in done.stderr


def test_what_has_no_room_for_its_output_ends_where_the_context_does(tmp_path, capfd):
    weights = random_model(vocab_size=264, seed=11, max_position_embeddings=128, eos_token_id=None)
    model = save(weights, tmp_path / "model", tokenizer=True)
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"prompt": "x" * 100}) + "\n" + json.dumps({"prompt": "short"}) + "\n")
    assert (
        main(["generate", "--model", str(model), "--input-jsonl", str(source), "--max-tokens", "120", "--seed", "4"])
        == 0
    )
    out, err = capfd.readouterr()
    first, second = (json.loads(line) for line in out.splitlines())
    assert "--max-tokens 120 cut to" in err
    assert first["stats"]["prompt_tokens"] + len(first["tokens"]) == 128
    assert first["finish_reason"] == "length"
    assert 0 < len(second["tokens"]) <= 120


def until(process: subprocess.Popen[bytes], text: bytes) -> None:
    assert process.stderr is not None
    data = b""
    while text not in data:
        line = process.stderr.readline()
        assert line, data
        data += line


def test_on_a_real_model_neither_a_stop_nor_a_neighbour_changes_a_text(tmp_path, capfd):
    """And a common beginning is read once."""
    model = save(
        random_model(vocab_size=264, seed=11, max_position_embeddings=2048), tmp_path / "model", tokenizer=True
    )
    source, whole, parts = tmp_path / "in.jsonl", tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    book = "It was a dark night. " * 30
    prompts = [book + "Who?", "short", book + "Where?", book]
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    args = ["generate", "--model", str(model), "--input-jsonl", str(source), "--max-tokens", "12", "--seed", "4", "-q"]

    def tokens_of(file: Path) -> dict[int, list[int]]:
        return {result["id"]: result["tokens"] for result in lines_of(file)}

    assert main([*args, "--batch", "1", "--output-jsonl", str(whole)]) == 0
    expected = tokens_of(whole)
    assert list(expected) == [1, 2, 3, 4]
    for number, batch in ((0, "2"), (1, "1"), (2, "3"), (3, "auto")):
        parts.write_text("".join(whole.read_text().splitlines(keepends=True)[:number]))
        assert main([*args, "--batch", batch, "--output-jsonl", str(parts)]) == 0
        assert tokens_of(parts) == expected
    source.write_text(json.dumps({"prompt": prompts[0]}) + "\n" + json.dumps({"prompt": prompts[2], "seed": 6}) + "\n")
    for batch in ("1", "2"):
        assert main([*args, "--batch", batch]) == 0
        together = sorted((json.loads(line) for line in capfd.readouterr().out.splitlines()), key=lambda r: r["id"])
        assert together[1]["stats"]["reused_tokens"] == 512
        assert together[1]["tokens"] == expected[3]
