"""`triforce score` from files to numbers on the real engine: beside transformers, and what it refuses."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from kit.forked import forked_ranks
from kit.gguf_models import write_gguf
from kit.models import byte_tokenizer, random_model, save, save_pair
from offload.engine.engine import Engine
from offload.engine.scores import Distance, Likelihood, Scores, num_common_tokens
from offload.errors import ModelError, UsageError
from offload.plan.planner import Plan
from offload.text.tokenizer import Tokenizer
from test_cli_prompt import Terminal, piped
from triforce_cli.documents.texts import Text
from triforce_cli.setup.choice import embedded_model

CONTEXT = 256
FIRST, SECOND = "Sé naïve 🙂:\nof the Rhine.\n", "It was a bright cold day in April.\n" * 3
TOLERANCE = 1e-4  # nats
VOCABULARY = 258

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("score")
    save_pair(folder, context=CONTEXT)
    (folder / "first.txt").write_text(FIRST)
    (folder / "second.txt").write_text(SECOND)
    return folder


@pytest.fixture
def score(folder: Path, triforce: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(folder)
    return lambda *args: triforce("score", "--model", "target", "--dtype", "fp32", *args)


@torch.inference_mode()
def distributions(folder: Path, text: str) -> tuple[Tensor, Tensor]:
    """transformers' logarithms of probabilities, fp64 [T - 1, V], and the tokens that are scored [T - 1]."""
    tokens = torch.tensor(Tokenizer.from_folder(folder).encode(text))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(tokens[None]).logits[0, :-1].double().log_softmax(1), tokens[1:]


def of_tokens(folder: Path, text: str) -> Tensor:
    """The log-likelihood of each."""
    logs, following = distributions(folder, text)
    return logs.gather(1, following[:, None])[:, 0]


def same(number: float) -> Any:
    return pytest.approx(number, abs=TOLERANCE)


def test_each_file_and_all_together_have_the_likelihood_of_transformers(score: Run, folder: Path) -> None:
    code, out, _ = score("first.txt", "second.txt", "--json", "--tokens", "--worst", "2")
    document = json.loads(out)
    assert code == 0
    parts = []
    for found, text in zip(document["files"], (FIRST, SECOND), strict=True):
        parts.append(wanted := of_tokens(folder / "target", text))
        assert (found["num_tokens"], found["num_scored"]) == (len(text.encode()), len(text.encode()) - 1)
        assert found["mean_log_likelihood"] == same(float(wanted.mean()))
        assert found["perplexity"] == pytest.approx(math.exp(-float(wanted.mean())), rel=1e-3)
        assert found["tokens"] == Tokenizer.from_folder(folder / "target").encode(text)
        assert found["log_probabilities"][0] is None
        assert found["log_probabilities"][1:] == [same(float(value)) for value in wanted]
    whole = torch.cat(parts)
    assert abs(float(whole.mean()) - float(torch.stack([part.mean() for part in parts]).mean())) > 0.01
    assert document["total"]["mean_log_likelihood"] == same(float(whole.mean()))
    assert document["total"]["num_tokens"] == len((FIRST + SECOND).encode())
    assert document["total"]["num_scored"] == len(whole)
    assert document["total"]["against"] == document["files"][0]["against"] == []
    assert document["plan"]["request"]["num_prompt_tokens"] + 1 == len(SECOND.encode())  # once, for the longest
    assert document["model"] == "target"


def test_the_least_likely_tokens_are_named_with_their_places(score: Run, folder: Path) -> None:
    wanted, (logs, tokens) = of_tokens(folder / "target", FIRST), distributions(folder / "target", FIRST)
    _, out, _ = score("first.txt", "--json", "--worst", "4")
    found = json.loads(out)["files"][0]["worst"]
    assert [token["index"] for token in found] == [int(place) + 1 for place in wanted.argsort()[:4]]
    for token in found:
        place = token["index"] - 1
        before = FIRST.encode()[: token["index"]].decode(errors="ignore")
        assert token["line"] == before.count("\n") + 1
        assert token["column"] == len(before.rpartition("\n")[2]) + 1
        assert token["token"] == int(tokens[place])
        assert token["log_probability"] == same(float(wanted[place]))
        assert token["likeliest"] == int(logs[place].argmax())
        assert token["likeliest_log_probability"] == same(float(logs[place].max()))
    assert "worst" in json.loads(score("first.txt", "--json", "--worst", "0")[1])["files"][0]
    assert "least likely" not in score("first.txt", "--worst", "0")[1]


@pytest.mark.parametrize("name", ["demo", "bytes"])
def test_positions_count_lines_and_characters(name: str, folder: Path) -> None:
    """A token that is a part of a character has its place. The demo's begins with a token that is none of the text."""
    tokenizer = Tokenizer.from_folder(embedded_model("demo-target") if name == "demo" else folder / "target")
    content = "Sé 🙂🙂 naïve\r\n\n日本 the end\nx"
    text = Text.of("a", content, tokenizer)
    lines = content.split("\n")
    seen = [text.position(index) for index in range(len(text.tokens))]
    assert seen == sorted(seen)
    assert seen[0] == (1, 1)
    assert seen[-1] == (4, 1)
    assert {line for line, _ in seen} >= {1, 2, 3, 4}
    plain = 0
    for token, (line, column) in zip(text.tokens, seen, strict=True):
        piece = tokenizer.decode([token])
        if piece.isascii() and piece.strip():
            plain += 1
            assert f"{lines[line - 1]}\n"[column - 1 :].startswith(piece)
    assert plain > 5


def test_the_table_has_a_row_for_each_text_and_one_for_all(
    score: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triforce_cli.screen.progress.LINE_SECONDS", 0.0)
    code, out, err = score("first.txt", "second.txt", "--worst", "1")
    means = [float(of_tokens(folder / "target", text).mean()) for text in (FIRST, SECOND)]
    rows = {line.split()[0]: line.split()[1:] for line in out.split("\n\n")[0].splitlines()}
    assert code == 0
    assert list(rows) == ["text", "first.txt", "second.txt", "total"]
    assert [float(rows[name][2]) for name in ("first.txt", "second.txt")] == [pytest.approx(m, abs=1e-3) for m in means]
    places = out.split("\n\n")[1].splitlines()[1:]
    assert [place.split(":")[0] for place in places] == ["first.txt", "second.txt"]
    total = len((FIRST + SECOND).encode()) - 2
    assert f"prefill: {total} tokens in" in err  # one stage for all, so that the time that is left is that of all
    assert err.count("tokens in") == 1


def test_a_text_through_a_pipe_and_a_line_for_each(score: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _, out, _ = score("first.txt", "--jsonl", "--quiet")
    named = json.loads(out)
    with piped(FIRST.encode()):
        _, out, _ = score("--jsonl", "--quiet")
    assert json.loads(out) == named | {"file": "standard input"}
    with piped(FIRST.encode()):
        _, out, err = score("second.txt", "-", "--jsonl", "--quiet")
    lines = [json.loads(line) for line in out.splitlines()]
    assert ([line["file"] for line in lines], err) == (["second.txt", "standard input"], "")
    assert lines[1]["mean_log_likelihood"] == same(named["mean_log_likelihood"])
    monkeypatch.setattr(sys, "stdin", Terminal())
    code, _, err = score()
    assert (code, "there is no text" in err) == (2, True)


def test_lines_are_written_as_soon_as_a_text_is_scored(
    score: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Engine.score

    def fails(engine: Engine, tokens: Any, **options: Any) -> Scores:
        if len(tokens) == len(SECOND.encode()):
            raise UsageError("enough")
        return whole(engine, tokens, **options)

    monkeypatch.setattr(Engine, "score", fails)
    code, out, err = score("first.txt", "second.txt", "--jsonl", "--quiet")
    assert [json.loads(line)["file"] for line in out.splitlines()] == ["first.txt"]
    assert (code, json.loads(err)["error"]["message"]) == (2, "enough")


def test_links_change_nothing(score: Run) -> None:
    plain = score("first.txt", "second.txt", "--quiet")
    assert score("first.txt", "second.txt", "--quiet", "--offload", "weights,kv", "--link-gbps", "2") == plain


def test_another_model_is_compared_place_by_place(score: Run, folder: Path) -> None:
    """With the original in the direction KL(reference || other)."""
    args = ("first.txt", "second.txt", "--against", "draft", "--json", "--tokens", "--offload", "kv")
    document = json.loads(score(*args)[1])
    kls, agree = [], []
    for found, text in zip(document["files"], (FIRST, SECOND), strict=True):
        (ours, _), (theirs, _) = (distributions(folder / name, text) for name in ("target", "draft"))
        kls.append((ours.exp() * (ours - theirs)).sum(1))
        agree.append((ours.argmax(1) == theirs.argmax(1)).double())
        [against] = found["against"]
        assert against["model"] == "draft"
        assert against["mean_log_likelihood"] == same(float(of_tokens(folder / "draft", text).mean()))
        assert against["mean_kl"] == same(float(kls[-1].mean()))
        assert against["divergences"][1:] == [pytest.approx(float(kl), abs=1e-3) for kl in kls[-1]]
        assert against["log_probabilities"][1:] == [same(float(each)) for each in of_tokens(folder / "draft", text)]
    [total], kl = document["total"]["against"], torch.cat(kls)
    assert total["mean_kl"] == same(float(kl.mean()))
    assert total["largest_kl"] == pytest.approx(float(kl.max()), abs=1e-3)
    assert float(kl.median()) < total["kl_percentile_99"] <= total["largest_kl"]
    assert total["same_likeliest"] == pytest.approx(float(torch.cat(agree).mean()))
    assert 0 < total["same_likeliest"] < 1
    lines = score(*args[:4], "--jsonl", *args[5:])[1].splitlines()
    assert [json.loads(line)["against"][0]["mean_kl"] for line in lines] == [same(float(kl.mean())) for kl in kls]
    rows = score("first.txt", "--against", "draft", "--worst", "0")[1].split("\n\n")[1].splitlines()
    assert [row.split()[0] for row in rows] == ["model", "target", "draft"]


def test_a_quantised_file_is_compared_with_its_original(score: Run, folder: Path, tmp_path: Path) -> None:
    """In its vocabulary padding has names. As it is stored without loss, nothing differs but by rounding."""
    shapes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 264, "max_position_embeddings": CONTEXT}
    model = save(random_model("qwen2", **shapes), tmp_path / "model", tokenizer=True)
    files = {kind: tmp_path / f"{kind}.gguf" for kind in ("F32", "Q8_0", "Q4_0")}
    for kind, file in files.items():
        write_gguf(model, file, kind=kind)
    against = [arg for file in files.values() for arg in ("--against", str(file))]
    code, out, err = score("first.txt", "--model", str(model), *against, "--json")
    assert code == 0, err
    exact, eight, four = (found["mean_kl"] for found in json.loads(out)["total"]["against"])
    assert exact < 1e-6
    assert 1e-6 < eight < four / 10


def test_percentiles_are_of_all_places() -> None:
    def scores(divergences: list[float], likeliest: int) -> Scores:
        values = torch.tensor(divergences)
        return Scores((0,) * 61, values - 2, torch.full_like(values, likeliest).long(), values, divergences=values)

    first, second = [i / 100 for i in range(1, 61)], [i / 100 for i in range(61, 101)]
    found = Distance.of([scores(first, 1), scores(second, 1)], [scores(first, 1), scores(second, 2)])
    assert found.mean == pytest.approx(0.505)
    assert (found.percentile_99, found.largest) == (pytest.approx(0.99), pytest.approx(1.0))
    assert found.same_likeliest == pytest.approx(0.6)
    likelihood = Likelihood.of([scores(first, 1), scores(second, 1)])
    assert (likelihood.num_scored, likelihood.mean) == (100, pytest.approx(-1.495))
    assert likelihood.perplexity == pytest.approx(math.exp(1.495))
    assert Likelihood(1, -1000.0).perplexity == math.inf


def test_another_vocabulary_is_refused_before_weights_are_read(score: Run, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder / "draft", other)
    words = json.loads((other / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(words))
    (other / "model.safetensors").write_bytes(b"no weights")
    code, out, err = score("first.txt", "--against", str(other))
    assert (code, out) == (4, "")
    assert f"{other} has another vocabulary" in err
    assert "'b' for 'a'" in err or "'a' for 'b'" in err
    assert "load" not in err


def test_what_only_one_vocabulary_names_does_not_count(folder: Path, tmp_path: Path) -> None:
    """Unless each has a token that the other has not."""

    def with_more(name: str, *tokens: str) -> Path:
        shutil.copytree(folder / "target", path := tmp_path / name)
        more: PreTrainedTokenizerFast = byte_tokenizer()
        more.add_tokens(list(tokens))
        more.save_pretrained(path)
        config = json.loads((path / "config.json").read_text()) | {"vocab_size": 264}
        (path / "config.json").write_text(json.dumps(config))
        return path

    def common(model: Path, other: Path) -> int:
        return num_common_tokens(model, Tokenizer.from_folder(model), other)

    padded, other = with_more("padded", "[PAD1]", "[PAD2]"), with_more("other", "[PAD1]", "[UNK]", "x y")
    assert common(folder / "target", padded) == common(padded, folder / "target") == VOCABULARY
    assert common(padded, padded) == VOCABULARY + 2
    with pytest.raises(ModelError, match=r"token 259 is '\[UNK\]' for '\[PAD2\]'"):
        common(padded, other)


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("no.txt",), 2, "the text cannot be read from no.txt: No such file"),
        (("empty.txt",), 2, "empty.txt has 0 tokens; it needs at least 2"),
        (("one.txt",), 2, "one.txt has 1 token; it needs at least 2"),
        (("latin.txt",), 2, "latin.txt is not valid UTF-8"),
        (("long.txt", "first.txt"), 3, "long.txt has 257 tokens and the context of target is 256"),
        (("first.txt", "first.txt"), 2, "first.txt is named twice"),
        (("second.txt", "--against", "small"), 3, "second.txt has 105 tokens and the context of small is 64"),
        (("first.txt", "--tokens"), 2, "--tokens adds to JSON"),
        (("first.txt", "--json", "--jsonl"), 2, "two forms of one answer"),
        (("first.txt", "--worst", "-1"), 2, "worst is -1"),
        (("first.txt", "--against", "nowhere"), 4, "nowhere"),
        (("first.txt", "--against", "target"), 2, "the model target is named twice"),
    ],
)
def test_bad_input_is_refused(score: Run, folder: Path, args: tuple[str, ...], code: int, said: str) -> None:
    if not (folder / "small").exists():
        save(random_model(vocab_size=VOCABULARY, max_position_embeddings=64), folder / "small", tokenizer=True)
    (folder / "empty.txt").write_text("")
    (folder / "one.txt").write_text("a")
    (folder / "latin.txt").write_bytes(b"na\xefve")
    (folder / "long.txt").write_text("x" * (CONTEXT + 1))
    found, out, err = score(*args)
    assert (found, out) == (code, "")
    assert said in err
    assert "load" not in err


def test_a_text_as_long_as_the_context_fits(score: Run, folder: Path) -> None:
    (folder / "whole.txt").write_text("x" * CONTEXT)
    code, out, _ = score("whole.txt", "--json")
    assert code == 0
    assert json.loads(out)["files"][0]["num_scored"] == CONTEXT - 1


def test_models_in_turn_are_not_for_ranks_that_others_started(score: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from offload.speed.hardware import Launched

    monkeypatch.setattr(Launched, "look", classmethod(lambda cls: Launched(0, 2, 0, 2)))
    code, _, err = score("first.txt", "--against", "draft")
    assert code == 2
    assert "torchrun" in err


def test_several_processes_score_as_one(score: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One model after the other."""
    engines, load = list[int](), Engine.load

    def counted(plan: Plan, *args: Any, **options: Any) -> Engine:
        engines.append(plan.request.num_devices)
        return load(plan, *args, **options)

    monkeypatch.setattr(Engine, "load", counted)
    args = ("first.txt", "--against", "draft", "--json", "--quiet")
    with forked_ranks():
        one, two = (json.loads(score(*args, *more)[1])["total"] for more in ((), ("--gpus", "2")))
    assert engines == [1, 1, 2, 2]
    assert two["mean_log_likelihood"] == same(one["mean_log_likelihood"])
    assert two["against"][0]["mean_kl"] == same(one["against"][0]["mean_kl"])
