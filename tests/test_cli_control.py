"""What `triforce` writes under penalties, samplers and constraints, on the real engine with tiny random models."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from kit.models import save_pair
from offload.decode.gpu_draws import Judge
from offload.decode.sampling import SamplingParams
from offload.decode.warp import Warping
from offload.engine.engine import Engine, load_tokenizer, plan_request, timed
from offload.engine.request import GenerationRequest
from offload.engine.sequences import Sequences
from offload.errors import UsageError
from offload.grammar.constraint import Constraint
from offload.model.passes import forward
from offload.plan.options import Options
from offload.plan.request import Request
from test_cli_engine import SMALL_LEVELS
from triforce_cli.answering.answer import Part
from triforce_cli.answering.request import Wanted
from triforce_cli.batch.records import read_records
from triforce_cli.chat.dialogue import Dialogue
from triforce_cli.chat.settings import Settings

Triforce = Callable[..., tuple[int, str, str]]
PROMPT = "one two three four five six seven one two three four"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SAMPLED = ("--temperature", "1", "--top-p", "1", "--seed", "3")
CONTROLS = {
    "penalties": ("--repetition-penalty", "1.3", "--presence-penalty", "0.5", "--frequency-penalty", "0.2"),
    "a window": ("--repetition-penalty", "1.5", "--penalty-window", "4"),
    "no triple twice": ("--no-repeat-ngram", "3"),
    "DRY": ("--dry-multiplier", "2", "--dry-allowed-length", "1"),
    "biases": ("--logit-bias", "97=-inf", "--logit-bias", "98=3"),
    "a regex": ("--regex", "[a-c]{3} [0-9]+!"),
    "a schema": ("--json-schema", json.dumps(SCHEMA)),
    "samplers": ("--top-n-sigma", "1", "--typical-p", "0.9", "--xtc-probability", "0.5", "--min-tokens", "5"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder, context=512)
    (folder / "prompt.txt").write_text(PROMPT)
    return folder


@pytest.fixture
def written(folder: Path, triforce: Triforce) -> Callable[..., Any]:
    """Of `triforce generate ARGS --json`."""

    def run(*args: str, levels: bool = True, code: int = 0) -> Any:
        pair = ("--model", str(folder / "target"), "--draft", str(folder / "draft") if levels else "none")
        common = (
            "--prompt-file",
            str(folder / "prompt.txt"),
            "--dtype",
            "fp32",
            "--max-tokens",
            "40",
            "--quiet",
            "--json",
        )
        found, out, err = triforce("generate", *pair, *common, *(SMALL_LEVELS if levels else ()), *args)
        assert (found, bool(err)) == (code, code != 0), err
        return json.loads(out)

    return run


@pytest.mark.parametrize(
    "control",
    [
        pytest.param(control, id=name, marks=[pytest.mark.deep] * (name in ("a window", "no triple twice", "a regex")))
        for name, control in CONTROLS.items()
    ],
)
def test_the_greedy_text_is_that_of_plain_decoding(control: tuple[str, ...], written: Callable[..., Any]) -> None:
    code = 6 if control is CONTROLS["a schema"] else 0  # which 40 tokens cut
    ours = written(*control, "--temperature", "0", code=code)
    plain = written(*control, "--temperature", "0", "--no-speculation", code=code)
    assert ours["tokens"] == plain["tokens"]
    assert ours["finish_reason"] == plain["finish_reason"]


def test_controls_change_the_text(written: Callable[..., Any]) -> None:
    usual = written("--temperature", "0")["tokens"]
    others = [written("--temperature", "0", *CONTROLS[name])["tokens"] for name in ("penalties", "DRY", "biases")]
    assert all(tokens != usual for tokens in others)
    assert 97 not in others[-1]
    tokens = written("--temperature", "0", "--no-repeat-ngram", "2")["tokens"]
    pairs = list(pairwise(tokens))
    assert len(set(pairs)) == len(pairs)


def test_a_text_is_what_its_schema_says(written: Callable[..., Any]) -> None:
    found = written(*CONTROLS["a schema"], *SAMPLED, "--max-tokens", "200")
    assert found["finish_reason"] == "stop"
    jsonschema.validate(json.loads(found["text"]), SCHEMA)
    levels = {level["name"]: level["accepted_by"] for level in found["stats"]["levels"]}
    assert levels["target"]["grammar"] > 0


def test_a_text_is_what_its_regex_its_choices_or_its_grammar_say(written: Callable[..., Any]) -> None:
    assert re.fullmatch("[a-c]{3} [0-9]+!", written("--regex", "[a-c]{3} [0-9]+!", *SAMPLED)["text"])
    assert written("--choice", "red,green,blue", *SAMPLED)["text"] in ("red", "green", "blue")
    assert written("--choice", "a,b", "--choice", "c", *SAMPLED)["text"] in ("a,b", "c")
    grammar = Path(__file__).parent / "words.lark"
    assert re.match("[a-z]+( [a-z]+)*", written("--grammar", str(grammar), *SAMPLED)["text"])


CUT = "ends at --max-tokens 3 and may not match the"


@pytest.mark.parametrize("form", [(), ("--json",), ("--jsonl",)])
@pytest.mark.parametrize(
    ("constraint", "said"),
    [
        (("--json-schema", json.dumps(SCHEMA)), "JSON schema"),
        (("--regex", "[a-c]{3} [0-9]+!"), "regex"),
        (("--regex", "[a-c]+"), "regex"),  # it matches, but the model had not ended it
        (("--choice", "green,blue"), "list of choices"),
        (("--grammar", str(Path(__file__).parent / "words.lark")), "grammar"),
    ],
)
def test_a_text_that_is_cut_and_may_not_match_ends_with_6(
    constraint: tuple[str, ...], said: str, form: tuple[str, ...], folder: Path, triforce: Triforce
) -> None:
    """Broken JSON ended with 0, under --quiet without a word."""
    args = ("--prompt-file", str(folder / "prompt.txt"), "--max-tokens", "3", *constraint, "--draft", "none", "-q")
    code, out, err = triforce("generate", "--model", str(folder / "target"), *args, "--seed", "1", *form)
    assert code == 6
    assert f"{CUT} {said}; raise it" in err
    assert out
    if form:
        assert json.loads(out.splitlines()[-1])["finish_reason"] == "length"
        assert json.loads(err)["error"] | {"message": ""} == {"kind": "unfinished", "message": "", "exit_code": 6}


@pytest.mark.parametrize(("over", "code"), [(False, 6), (True, 124)])
def test_a_chat_without_a_terminal_ends_as_its_replies_did(
    over: bool, code: int, folder: Path, triforce: Triforce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies that were cut by their time, or may not match, ended with 0."""
    (tmp_path / "in.txt").write_text("Who?\nWhat?\n")
    args = ("--draft", "none", "--max-tokens", "3", "--regex", "[a-c]{3} [0-9]+!", "--json", "-q")
    if over:
        args = (*args, "--timeout", "5")
        monkeypatch.setattr(Dialogue, "_show_steps", lambda self, answer, *more: answer.parts.append(Part("a", "")))
    with (tmp_path / "in.txt").open() as messages:
        monkeypatch.setattr(sys, "stdin", messages)
        found, out, err = triforce("chat", "--model", str(folder / "target"), *args)
    assert found == code
    assert [json.loads(line)["finish_reason"] for line in out.splitlines()] == ["timeout" if over else "length"] * 2
    assert "reply 1 and 1 other were cut" in json.loads(err.splitlines()[-1])["error"]["message"]


def test_a_file_with_a_text_that_may_not_match_stays_partial(folder: Path, triforce: Triforce, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    args = ("--prompt-file", str(folder / "prompt.txt"), "--json-schema", json.dumps(SCHEMA), "--draft", "none")
    common = ("--model", str(folder / "target"), *args, "--max-tokens", "3", "-o", str(out))
    assert triforce("generate", *common)[0] == 6
    assert (out.exists(), bool(out.with_name("out.json.partial").read_text())) == (False, True)


def test_a_text_after_which_nothing_may_follow_is_whole(written: Callable[..., Any]) -> None:
    """The limit and the end of the grammar are in one place."""
    for constraint, most in ((("--choice", "red,blu"), 3), (("--regex", "[0-9]{5}"), 5)):
        found = written(*constraint, *SAMPLED, "--max-tokens", str(most))
        assert (len(found["tokens"]), found["finish_reason"]) == (most, "stop")


def test_a_free_text_that_is_cut_says_so_unless_quiet(folder: Path, triforce: Triforce, tmp_path: Path) -> None:
    """It ended in the middle of a sentence without a word."""
    args = (
        "--model",
        str(folder / "target"),
        "--draft",
        "none",
        "--prompt-file",
        str(folder / "prompt.txt"),
        "--ignore-eos",
    )
    said = "ends here, at --max-tokens 3\n"
    for command, name in (("generate", "the text"), ("ask", "the answer")):
        for form in ((), ("--json",), ("-o", str(tmp_path / "out.txt"))):
            code, _, err = triforce(command, *args, "--max-tokens", "3", *form)
            assert (code, err.endswith(f"{name} {said}")) == (0, True), err
        assert triforce(command, *args, "--max-tokens", "3", "-q")[::2] == (0, "")
    code, _, err = triforce("generate", *args, "--max-tokens", "3", "--stop", "e", "--logit-bias", "e=100")
    assert (code, "ends here" in err) == (0, False)


def test_a_text_that_ends_where_the_context_does_says_so(folder: Path, triforce: Triforce, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("x" * 500)
    args = ("--model", str(folder / "target"), "--draft", "none", "--prompt-file", str(book))
    code, _, err = triforce("generate", *args, "--ignore-eos")
    assert (code, err.endswith("the text ends here, where the context does\n")) == (0, True)
    code, _, err = triforce("generate", *args, "--regex", "[a-z]{300}", "-q")
    assert (code, err) == (
        6,
        "error: the text ends where the context does and may not match the regex; shorten the prompt\n",
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--json-schema", "{"), "the JSON schema is not JSON"),
        (("--json-schema", "nowhere.json"), "the JSON schema cannot be read from nowhere.json"),
        (("--json-schema", '{"not": {}}'), "Unimplemented keys"),
        (("--regex", "("), "the regex cannot be followed: column 1"),
        (("--regex", "a", "--choice", "b"), "regex and choice both say what the text is"),
        (("--logit-bias", "the"), "logit-bias is 'the', it must be TOKEN=X"),
        (("--logit-bias", "7=much"), "logit-bias of '7' is 'much'"),
        (("--logit-bias", "99999=1"), "logit-bias names token 99999"),
        (("--min-tokens", "50", "--max-tokens", "9"), "min-tokens is 50, it must be at most max-tokens, 9"),
        (("--repetition-penalty", "0"), "repetition-penalty is 0.0, it must be above 0"),
        (("--ignore-eos", "--regex", "a"), "leave one of them out"),
        (("--logprobs", "3"), "--logprobs go into JSON"),
        (("--logprobs", "21", "--json"), "logprobs is 21, it must be from 0 to 20"),
    ],
)
def test_what_cannot_be_done_is_refused_before_the_model_is_loaded(
    args: tuple[str, ...], said: str, folder: Path, triforce: Triforce, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "load", None)
    prompt = ("--prompt-file", str(folder / "prompt.txt"))
    code, out, err = triforce("generate", "--model", str(folder / "target"), *prompt, *args)
    assert (code, out) == (2, "")
    assert said in err


def test_verify_holds_under_controls(folder: Path, triforce: Triforce) -> None:
    pair = ("--model", str(folder / "target"), "--draft", str(folder / "draft"), *SMALL_LEVELS)
    prompt = str(folder / "prompt.txt")
    for control in (CONTROLS["penalties"], CONTROLS["a regex"], (*CONTROLS["samplers"], *SAMPLED)):
        code, out, err = triforce("verify", *pair, "--prompt-file", prompt, "--max-tokens", "12", "--json", *control)
        assert code == 0, err
        assert len(json.loads(out)["tokens"]) > 3


def test_log_probabilities_are_the_models_own(folder: Path, written: Callable[..., Any]) -> None:
    """Whatever sampling makes of them, and whoever drafted the tokens."""
    controls = ("--repetition-penalty", "1.5", "--temperature", "0")
    found, plain = (written(*controls, "--logprobs", "3", levels=levels) for levels in (True, False))
    assert found["logprobs"] == plain["logprobs"]
    tokenizer = load_tokenizer(folder / "target", None)
    prompt = tokenizer.encode(PROMPT)
    plan = plan_request(
        folder / "target", None, Options(device="cpu", dtype="fp32"), num_prompt_tokens=99, max_tokens=9
    )
    with Engine.load(plan, folder / "target", None, tokenizer) as engine:
        for place, score in enumerate(found["logprobs"][:5]):
            engine.levels["target"].truncate(0)
            [row] = forward(engine.levels["target"], [*prompt, *found["tokens"][:place]], 1).log_softmax(-1)
            assert score["token"] == found["tokens"][place]
            assert score["logprob"] == pytest.approx(float(row[score["token"]]), abs=1e-4)
            best = row.topk(3)
            assert [each["token"] for each in score["top"]] == best.indices.tolist()
            assert [each["logprob"] for each in score["top"]] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_events_have_log_probabilities_with_their_tokens(folder: Path, triforce: Triforce) -> None:
    args = ("--prompt-file", str(folder / "prompt.txt"), "--max-tokens", "6", "--jsonl", "--logprobs", "0", "--quiet")
    _, out, _ = triforce("generate", "--model", str(folder / "target"), "--draft", "none", *args)
    events = [json.loads(line) for line in out.splitlines()]
    tokens = [event for event in events if event["event"] == "token"]
    assert [[score["token"] for score in event["logprobs"]] for event in tokens] == [e["tokens"] for e in tokens]
    assert all(score["top"] == [] for event in tokens for score in event["logprobs"])
    assert "logprobs" not in events[-1]


def test_lines_of_a_batch_have_controls_of_their_own(folder: Path, tmp_path: Path, triforce: Triforce) -> None:
    lines: list[dict[str, Any]] = [
        {"prompt": "a", "json_schema": SCHEMA, "max_tokens": 200},
        {"prompt": "b", "choice": ["red", "green"]},
        {"prompt": "c", "regex": "[0-9]{4}", "logprobs": 1},
        {"prompt": "d", "logit_bias": {"97": "-inf", "98": 5}, "repetition_penalty": 1.2, "ignore_eos": True},
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    pair = ("--model", str(folder / "target"), "--draft", "none", *SAMPLED)
    code, out, _ = triforce(
        "generate", *pair, "--input-jsonl", str(source), "--quiet", "--max-tokens", "12", "--batch", "3"
    )
    assert code == 0
    found = {line["id"]: line for line in map(json.loads, out.splitlines())}
    jsonschema.validate(json.loads(found[1]["text"]), SCHEMA)
    assert found[2]["text"] in ("red", "green")
    assert re.fullmatch("[0-9]{4}", found[3]["text"])
    assert [score["token"] for score in found[3]["logprobs"]] == found[3]["tokens"]
    assert "logprobs" not in found[2]
    assert 97 not in found[4]["tokens"]
    assert len(found[4]["tokens"]) == 12


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"regex": 3}, "regex is 3; it must be a text"),
        ({"choice": "a"}, "choice is"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice both say what the text is"),
        ({"logit_bias": {"5": "much"}}, "logit_bias is"),
        ({"ignore_eos": 1}, "ignore_eos is 1; it must be true or false"),
        ({"repetition_penalty": 0}, "repetition-penalty is 0"),
        ({"logprobs": 30}, "logprobs is 30"),
    ],
)
def test_a_line_that_is_wrong_is_named(line: dict[str, Any], said: str) -> None:
    defaults = Wanted(max_tokens=7, sampling=SamplingParams(), stops=())
    with pytest.raises(UsageError, match=re.escape(said)) as error:
        read_records(json.dumps({"prompt": "x"} | line), "lines", defaults)
    assert "line 1" in str(error.value)


def test_a_line_that_the_model_cannot_answer_is_named(folder: Path, tmp_path: Path, triforce: Triforce) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "x"}\n{"prompt": "y", "regex": "("}')
    code, out, err = triforce("generate", "--model", str(folder / "target"), "--input-jsonl", str(source))
    assert (code, out) == (2, "")
    assert "line 2 (id 2): the regex cannot be followed" in err


def test_settings_of_a_chat_are_all_of_them() -> None:
    settings = Settings(sampling=SamplingParams(constraint=Constraint("regex", "a+")), max_tokens=9)
    changed = settings.changed("repetition-penalty", "1.2").changed("no-repeat-ngram", "3").changed("max-tokens", "5")
    assert (changed.sampling.repetition_penalty, changed.sampling.no_repeat_ngram, changed.max_tokens) == (1.2, 3, 5)
    assert changed.params().constraint == Constraint("regex", "a+")
    assert "repetition-penalty 1.2, no-repeat-ngram 3" in str(changed)
    assert "repetition-penalty" not in str(settings)
    for name, value, said in [
        ("repetition-penalty", "0", "must be above 0"),
        ("no-repeat-ngram", "1.5", "must be a whole number"),
        ("ignore-eos", "on", "leave one of them out"),
        ("ignore-eos", "yes", "must be on or off"),
        ("logit-bias", "3", "there is no setting"),
    ]:
        with pytest.raises(UsageError, match=said):
            settings.changed(name, value)


def test_tokens_of_a_request_are_scored_where_sequences_share_passes(folder: Path) -> None:
    tokenizer = load_tokenizer(folder / "target", None)
    options = Options(device="cpu", dtype="fp32")

    request = timed(Request.on_this_machine(folder / "target", None, options))
    plan = request.together(request.plan(num_prompt_tokens=20, max_tokens=20), 3, most=3)
    asked = [
        GenerationRequest(tokenizer.encode(text), SamplingParams(temperature=0.0), max_tokens=9, logprobs=2)
        for text in ("one two", "three", "four five six")
    ]
    with Engine.load(plan, folder / "target", None, tokenizer) as engine:
        alone = [[score for step in engine.generate(each) for score in step.scores] for each in asked]
        found: list[list[Any]] = [[], [], []]
        with Sequences[int](engine) as sequences:
            for number, each in enumerate(asked):
                sequences.join(number, each)
            while len(sequences):
                for number, step in sequences.steps():
                    found[number] += step.scores
                    if step.finish is not None:
                        sequences.leave(number)
    assert found == alone
    assert all(math.isfinite(score.logprob) for scores in found for score in scores)
    assert all(len(scores) == 9 for scores in found)


def test_a_gpus_decisions_hand_out_the_logits_too() -> None:
    logits = torch.randn(2, 5)
    given = torch.tensor([0.5, 0.5]).double(), torch.tensor([1, 3]), torch.full((1, 5), 0.2)
    probs, numbers, kept = Judge(Warping(SamplingParams(temperature=1.0)), keeps_logits=True)(logits, *given)
    plain = Judge(Warping(SamplingParams(temperature=1.0)))(logits, *given)
    assert torch.equal(kept, logits)
    assert torch.equal(probs, plain[0])
    assert torch.equal(numbers, plain[1])


MIXES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.6, "penalty_window": 0},
    "occurrences and a bias": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": ((98, 1.0),)},
    "DRY and min-p": {"dry_multiplier": 1.5, "dry_allowed_length": 1, "min_p": 0.05},
    "no pair twice and XTC": {"no_repeat_ngram": 2, "xtc_probability": 0.5, "xtc_threshold": 0.2},
    "typical and top-n-sigma": {"typical_p": 0.97, "top_n_sigma": 3.0, "temperature": 1.5},
}


@pytest.mark.parametrize(
    "mix",
    [pytest.param(mix, id=name, marks=[pytest.mark.deep] * (i > 0)) for i, (name, mix) in enumerate(MIXES.items())],
)
def test_many_texts_have_the_distribution_of_the_target(
    mix: dict[str, Any], folder: Path, pytestconfig: pytest.Config
) -> None:
    """From outside: texts of three letters by the whole engine, counted, beside plain forward passes."""
    count = 1500 if pytestconfig.getoption("deep") else 200
    tokenizer = load_tokenizer(folder / "target", folder / "draft")
    options = Options(device="cpu", dtype="fp32", gamma=3, draft_gamma=2, budget=64, chunk=8, window=32)
    plan = plan_request(folder / "target", folder / "draft", options, num_prompt_tokens=60, max_tokens=20)
    sampling = SamplingParams(
        **({"temperature": 1.0, "top_p": 1.0, "constraint": Constraint("regex", "[abc]{3}")} | mix)
    )
    prompt = tokenizer.encode(PROMPT)
    with Engine.load(plan, folder / "target", folder / "draft", tokenizer) as engine:
        expected = _texts(engine, prompt, sampling)
        found = Counter[tuple[int, ...]]()
        for seed in range(count):
            request = GenerationRequest(prompt, replace(sampling, seed=seed), max_tokens=3, reuse=True)
            found[tuple(token for step in engine.generate(request) for token in step.tokens)] += 1
    assert found.keys() <= expected.keys()
    assert len(expected) > 4
    deviation = sum((found[text] - count * chance) ** 2 / (count * chance) for text, chance in expected.items())
    freedom = len(expected) - 1
    assert deviation < freedom + 5 * math.sqrt(2 * freedom)  # five standard deviations of chi-squared


def _texts(engine: Engine, prompt: list[int], sampling: SamplingParams) -> dict[tuple[int, ...], float]:
    """Every text of three tokens that the target alone may write, with its probability."""
    target, distribution = engine.levels["target"], engine.distribution(sampling, len(prompt), engine.end_tokens)
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for text, chance in texts.items():
            target.truncate(0)
            row = distribution.probs(forward(target, [*prompt, *text], 1), [*prompt, *text])[0]
            longer |= {(*text, token): chance * float(row[token]) for token in row.nonzero().flatten().tolist()}
        texts = longer
    return texts
