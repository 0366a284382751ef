"""`triforce verify`: what is exact is found to be, and whatever is not, is found too."""

from __future__ import annotations

import json
import types
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from kit.models import GREEDY, Sizes, random_tokens, save_pair, tiny_engine, tiny_plan
from offload.bench import exactness
from offload.bench.exactness import ExactnessReport, Recorder
from offload.config.model import ModelConfig
from offload.decode import speculation
from offload.decode.random_source import RandomSource
from offload.decode.sampling import SamplingParams
from offload.decode.verify import Verdict, verify
from offload.engine.engine import Engine
from offload.engine.request import GenerationRequest
from offload.model.level import Level
from offload.model.passes import Pass
from offload.plan.composition import PLAIN
from offload.plan.planner import PlannedRequest
from triforce_cli.app import main

SIZES = Sizes(gamma=7, draft_gamma=3, lookup=True)
PROMPT = random_tokens(70, seed=3, vocabulary=256)
WARM = SamplingParams(temperature=0.8, seed=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("replay"), context=1024)


def make(folders: tuple[Path, Path], *, dtype: str = "fp32", offload: Sequence[str] = ()) -> Engine:
    target, draft = folders
    plan = tiny_plan(target, draft, SIZES, num_prompt_tokens=70, max_tokens=40, dtype=dtype, offload=frozenset(offload))
    return tiny_engine(plan, target, draft)


def verified(engine: Engine, sampling: SamplingParams = GREEDY, **settings: float) -> ExactnessReport:
    with engine:
        return exactness.check_exactness(engine, PROMPT, sampling, max_tokens=30, num_recomputed=5, **settings)


@pytest.mark.few(2)
@pytest.mark.parametrize("sampling", [GREEDY, WARM])
@pytest.mark.parametrize("offload", [(), ("kv",), ("weights", "kv")])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_the_engine_writes_holds(
    folders: tuple[Path, Path], sampling: SamplingParams, offload: tuple[str, ...], dtype: str
) -> None:
    engine = make(folders, dtype=dtype, offload=offload)
    found = verified(engine, sampling)
    assert next(level for level in engine.stats.levels if level.name == "target").drafted > 0
    assert len(found.tokens) == len(found.replayed) >= 10  # one of them ends
    assert [p.token for p in found.replayed] == found.tokens
    assert found.holds
    assert found.tolerance == exactness.TOLERANCES[dtype]
    assert [p.index for p in found.recomputed] == exactness._spread(len(found.tokens), 5)
    assert all(p.difference < found.tolerance for p in found.recomputed)
    if sampling is GREEDY:
        assert [p.best for p in found.replayed] == found.tokens


def test_its_tokens_are_those_of_generate(folders: tuple[Path, Path]) -> None:
    found = verified(make(folders), WARM)
    with make(folders) as engine:
        assert found.tokens == [
            t for step in engine.generate(GenerationRequest(PROMPT, WARM, max_tokens=30)) for t in step.tokens
        ]


def test_tokens_that_were_kept_without_right_are_found(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep_all(drafted: Sequence[int], draft: Tensor, target: Tensor, random: RandomSource) -> Verdict:
        verify(drafted, draft, target, random)
        return Verdict(len(drafted), random.draw(target[-1]), [1.0] * len(drafted))

    monkeypatch.setattr(speculation, "verify", keep_all)
    found = verified(make(folders))
    assert not found.holds
    assert found.inexact
    assert all(p.same_bits for p in found.inexact)
    for position in found.inexact:
        assert position.best != position.token
        assert position.margin > 0


def test_bits_that_depend_on_the_number_of_rows_are_found(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Level.run

    def by_rows(self: Level, passes: Sequence[Pass]) -> None:
        real(self, passes)
        if self.stats.name == "target" and len(passes[0].tokens) > 1:
            passes[0].made = tuple(rows * (1 + 1e-6) for rows in passes[0].made)

    monkeypatch.setattr(Level, "run", by_rows)
    found = verified(make(folders))
    assert not found.holds
    assert any(not p.same_bits and p.possible and 0 < p.difference < 1e-3 for p in found.inexact)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_prompt_that_was_prefilled_wrongly_is_found(folders: tuple[Path, Path], dtype: str) -> None:
    engine = make(folders, dtype=dtype)
    real, calls = engine.prefix.prefill, []

    def wrong_once(tokens: Sequence[int], on_progress: object, on_hidden: object = None) -> None:
        calls.append(len(tokens))
        real([*tokens[:-8], *[7] * 8] if len(calls) == 1 else tokens, on_progress)  # type: ignore[arg-type]
        if len(calls) == 1:
            engine.prefix.tokens[:] = tokens  # and nobody knows

    engine.prefix.prefill = wrong_once  # type: ignore[method-assign]
    found = verified(engine)
    assert found.inexact == []  # the replay goes on from the same rows
    assert len(found.intolerable) == 5
    assert not found.holds


@pytest.mark.parametrize(("dtype", "device", "stored", "factor"), [
    ("bf16", "cpu", ("Q4_K",), 2), ("fp16", "cpu", ("Q4_K",), 2), ("fp32", "cpu", ("Q4_K",), 1),
    ("bf16", "cuda:0", ("Q4_K",), 1), ("bf16", "cpu", (), 1),
])  # fmt: skip
def test_what_a_prefill_alone_rounds_is_tolerated(
    dtype: str, device: str, stored: tuple[str, ...], factor: float
) -> None:
    request = cast(PlannedRequest, SimpleNamespace(dtype=dtype, device=device))
    found = exactness.tolerance_for(request, cast(ModelConfig, SimpleNamespace(stored_in=stored)))
    assert found == factor * exactness.TOLERANCES[dtype]


def test_a_tolerance_is_kept_to(folders: tuple[Path, Path]) -> None:
    found = verified(make(folders, dtype="bf16"), tolerance=0.0)
    assert found.tolerance == 0.0
    assert [p.index for p in found.intolerable] == [p.index for p in found.recomputed if p.difference > 0]


def test_what_is_no_number_is_not_tolerable() -> None:
    bad = exactness.Recomputed(0, 1, 1, float("nan"), 1.0)
    assert ExactnessReport(1, [1], [], [bad], 1e9).intolerable == [bad]


def test_the_recorder_forgets_what_was_rejected() -> None:
    recorder = Recorder()
    logits = torch.arange(20.0).view(10, 2)
    recorder.hear(0, 4, logits[:1])  # a prompt of four, the last row's logits
    recorder.hear(4, 8, logits[1:5])  # the drawn token and three drafts
    recorder.hear(6, 8, logits[5:7])  # two drafts were rejected
    assert torch.stack(recorder.rows(3, 8)).tolist() == logits[[0, 1, 2, 5, 6]].tolist()


@pytest.mark.parametrize(
    ("count", "wanted", "chosen"),
    [(30, 5, [5, 11, 17, 23, 29]), (4, 4, [0, 1, 2, 3]), (3, 5, [0, 1, 2]), (5, 0, []), (1, 3, [0]), (7, 1, [6])],
)
def test_what_is_recomputed_is_spread_evenly(count: int, wanted: int, chosen: list[int]) -> None:
    assert exactness._spread(count, wanted) == chosen


class TestCommand:
    @pytest.fixture
    def args(self, folders: tuple[Path, Path], tmp_path: Path) -> list[str]:
        (tmp_path / "prompt.txt").write_text("A line of text that is repeated.\n" * 8)
        model = ["--model", str(folders[0]), "--draft", str(folders[1]), "--prompt-file", str(tmp_path / "prompt.txt")]
        return ["verify", *model, "--max-tokens", "20", "--dtype", "fp32", "--gamma", "6", "--quiet"]

    def test_says_that_all_is_well(self, args: list[str], capfd: pytest.CaptureFixture[str]) -> None:
        assert main(args) == 0
        out, err = capfd.readouterr()
        lines = out.splitlines()
        assert lines[0].startswith("20 tokens after ")
        assert lines[1].split()[-5:] == ["20", "of", "20", "the", "likeliest"]
        assert lines[-1] == "verified"
        assert max(map(len, lines)) <= 80
        assert err == ""

    def test_as_json(self, args: list[str], capfd: pytest.CaptureFixture[str]) -> None:
        assert main([*args, "--json", "--positions", "3", "--temperature", "0.7", "--seed", "1"]) == 0
        found = json.loads(capfd.readouterr().out)
        assert found["holds"] is True
        assert (len(found["replayed"]), len(found["recomputed"])) == (20, 3)
        assert (found["inexact"], found["intolerable"]) == ([], [])
        assert found["sampling"]["temperature"] == 0.7

    def test_ends_with_5_where_something_differs(
        self, args: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def reject_all(drafted: Sequence[int], draft: Tensor, target: Tensor, random: RandomSource) -> Verdict:
            return Verdict(0, int(target[0].argmin()), [])

        monkeypatch.setattr(speculation, "verify", reject_all)
        assert main(args) == 5
        out, err = capfd.readouterr()
        assert out.splitlines()[-1] == "DIFFERENT"
        assert "by a margin of" in out
        assert "of 20 tokens are not what plain decoding gives" in err
        assert main([*args, "--json"]) == 5
        out, err = capfd.readouterr()
        assert json.loads(out)["holds"] is False
        assert json.loads(err)["error"]["kind"] == "differs"

    def test_a_recomputed_one_is_shown_too(self, args: list[str], capfd: pytest.CaptureFixture[str]) -> None:
        args[args.index("fp32")] = "bf16"
        code = main([*args, "--tolerance", "0"])
        out = capfd.readouterr().out
        assert (code, "standard deviations" in out) in ((5, True), (0, True))
        assert ("recomputed: " in out) == (code == 5)

    def test_of_few_tokens_all_are_recomputed(self, args: list[str], capfd: pytest.CaptureFixture[str]) -> None:
        """It was an error about --positions, which nobody had given."""
        assert main([*args, "--max-tokens", "2", "--json"]) == 0
        assert len(json.loads(capfd.readouterr().out)["recomputed"]) == 2

    @pytest.mark.parametrize(("flag", "value"), [("--positions", "-1"), ("--positions", "21"), ("--tolerance", "-1")])
    def test_limits(self, args: list[str], flag: str, value: str, capfd: pytest.CaptureFixture[str]) -> None:
        assert main([*args, flag, value]) == 2
        assert f"{flag[2:]} is {value}, it must be from 0" in capfd.readouterr().err


def test_long_lists_of_differences_are_cut() -> None:
    from triforce_cli.render import verify as render_verify

    wrong = [exactness.Replayed(i, 1, 2, False, False, 0.5, 0.25) for i in range(50)]
    found = ExactnessReport(3, [1] * 50, wrong, [], 0.1)
    request = types.SimpleNamespace(dtype="fp32", device="cpu")
    plan = types.SimpleNamespace(request=request, composition=PLAIN)
    text = render_verify.report(found, plan, GREEDY, lambda token: "word")  # type: ignore[arg-type]
    assert text.count("plain 'word' by a margin of 0.25; logits differ by 0.5") == render_verify.MOST_SHOWN
    assert "  and 30 more\n" in text
