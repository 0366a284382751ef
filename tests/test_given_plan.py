"""A plan that is given back: what it must be, what is refused beside it, and the text that it gives again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kit.models import CURVES, save_pair
from offload.config.model import ModelConfig
from offload.errors import DoesNotFit, ModelError, UsageError
from offload.kernels.cpu import kernels
from offload.plan.options import Options
from offload.plan.plan_file import options_beside, read_plan
from offload.plan.planner import Plan
from offload.plan.request import Request
from offload.speed.curves import ROWS, Curves
from offload.speed.hardware import Hardware
from offload.speed.rates import FOLDER_VARIABLE
from test_planner import CPU, DEMO, DRAFT, GPU, LLAMA_7B, plan

SIZES = {"num_prompt_tokens": 900, "max_tokens": 100}
KV = frozenset({"kv"})
SLOW = replace(CURVES, weights={"": tuple(9 * seconds for seconds in CURVES.weights[""])})


def through_json(made: Plan) -> Any:
    return json.loads(json.dumps(made.as_dict()))


def keys(data: dict[str, Any], place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all keys whose names are known, not those of bytes by purpose."""
    for name, value in data.items():
        yield (*place, name)
        if isinstance(value, dict) and not name.endswith("_bytes"):
            yield from keys(value, (*place, name))


DOCUMENT = through_json(plan(Options(offload=KV, link_gbps=1.0)))
KEYS = list(keys(DOCUMENT))
LATER = {  # plans of before do not have them
    ("placement", "checkpoints"): 0,
    ("placement", "expert_slots"): 0,
    ("predicted", "draft_acceptance"): 0.5,
    ("placement", "cpu_experts"): 0,
    ("placement", "shares_experts"): False,
    ("placement", "expert_places"): 0,
    ("predicted", "read_bytes"): 0,
    ("placement", "expert_rows"): 512,
    ("placement", "staged_experts"): 0,
    ("placement", "prefill_bytes"): 0,
    ("placement", "block_slots"): 0,
    ("placement", "ngram_table"): "host",
    ("placement", "ngram_rows"): 0,
    ("predicted", "missed_bytes"): 0,
    ("predicted", "hit_rate"): 1.0,
}


def changed(place: tuple[str, ...], value: object) -> dict[str, Any]:
    data = deepcopy(DOCUMENT)
    *parts, last = place
    inner = data
    for part in parts:
        inner = inner[part]
    inner[last] = value
    return data


@pytest.mark.parametrize(
    "make",
    [
        plan,
        partial(plan, Options(speculation=False), draft=None),
        partial(plan, Options(gamma=3, budget=512, lookup=False, masses=True)),
        partial(plan, Options(offload=KV, link_gbps=0.3)),
        partial(
            plan, Options(device_memory=12.0, weight_bits=4), target=LLAMA_7B, draft=None, hardware=GPU, prompt=8000
        ),
    ],
)
def test_a_plan_is_the_same_to_the_last_bit_after_a_way_through_json(make: Callable[[], Plan]) -> None:
    made = make()
    assert read_plan(through_json(made)) == made
    assert read_plan({"text": "...", "plan": through_json(made)}) == made  # as --json has it


def without(place: tuple[str, ...]) -> dict[str, Any]:
    *parts, last = place
    data = deepcopy(DOCUMENT)
    inner = data
    for part in parts:
        inner = inner[part]
    del inner[last]
    return data


@pytest.mark.parametrize("place", [key for key in KEYS if key not in LATER], ids=".".join)
def test_a_key_that_is_missing_is_named(place: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=rf"plan\.{'.'.join(place)} is missing"):
        read_plan(without(place))


@pytest.mark.parametrize("place", LATER, ids=".".join)
def test_a_plan_of_before_has_what_was_so_then(place: tuple[str, str]) -> None:
    assert getattr(getattr(read_plan(without(place)), place[0]), place[1]) == LATER[place]


@pytest.mark.parametrize("part", [(), ("request",), ("composition",), ("placement",), ("predicted",)])
def test_a_key_that_is_unknown_is_named(part: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"plan\.(\w+\.)?gama is not known"):
        read_plan(changed((*part, "gama"), 4))


def test_a_plan_of_before_is_read_unless_the_host_attends_in_it() -> None:
    """Plans had tiles that the CPU attended to; where it attended to none their text is the same."""
    old = changed(("placement", "host_tiles"), 0)
    old["placement"] |= {"attended_bytes": 0, "host_bytes_per_second": None}
    old["predicted"]["full_host_bytes"] = 0
    assert read_plan(old) == read_plan(DOCUMENT)
    old["placement"] |= {"host_tiles": 3}
    with pytest.raises(ValueError, match=r"plan\.placement\.host_tiles is 3; .* plan again"):
        read_plan(old)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("version", 0),
        ("request.dtype", 16),
        ("request.num_sequences", 2),
        ("request.max_tokens", 0),
        ("request.capacity", 5),
        ("composition.gamma", -1),
        ("composition.gamma", 10**6),
        ("composition.gamma", True),
        ("composition.gamma", 2.0),
        ("composition.adaptive", ["everything"]),
        ("composition.adaptive", "target"),
        ("composition.budget", 10**9),
        ("composition.budget", 1001),
        ("composition.chunk", 0),
        ("composition.chunk", 24),
        ("composition.weight_bits", 5),
        ("composition.draft", 1),
        ("composition.levels", ["target"]),
        ("composition.levels", 1),
        ("placement.device_bytes", {"workspace": "much"}),
        ("predicted.full_pass_seconds", 0),
        ("predicted.full_pass_seconds", None),
        ("predicted.full_row_seconds", 1e300),
        ("predicted", []),
    ],
)
def test_a_value_that_no_plan_has_is_refused(place: str, value: object) -> None:
    with pytest.raises((ValueError, UsageError)):
        read_plan(changed(tuple(place.split(".")), value))


def request(
    *, curves: Curves = SLOW, hardware: Hardware = CPU, options: Options | None = None, **models: Any
) -> Request:
    return Request(
        models.get("target", DEMO),
        models.get("draft", DRAFT),
        options or Options(),
        hardware,
        curves,
        models.get("given"),
    )


def test_a_given_plan_is_used_whatever_was_measured_here() -> None:
    there, here = request().plan(**SIZES), request(curves=CURVES)
    assert here.plan(**SIZES).predicted != there.predicted
    assert replace(here, given=there).plan(**SIZES) == there


def test_a_given_plan_is_placed_where_this_machine_has_room() -> None:
    there = request().plan(**SIZES)
    options = options_beside(there, Options(offload=KV, link_gbps=2.0))
    placed = request(given=there, options=options).plan(**SIZES)
    assert placed.placement.offload == ("kv",)
    assert replace(placed, placement=there.placement) == there


def test_a_shorter_request_has_the_sizes_of_the_given_plan() -> None:
    """Tiles, and the frequencies of some models, follow from the capacity, and bits from them."""
    there = request().plan(num_prompt_tokens=9000, max_tokens=100)
    shorter = request(given=there).plan(num_prompt_tokens=10, max_tokens=40)
    assert (shorter.request.capacity, shorter.request.max_tokens) == (9100, 40)
    assert shorter.placement == there.placement


def test_a_longer_request_does_not_fit_a_given_plan() -> None:
    asked = request(given=request().plan(**SIZES))
    with pytest.raises(DoesNotFit, match=r"room for 1000 tokens; the prompt has 950 .* try --max-tokens 50"):
        asked.plan(num_prompt_tokens=950, max_tokens=100)


def test_a_given_plan_needs_its_memory() -> None:
    asked = request(given=request().plan(**SIZES), hardware=replace(CPU, host_free_bytes=10**6))
    with pytest.raises(DoesNotFit, match=r"needs .* of memory, 0\.001 GB are free"):
        asked.plan(**SIZES)


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ({"target": DEMO.changed(num_layers=9)}, "num_layers=8; here num_layers=9"),
        ({"draft": DRAFT.changed(num_layers=2)}, "num_layers=3; here num_layers=2.*--draft"),
        ({"draft": None}, "name it with --draft"),
    ],
)
def test_a_plan_for_other_models_is_refused(models: dict[str, ModelConfig | None], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        request(given=request().plan(**SIZES), **models).plan(**SIZES)


def test_a_plan_for_other_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    there = request().plan(**SIZES)
    monkeypatch.setenv("TRIFORCE_KERNELS", "off")
    with pytest.raises(ModelError, match="kernels=on; here kernels=off"):
        request(given=there).plan(**SIZES)


@pytest.mark.parametrize(
    "name", ["tile_tokens", "page_tokens", "window_pages", "rows", "prefill_block", "fused_prefill"]
)
def test_a_plan_whose_sums_have_another_order_is_refused(name: str) -> None:
    there = request().plan(**SIZES)
    here = getattr(there.placement, name)
    other: Any = not here if isinstance(here, bool) else here + 1
    there = replace(there, placement=replace(there.placement, **{name: other}))
    with pytest.raises(UsageError, match=rf"placement\.{name} is {other} and would be {here} here"):
        request(given=there).plan(**SIZES)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (Options(budget=64), "--budget 64"),
        (Options(gamma=63), "--gamma 63"),  # the plan's adapts
        (Options(kv_bits=4), "--kv-bits 4"),
        (Options(weight_bits=6), "--weight-bits 6"),
        (Options(context=4000), "--context 4000"),
        (Options(window=7), "--window 7"),
        (Options(lookup=False), "--no-lookup"),
        (Options(speculation=False), "--no-speculation"),
        (Options(masses=True), "--cite"),
        (Options(dtype="fp32"), "--dtype fp32"),
        (Options(gpus=2), "--gpus 2"),
        (Options(device="cuda"), "--device"),
    ],
)
def test_an_option_that_contradicts_the_plan_is_named(options: Options, named: str) -> None:
    with pytest.raises(UsageError, match=f"{named} "):
        options_beside(request().plan(**SIZES), options)


def test_options_that_the_plan_follows_are_no_contradiction() -> None:
    options = Options(gamma=5, budget=64, chunk=8, kv_bits=16, sinks=4, window=32, lookup=False, masses=True)
    made = request(options=options).plan(**SIZES)
    assert options_beside(made, options) == replace(options, device="cpu", dtype="bf16")


class Homes:
    """The same request on one machine with what two homes have measured of it."""

    def __init__(self, folder: Path, triforce: Callable[..., tuple[int, str, str]], patch: pytest.MonkeyPatch) -> None:
        save_pair(folder, context=256)
        (folder / "prompt.txt").write_text("abc abd abe")
        self.folder, self._triforce, self._patch = folder, triforce, patch

    def slow(self, part: str) -> None:
        """Use the home in which passes, or their rows, were measured as slow."""
        self._patch.setenv(FOLDER_VARIABLE, str(self.folder / f"slow {part}"))
        calls = tuple(1e-2 * (rows if part == "rows" else 1) for rows in ROWS)

        def time_curves(dtype: str) -> Curves:
            return replace(CURVES, calls=calls, kernels=kernels().name)

        self._patch.setattr("offload.worker.curve_timer.time_curves", time_curves)

    def answer(self, command: str, seed: int, *args: str) -> Any:
        models = ("--model", str(self.folder / "target"), "--draft", str(self.folder / "draft"))
        said = (
            "--prompt-file",
            str(self.folder / "prompt.txt"),
            "--max-tokens",
            "40",
            "--temperature",
            ".8",
            "--seed",
            str(seed),
        )
        code, out, err = self._triforce(command, *models, *said, "--json", "-q", *args)
        assert (code, err) == (0, "")
        return json.loads(out)


@pytest.fixture
def homes(tmp_path: Path, triforce: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> Homes:
    return Homes(tmp_path, triforce, monkeypatch)


def test_a_seeds_text_can_be_had_again_in_another_home_by_its_plan(homes: Homes) -> None:
    """Plans follow from what a home has measured, and a seed's text from the plan: without --plan another home gave
    other texts."""
    seeds, file = range(3), homes.folder / "answer.json"
    homes.slow("passes")
    there = [homes.answer("generate", seed) for seed in seeds]
    file.write_text(json.dumps(there[0]))
    homes.slow("rows")
    here = [homes.answer("generate", seed) for seed in seeds]
    again = [homes.answer("generate", seed, "--plan", str(file)) for seed in seeds]
    assert any(one["tokens"] != other["tokens"] for one, other in zip(there, here, strict=True))
    assert [each["tokens"] for each in again] == [each["tokens"] for each in there]
    assert [each["plan"] for each in again] == [each["plan"] for each in there]


def test_verify_replays_a_given_plan(homes: Homes) -> None:
    file = homes.folder / "plan.json"
    homes.slow("passes")
    there = homes.answer("verify", 1)
    file.write_text(json.dumps(there))
    homes.slow("rows")
    assert homes.answer("verify", 1)["plan"] != there["plan"]
    assert homes.answer("verify", 1, "--plan", str(file))["plan"] == there["plan"]


@pytest.mark.parametrize(
    "content", ["", "[1]", '{"plan": 3}', '{"version": 1, "version": 1}', "[" * 100000, '{"a": NaN}']
)
def test_a_file_without_a_plan_is_refused(
    content: str, tmp_path: Path, triforce: Callable[..., tuple[int, str, str]]
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(content)
    code, out, err = triforce("generate", "--prompt", "x", "--plan", str(file))
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {file} holds no plan of this program: ")
