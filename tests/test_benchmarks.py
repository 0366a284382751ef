"""The benchmarks run, on very small cases: their numbers are not looked at, what they write is."""

from __future__ import annotations

import ast
import json
import re
import runpy
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from gguf.quants import quantize
from transformers import DynamicCache

from kit.fake_peers import fake_environment
from kit.families import save_tiny
from kit.models import TOKENIZER_SIZE, random_model, save
from offload.config.reading import read_config
from offload.errors import UsageError
from offload.kernels.cpu import kernels
from offload.metrics import ExpertStats
from offload.speed.rates import FOLDER_VARIABLE
from test_expert_slots import NUM_LAYERS, Homes, streamed
from triforce_cli.documents.reading import read_documents
from triforce_cli.documents.selection import Named

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))  # last: one of them is called as one here

import recordings
from gguf_file import metadata, store_with, vocabulary
from mixtures import kind_of
from relay import Relay
from report import lines, read
from resident import Mixture, Rounds, in_slots
from routing import Choices, hits_apart, measured
from server import Server

ROOT = Path(__file__).resolve().parents[1]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))


Run = Callable[..., tuple[str, str]]


def quiet(*_: object, **__: object) -> None:
    """Say nothing."""


def first_of_torch_and_ours(module: str, *within: str) -> str:
    """Which of the two a benchmark imports first, also by way of others: "" for neither."""
    for node in ast.parse((ROOT / "benchmarks" / f"{module}.py").read_text(encoding="utf-8")).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for top in (name.split(".")[0] for name in names):
            if top in ("offload", "torch", "transformers", "safetensors"):
                return top
            local = (ROOT / "benchmarks" / f"{top}.py").exists() and top not in within
            if local and (found := first_of_torch_and_ours(top, module, *within)):
                return found
    return ""


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_threads_wait_in_benchmarks_as_they_do_for_users(path: Path) -> None:
    """torch's threads spin for 6 ms where it is imported before this program: passes of several rows take a third
    longer beside them."""
    assert first_of_torch_and_ours(path.stem) in ("offload", "")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """(stdout, stderr) of a benchmark, run in this process. What it measures is kept for no other test."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "rates"))

    def run(name: str, *args: str) -> tuple[str, str]:
        path = str(ROOT / "benchmarks" / name)
        monkeypatch.setattr(sys, "argv", [path, *args])
        capfd.readouterr()
        runpy.run_path(path, run_name="__main__")
        return capfd.readouterr()

    return run


def test_sessions_compares_loading_with_dd(run: Run) -> None:
    args = ("--tokens", "1024", "--layers", "2", "--heads", "2", "--repeats", "1")
    written, table = run("sessions.py", *args)
    shared, runs = read(written)
    assert shared["num_bytes"] > 0
    assert {measured["what"] for measured in runs} == {"save", "dd, cold", "load, cold", "dd, warm", "load, warm"}
    assert "of dd" in table


@pytest.mark.skipif(not kernels().usable, reason=kernels().reason)
def test_kernels_are_compared_with_torch_and_a_sum(run: Run) -> None:
    few = ("--tokens", "600", "--rows", "1,3", "--layers", "1", "--megabytes", "1", "--stored", "MXFP4,INT4_F16/128")
    written, table = run("kernels.py", *few)
    shared, runs = read(written)
    assert shared["instruction_set"] == kernels().instruction_set
    assert shared["sum_bytes_per_second"] > 0
    assert len(runs) == 7 * 2 * 2  # attention, latents in two dtypes, two products, two encodings, by rows, two ways
    assert {(measured["kernel"].split()[0], measured["way"]) for measured in runs} == {
        (kernel, way) for kernel in ("attention", "latents", "product") for way in ("kernels", "torch")
    }
    assert all(measured["bytes_per_second"] > 0 for measured in runs)
    assert "of a sum" in table


@pytest.mark.deep
@pytest.mark.skipif(not kernels().usable, reason=kernels().reason)
def test_states_are_compared_with_attention_alone(run: Run) -> None:
    few = ("--sizes", "0.8B", "--layers", "4", "--rows", "1,2", "--prompt", "70", "--turns", "1", "--megabytes", "1")
    written, table = run("states.py", *few)
    shared, runs = read(written)
    assert shared["sum_bytes_per_second"] > 0
    assert [measured.get("rows") for measured in runs] == [1, 2, None]
    assert all(measured[name] > 0 for measured in runs for name in ("hybrid", "dense"))
    assert all(measured["rule"] < measured["hybrid"] for measured in runs[:2])
    assert "of bytes" in table


@pytest.mark.deep
def test_busy_compares_a_quiet_machine_with_a_busy_one(run: Run) -> None:
    written, table = run("busy.py", "--length", "100", "--max-tokens", "4", "--turns", "1", "--loops", "0,1")
    _, runs = read(written)
    assert [(measured["way"], measured["loops"]) for measured in runs] == [
        (way, loops) for way in ("ours, default", "ours, plain") for loops in (0, 1)
    ]
    assert all(measured["milliseconds_per_token"] > 0 for measured in runs)
    assert "times quiet" in table


@pytest.mark.deep
def test_ranks_compares_one_with_several(run: Run) -> None:
    written, table = run("ranks.py", "--length", "600", "--max-tokens", "4", "--turns", "1", "--link-gbps", "10")
    shared, runs = read(written)
    assert [measured["ranks"] for measured in runs] == [1, 2]
    one, two = (measured["plain"]["bytes_to_device"] for measured in runs)
    # Each moves half; what is fetched ahead for a next pass may be under way when it is counted.
    assert two == [pytest.approx(one[0] / 2, rel=0.2)] * 2
    assert len(runs[1]["default"]["seconds_in_sums"]) == 2
    assert "tokens, demo-target" in shared["title"]
    assert "1.00x" in table


@pytest.mark.deep
def test_peers_has_a_row_for_each_way_and_says_why_one_is_absent(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a llama.cpp that takes a quarter of a second a token, and that has no n-gram lookups called mod."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    ways = ["ours, plain", "ours, default", "llama.cpp", "llama.cpp, draft", "llama.cpp, n-grams", "openvino-genai"]
    args = ("--lengths", "200", "--max-tokens", "6", "--turns", "1", "--ways", ";".join(ways))
    written, table = run("peers.py", *args, "--peers-env", str(fake_environment(tmp_path / "env")))
    _, rows = read(written)
    assert [row["way"] for row in rows] == ways
    plain, ours, theirs, draft, lookups, absent = rows
    assert plain["first_difference_from_plain"] is None
    assert ours["first_difference_from_plain"] is None
    assert ours["plan"]["composition"]["gamma"] > plain["plan"]["composition"]["gamma"] == 0
    assert ours["peak_bytes"] > 50e6
    assert theirs["milliseconds_per_token"] == [250]
    assert not theirs["flash"]
    assert theirs["prefill_tokens_per_second"] == pytest.approx(2 * theirs["length"])
    assert theirs["setting"].startswith("wait policy default, flash attention off, cache f16")
    assert theirs["setting"].endswith("ubatch 2048")
    times = {(tried["setting"]["flash_attention"], tried["milliseconds_per_token"]) for tried in theirs["tried"]}
    assert times == {("off", 250), ("on", 750), ("off", None)}
    assert theirs["cache"] == draft["cache"] == lookups["cache"] == "f16"
    assert draft["draft"].endswith("demo-draft-bf16.gguf")
    assert lookups["rows"]
    assert [tried["lookup"] for tried in lookups["tried"] if "absent" in tried] == ["mod"]
    assert absent.keys() == {"length", "way", "absent", "tried"}
    assert "absent: " in table


@pytest.mark.deep
def test_batches_has_a_row_for_each_number_of_prompts_and_way(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a llama.cpp that takes a quarter of a second a token, however many prompts."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    args = ("--lengths", "200", "--batches", "1,2", "--max-tokens", "6", "--turns", "1")
    written, table = run("batches.py", *args, "--peers-env", str(fake_environment(tmp_path / "env")))
    _, rows = read(written)
    ways = ["ours, plain", "ours, default", "llama.cpp", "transformers"]
    assert [(row["prompts"], row["way"]) for row in rows] == [(number, way) for number in (1, 2) for way in ways]
    assert [row["tokens_per_second"] for row in rows if row["way"] == "llama.cpp"] == [
        [pytest.approx(number * 6 / 1.75)] for number in (1, 2)
    ]
    assert [len(row["tried"]) for row in rows if "flash attention off" in row.get("setting", "")] == [7, 7]
    assert all(row["tokens_per_second"][0] > 0 for row in rows)
    assert [row["plan"]["request"]["num_sequences"] for row in rows if "plan" in row] == [1, 1, 2, 2]
    assert "2.00x" in table
    args = ("--lengths", "300", "--batches", "2", "--max-tokens", "6", "--turns", "1", "--link-gbps", "1")
    written, table = run("batches.py", *args, "--peers-env", "none")  # else it would install one
    _, rows = read(written)
    assert [row["way"] for row in rows] == ways[:2]
    assert all(0 <= row["link_idle"] < 1 for row in rows)
    assert "caches over 1 GB/s" in table


def test_decode_measures_every_setting_on_one_prompt(run: Run) -> None:
    settings = ["plain", "default", "gamma=3+draft=no", "lookup=no", "transformers"]
    args = ("--lengths", "100", "--max-tokens", "6", "--turns", "2", "--temperatures", "0", "--settings")
    written, table = run("decode.py", *args, ",".join(settings), "--offload", "kv", "--link-gbps", "1")
    _, runs = read(written)
    assert [(measured["setting"], measured["turn"]) for measured in runs] == [
        (s, turn) for s in settings for turn in (0, 1)
    ]
    assert all(measured["milliseconds_per_token"] > 0 for measured in runs)
    assert len({measured["beginning"] for measured in runs if measured["setting"] != "transformers"}) == 1
    assert [measured["plan"]["composition"]["gamma"] for measured in runs[:6:2]] == [0, 63, 3]
    assert "vs plain" in table


@pytest.mark.deep
def test_a_replay_plays_settings_on_stretches_of_recorded_texts(run: Run) -> None:
    """That each setting writes the recorded text is checked by the replay itself. What passes take is timed on this
    machine, so a depth that is forced may lose against plain decoding, but not by much."""
    settings = ["default", "gamma=3", "gamma=3+lookup=no"]
    args = ("--lengths", "400", "--starts", "0,0.5", "--max-tokens", "24", "--stretches", "2")
    written, table = run("replay.py", *args, "--settings", ",".join(settings), "--offload", "kv", "--link-gbps", "1")
    _, results = read(written)
    assert [(result["start"], result["stretch"]) for result in results] == [(0, 0), (0, 1), (0.5, 0), (0.5, 1)]
    for result in results:
        plain = 1000 * result["plan"]["predicted"]["plain_seconds_per_token"]
        assert list(result["milliseconds_per_token"]) == settings
        assert all(plain / 50 < milliseconds < 2 * plain for milliseconds in result["milliseconds_per_token"].values())
    assert "best" in table


@pytest.mark.deep
def test_prefill_compares_offloaded_with_resident(run: Run) -> None:
    written, table = run("prefill.py", "--length", "300", "--repeats", "1", "--link-gbps", "1")
    placements = [measured["placement"] for measured in read(written)[1]]
    assert placements == ["resident", "offload kv, 1 GB/s", "offload weights,kv, 1 GB/s"]
    assert "vs resident" in table


@pytest.mark.deep
def test_acceptance_compares_rules_on_the_same_texts_and_trees_reads_it(run: Run, tmp_path: Path) -> None:
    """All of the cache drafts like the target itself, and an oracle knows better than mean keys do."""
    sizes = {"vocab_size": TOKENIZER_SIZE, "max_position_embeddings": 1024, "eos_token_id": None}
    model = save(random_model(**sizes), tmp_path / "model", tokenizer=True)
    args = ("--model", str(model), "--draft", str(model), "--length", "700", "--tasks", "continue", "--seeds", "2")
    lists = ("--rules", "oracle;published-once;mass", "--gammas", "8,4", "--budgets", "64,/1", "--chunks", "8,16")
    written, table = run("acceptance.py", *args, *lists, "--tokens", "16")
    oracle, published, _, _, whole, _ = read(written)[1]
    assert whole["budget"] == 700
    assert whole["acceptance"] > 0.995  # a rounding may tip a token in or out of top-p
    assert whole["tokens_per_pass"] > 8.9
    assert oracle["acceptance"] >= published["acceptance"]
    assert 0.0 < oracle["draft_acceptance"] < 1.0
    assert "tokens/pass" in table
    (tmp_path / "acceptance.jsonl").write_text(written)
    trees, table = run("trees.py", str(tmp_path / "acceptance.jsonl"))
    (result,) = read(trees)[1]
    assert result["positions"] == "acceptance"
    assert result["tokens_of_tree"]["8"] >= result["tokens_of_chain"]["8"] > 1.0
    assert "siblings" in table


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_the_gpu_benchmark_rehearses_on_a_cpu(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A widened model, decoding under a cap that makes it stream and on chip, bits, and transformers beside it."""
    out = tmp_path / "gpu.json"
    args = ("--device", "cpu", "--like", "tiny", "--lengths", "600", "--max-tokens", "6", "--device-memory", "0.066")
    args = (*args, "--minutes", "600")  # on a machine of any speed
    monkeypatch.setattr("offload.bench.checks.MODELS", {})  # they have tests of their own
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)  # the plan is of bf16 anywhere
    _, table = run("gpu.py", *args, "--work", str(tmp_path), "--out", str(out))
    found = json.loads(out.read_text())
    rows = found["runs"]
    said = [(row["placement"], row["mode"]) for row in rows]
    decoding = [(placement, mode) for placement in ("capped", "on chip") for mode in ("triforce", "plain")]
    others = [("on chip", mode) for mode in ("published", "batch", "plain batch", "compiled")]
    assert said == [("bf16", "bits"), *decoding, *others, ("offloaded cache", "transformers")], table
    assert rows[4]["bytes_milliseconds"] > 0
    assert all(row["milliseconds_per_token"] > 0 for row in rows[1:-2])
    assert all("milliseconds_per_token" in row for row in rows[-2:])  # differences of two times: 0 on a busy machine
    assert not any("skipped" in row for row in rows), table
    assert rows[0]["equal"] is True
    assert rows[1]["plan"]["placement"]["offload"]
    assert rows[1]["link_efficiency"] > 0
    assert found["steps"]["tests"]["exit_code"] == 0
    assert found["steps"]["checks"]["failed"] == 0

    del rows[2:4]  # as if it had been cut off there: what is missing is done, and nothing twice
    found["steps"]["tests"]["output"] = "kept"
    out.write_text(json.dumps(found))
    run("gpu.py", *args, "--work", str(tmp_path), "--out", str(out))
    again = json.loads(out.read_text())
    assert again["steps"] == found["steps"]
    assert again["runs"][:-2] == rows
    assert [(row["placement"], row["mode"]) for row in again["runs"][-2:]] == decoding[1:3]


def test_a_plan_is_written_once_and_read_with_each_of_its_runs() -> None:
    plans = [{"gamma": 7}, {"gamma": 31}]
    runs = [{"seed": seed, "plan": plan, "seconds": 1 / 3} for plan in plans for seed in (0, 1)]
    written = list(lines({"title": "a"}, [*runs, {"setting": "transformers"}]))
    assert sum('"gamma"' in line for line in written) == 2
    rounded = [measured | {"seconds": 0.333333} for measured in runs]
    assert read("\n".join(written)) == ({"title": "a"}, [*rounded, {"setting": "transformers"}])


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_name_their_command_and_machine(path: Path) -> None:
    shared, runs = read(path.read_text(encoding="utf-8"))
    assert shared["title"]
    assert shared["environment"]["command"].startswith("python ")
    assert shared["environment"]["cpu"]
    assert runs


def test_all_results_together_are_less_than_a_megabyte() -> None:
    assert RESULTS
    assert sum(path.stat().st_size for path in (ROOT / "benchmarks" / "results").iterdir()) < 1_000_000


@pytest.mark.deep
def test_a_long_text_has_a_row_for_each_window(run: Run) -> None:
    """That the text is that of plain decoding, it checks itself."""
    written, table = run("soak.py", "text", "--length", "300", "--max-tokens", "90", "--window", "4")
    _, windows = read(written)
    assert len(windows) > 1
    assert all(0 <= window["acceptance"] <= 1 and window["memory"] > 0 for window in windows)
    assert re.fullmatch(r"tokens \d+ to 90 after (2[7-9]\d|300)", windows[-1]["what"])
    assert "ms/token" in table


@pytest.mark.deep
def test_a_batch_that_is_killed_has_a_row_for_each_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """That each result is there once, and is that of a prompt alone, it checks itself."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    written, table = run("soak.py", "batch", "--prompts", "4", "--batch", "2", "--kills", "1")
    _, runs = read(written)
    assert len(runs) == 2
    assert runs[0]["what"].startswith("results 0 to ")
    assert runs[1]["what"].endswith("to 4 of 4, 2 at a time")
    assert "tokens/s" in table


@pytest.mark.deep
def test_a_server_with_a_crowd_has_no_faults(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """That each text is the one that a request gives alone, that nothing leaks and nothing hangs, it checks itself."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    written, table = run("soak.py", "serve", "--requests", "24", "--distinct", "12")
    shared, looks = read(written)
    assert (shared["faults"], [look["num_requests"] for look in looks]) == ([], [0, 24])
    assert shared["counts"]["requests_total"] > 12
    assert "threads" in table


@pytest.mark.parametrize(
    ("path", "field", "result", "choice"),
    [
        ("/v1/chat/completions", "messages", {"role": "tool", "content": "it"}, {"function": {"name": "read"}}),
        ("/v1/responses", "input", {"type": "function_call_output", "output": "it"}, {"name": "read"}),
        ("/v1/messages", "messages", {"role": "user", "content": [{"type": "tool_result"}]}, {"name": "read"}),
    ],
)
def test_a_relay_demands_a_call_where_a_turn_begins(path: str, field: str, result: Any, choice: Any) -> None:
    relay = Relay(Server("", None, Path()), "read", 9)  # type: ignore[arg-type]
    question, tools = {"role": "user", "content": "Read it."}, [{"name": "read"}, {"function": {"name": "write"}}]
    begun = relay.changed(path, {field: [question], "tools": tools, "max_tokens": 100})
    assert (begun["tool_choice"].items() >= choice.items(), begun["max_tokens"], begun["temperature"]) == (True, 9, 0)
    assert "tool_choice" not in relay.changed(path, {field: [question, result], "tools": tools})
    assert "tool_choice" not in relay.changed(path, {field: [question], "tools": tools[1:]})


@pytest.mark.deep
def test_a_second_turn_without_the_billing_block_reads_what_is_new_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    written, table = run("turns.py", "billing", "--tokens", "1200", "--context", "2048")
    _, answers = read(written)
    anew = {each["what"]: each["prompt"] - each["cached"] for each in answers if each["turn"] == 2}
    assert anew["block left out"] == anew["no block"] < 100
    assert anew["block kept"] > 1000
    assert "read anew" in table


def test_json_texts_are_judged_and_compared(run: Run, tmp_path: Path) -> None:
    schemas = tmp_path / "schemas.jsonl"
    schemas.write_text('{"const": {"a": [true, null]}}\n{"type": "string", "pattern": "(?=x)"}\n{"enum": ["one", 2]}\n')
    demo = ROOT / "triforce_cli" / "models" / "demo-target"
    written, table = run("json_texts.py", "--model", str(demo), "--schemas", str(schemas), "--tokens", "96")
    _, ways = read(written)
    assert "2 schemas can be followed, 1 cannot" in table
    assert [(way["texts"], way["finished"], way["unfit"], way["differing"]) for way in ways] == [(2, 2, 0, 0)] * 3
    assert ways[1]["accepted"]["grammar"] > 0


@pytest.mark.deep
def test_kinds_are_scored_against_the_folder_that_they_are_made_of(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    demo = ROOT / "triforce_cli" / "models" / "demo-target"
    config, text = read_config(demo), tmp_path / "text.txt"
    text.write_bytes((ROOT / "examples" / "persuasion.txt").read_bytes()[:600])
    store_with(
        demo, tmp_path / "Q8_0.gguf", metadata(config) | vocabulary(config, demo, "gpt-2"),
        partial(kind_of, mixture="Q8_0", config=config), lambda _, numbers, kind: quantize(numbers, kind),
    )  # fmt: skip
    written, table = run("kinds.py", "score", "--model", str(demo), "--files", str(tmp_path), "--text", str(text))
    shared, (found,) = read(written)
    assert shared["num_tokens"] > 100
    assert found["kinds"].keys() == {"Q8_0", "F32"}
    assert found["bits"] == pytest.approx(8.5, abs=0.03)
    assert found["file_bytes"] == (tmp_path / "Q8_0.gguf").stat().st_size
    assert abs(found["worse"]) < 0.05
    assert 0 < found["mean_kl"] < 0.01
    assert "Q8_0 100%" in table


@pytest.mark.parametrize(
    ("mixture", "sizes", "kinds"),
    [  # of files that others published
        ("IQ4_XS", (24, 14, 896, 4864), {"IQ4_NL": 120, "IQ4_XS": 24, "Q5_1": 24, "Q8_0": 1}),  # Qwen2.5 0.5B
        ("Q4_K_M", (28, 12, 1536, 8960), {"Q4_K": 168, "Q6_K": 29}),  # Qwen2.5 1.5B
    ],
)
def test_a_mixture_has_the_kinds_of_llama_quantize(
    tmp_path: Path, mixture: str, sizes: tuple[int, int, int, int], kinds: dict[str, int]
) -> None:
    num_layers, num_heads, hidden, inner = sizes
    fields = json.loads((ROOT / "triforce_cli" / "models" / "demo-target" / "config.json").read_text())
    fields |= {"num_hidden_layers": num_layers, "num_attention_heads": num_heads, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = read_config(tmp_path)
    rows = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up"), hidden)
    rows["ffn_down"] = inner
    shapes = {f"blk.{layer}.{part}": row for layer in range(num_layers) for part, row in rows.items()}
    shapes["token_embd"] = hidden
    found = Counter(kind_of(f"{name}.weight", (1, row), mixture, config).name for name, row in shapes.items())
    assert found == kinds


def test_each_question_about_a_document_has_its_passage_there_once(tmp_path: Path) -> None:
    """A file of each program is read back; white space may be another."""
    for module in ("docx", "reportlab", "lxml", "pypdf"):
        pytest.importorskip(module)
    from office_files import PROGRAMS, source, write

    for name in PROGRAMS:
        [reading] = read_documents(Named((write(name, tmp_path),)), "it", note=quiet, on_read=quiet)
        text = " ".join(reading.text.split())
        assert [text.count(" ".join(each.passage.split())) for each in source(name)[1]] == [1] * 14
    planted, questions = source("planted")
    assert [sum(each.passage in line.text for line in planted) for each in questions] == [1] * len(planted)


@pytest.mark.deep
def test_citations_are_judged_by_every_rule(run: Run) -> None:
    pytest.importorskip("lxml")
    demo = ROOT / "triforce_cli" / "models" / "demo-target"
    args = ("--documents", "board", "--novel", "4000", "--questions", "2")
    written, table = run("citations.py", "--model", str(demo), *args)
    shared, asked = read(written)
    assert [(each["document"], each["half"]) for each in asked] == [
        ("board", 1), ("board", 2), ("novel 4000", 1), ("novel 4000", 2),
    ]  # fmt: skip
    assert all(set(each["first"]) <= set(each["three"]) <= set(range(len(shared["rules"]))) for each in asked)
    assert all(0 < each["at random"][0] < each["at random"][1] < 0.5 for each in asked)
    assert all(f"\n{rule}" in table for rule in ("questions", "at random", *shared["rules"]))


def test_a_split_is_compared_with_the_link_and_whole_layers(run: Run) -> None:
    written, table = run("split.py", "--tokens", "4", "--layers", "2", "--cpu-gbps", "25", "--slow", "1")
    _, rows = read(written)
    assert [(each["share"], each["policy"]) for each in rows] == [
        (share, policy) for share in (0.2, 0.4, 0.6) for policy in ("link", "layers", "split")
    ]
    assert all(each["milliseconds"] > 0 for each in rows)
    assert all((each["by_cpu"] > 0) == (each["policy"] == "split") for each in rows)
    assert "of the better" in table


def played(run: Run, path: Path, tokens: int, rows: int) -> dict[tuple[str, float], dict[str, Any]]:
    """What is measured of recorded choices whose misses all cross the link, by text and share of slots."""
    args = ("--tokens", str(tokens), "--rows", str(rows), "--cpu-gbps", "25", "--slow", "1", "--expert-mb", ".01")
    written, _ = run("split.py", "--choices", str(path), *args)
    return {(each["text"], each["share"]): each for each in read(written)[1] if each["policy"] == "link"}


def test_a_split_plays_recorded_choices_in_their_order(run: Run, tmp_path: Path) -> None:
    """Of 10 experts, 2 a row. In layer 0 rows choose 0 and 1 alone, in layer 1 four experts in turn."""
    rows = [[[0, 1], [4 + 2 * (row % 2), 5 + 2 * (row % 2)]] for row in range(8)]
    chosen = torch.tensor(rows)
    recordings.save(tmp_path / "both", {"turns": chosen, "same": chosen[::2]}, 10)
    found = played(run, tmp_path / "both", 4, 1)
    assert {name: each["misses"] for name, each in found.items()} == {
        ("turns", 0.2): 2 + 4 * 2, ("turns", 0.4): 2 + 4, ("turns", 0.6): 2 + 4,
        ("same", 0.2): 4, ("same", 0.4): 4, ("same", 0.6): 4,
    }  # fmt: skip
    assert all(each["hit_rate"] == 1 - each["misses"] / 16 for each in found.values())
    recordings.save(tmp_path / "turns", {"turns": chosen}, 10)
    of_two = played(run, tmp_path / "turns", 4, 2)
    assert of_two["turns", 0.4]["misses"] == 6
    assert of_two["turns", 0.4]["hit_rate"] == 1 - 6 / (4 * (2 + 4))
    with pytest.raises(UsageError, match=r"8 rows of turns, 5 passes of 2 rows .* --tokens 4"):
        played(run, tmp_path / "turns", 5, 2)


def test_routing_counts_what_the_rows_of_a_text_choose(run: Run, tmp_path: Path) -> None:
    """Of a random mixture. Where all experts have slots, nothing crosses the link twice."""
    model = save_tiny("qwen3_moe", tmp_path / "model", tokenizer=True, vocab_size=TOKENIZER_SIZE, eos_token_id=None)
    (text := tmp_path / "some.txt").write_text("".join(f"Truth {n * n} is acknowledged. " for n in range(40)))
    args = ("--texts", str(text), "--stretches", "2", "--length", "32", "--prompts", "1", "--link-gbps", "1")
    args += ("--choices", str(tmp_path / "choices"))
    written, table = run("routing.py", "--model", str(model), *args)
    shared, rows = read(written)
    texts, linked = rows[:3], rows[3:]
    assert (shared["experts"], shared["used"]) == (8, 3)
    assert [(each["text"], each["way"], each["rows"]) for each in texts] == [
        ("some", "read", 64), ("some", "greedy", 32), ("some", "sampled", 32),
    ]  # fmt: skip
    for each in texts:
        counts = [each["distinct"][rows] for rows in sorted(each["distinct"], key=int)]
        assert 1 <= counts[0] <= 2
        assert counts == sorted(counts)
        assert counts[-1] <= 8 / 3 + 1e-5  # six digits are written
        assert all(0 <= hit <= 1 for of_rows in each["hits"].values() for own in of_rows.values() for hit in own)
    assert [(each["share"], each["gamma"], each["way"]) for each in linked] == [
        (share, gamma, way) for share in (0, 0.2, 0.4, 0.6) for gamma in (0, 7) for way in ("greedy", "sampled")
    ]
    chosen = recordings.load(tmp_path / "choices")["some"]
    assert (chosen.experts.count, chosen.chosen.shape) == (8, (64, read_config(model).num_layers, 3))
    counted = measured(Choices.of(chosen.chosen.split(32), 8), chosen.experts, 8 * chosen.chosen.shape[1])
    assert counted["hits"]["shared"][1] == pytest.approx(texts[0]["hits"]["shared"]["1"], rel=1e-5)
    assert linked[12]["hit_rate"] > linked[0]["hit_rate"]
    assert linked[12]["bytes"] < linked[0]["bytes"]
    assert "repeated" in table
    assert "of none" in table


@pytest.mark.skipif(not kernels().usable, reason=kernels().reason)
def test_blocks_counts_the_bytes_of_blocks_that_are_in_no_slot(run: Run, tmp_path: Path) -> None:
    """Of a random model's folder, on two texts. With slots for all blocks, each crosses once at most."""
    model = save_tiny("qwen4_exp", tmp_path / "model", tokenizer=True, vocab_size=TOKENIZER_SIZE, eos_token_id=None)
    for name, power in (("squares", 2), ("cubes", 3)):
        (tmp_path / f"{name}.txt").write_text("".join(f"{n**power}, " for n in range(100)))
    files = ",".join(str(tmp_path / f"{name}.txt") for name in ("squares", "cubes"))
    args = ("--texts", files, "--length", "256", "--tokens", "16", "--budget", "32", "--rows", "1,4", "--times", "1,3")
    written, table = run("blocks.py", "--model", str(model), *args)
    _, rows = read(written)
    assert [(each["text"], each["slots"], each["rows"]) for each in rows] == [
        (text, slots, count)
        for text in ("squares", "cubes")
        for slots in (32, 96, rows[-1]["slots"])
        for count in (1, 4)
    ]
    assert all(each["of_needed"] == 1 for each in rows)
    assert all(0 <= each["hits"] < 1 for each in rows)
    for few, _, every in zip(rows[::2], rows[1::2], rows[4:], strict=False):
        assert few["bytes_of_token"] >= every["bytes_of_token"] or few["text"] != every["text"]
    assert "of needed" in table


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8])
def test_routing_counts_the_hits_of_the_program_s_slots(slots: int) -> None:
    random, homes = Random(slots), Homes.made()
    wanted = [
        (layer, sorted(random.sample(range(8), random.choice((1, 3, 3, 6)))))
        for _ in range(40)
        for layer in range(NUM_LAYERS)
    ]
    with streamed(homes, slots) as given:
        for layer, experts in wanted:
            for _ in given[layer].batches(torch.tensor(experts)):
                pass
        stats = sum((each.stats for each in given), start=ExpertStats())
    counted = hits_apart(wanted, NUM_LAYERS * slots)
    assert (counted.hits, counted.misses) == (stats.hits, stats.misses)


def test_drafts_by_the_experts_in_slots_are_verified_by_all(run: Run, tmp_path: Path) -> None:
    """Of a random mixture. That drafts of all experts are always accepted, it checks itself."""
    model = save_tiny("qwen3_moe", tmp_path / "model", tokenizer=True, vocab_size=TOKENIZER_SIZE, norm_topk_prob=True)
    (text := tmp_path / "some.txt").write_text("".join(f"Truth {n * n} is acknowledged. " for n in range(40)))
    args = ("--texts", str(text), "--stretches", "2", "--length", "32")
    written, table = run("resident.py", "--model", str(model), *args)
    _, runs = read(written)
    shares, ways = (0.2, 0.4, 0.6, 0.8), ("renormalised", "dropped", "whole")
    assert [(each["share"], each["way"]) for each in runs] == [(share, way) for share in shares for way in ways]
    for each in runs:
        assert each["misses"] == sorted(each["misses"])
        assert (each["accepted"] == [1, 1, 1, 1]) == (each["way"] == "whole")
        assert each["of plain"][0] == 1
    few, *_, many = (each["misses"] for each in runs if each["way"] == "whole")
    assert all(miss > other for miss, other in zip(few, many, strict=True))
    assert "of plain" in table


def test_rounds_over_a_stretch_are_passes_over_its_tokens(tmp_path: Path) -> None:
    mixture = Mixture(save_tiny("qwen3_moe", tmp_path / "model", norm_topk_prob=True))
    tokens, cache, _ = mixture.read([*range(3, 23)])
    rounds = Rounds(mixture, cache, starts := torch.tensor([4, 9, 16]))
    for number in range(3):
        found, chosen = rounds.run(tokens[starts + number], number, None)
        for own, experts, end in zip(found, chosen, (starts + number + 1).tolist(), strict=True):
            probs, every = mixture.run(tokens[None, :end], None, DynamicCache())
            torch.testing.assert_close(own, probs[0])
            assert torch.equal(experts, every[-1])


def test_slots_hold_the_experts_that_were_used_last() -> None:
    held = in_slots(torch.tensor([0, 1, 2, 1, 3, 0]).view(-1, 1, 1), experts=5, slots=2)
    assert [row.nonzero()[:, 0].tolist() for row in held[2:, 0]] == [[0, 1], [1, 2], [1, 2], [1, 3]]
