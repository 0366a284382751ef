"""Experts that the CPU runs where they are: what the plan chooses, what is allocated, and that text stays the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.families import save_tiny
from kit.models import CURVES, random_tokens
from kit.processor import best
from offload.config.block import Encodings
from offload.config.model import ModelConfig, llama_shaped
from offload.config.networks import Experts, FeedForward
from offload.config.reading import read_config
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine, load_tokenizer, plan_request
from offload.engine.request import GenerationRequest
from offload.errors import UsageError
from offload.kernels.experts import Batch
from offload.kernels.experts_host import HostRows
from offload.model import torch_layers
from offload.plan.cost import Cost
from offload.plan.options import Options
from offload.plan.planner import Plan
from offload.plan.request import Request
from offload.plan.sizing import BLOCK_ROWS, Sizing
from offload.speed.cpu_pass import CpuPass, shares_experts
from offload.speed.curves import ROWS, Curve, Curves
from offload.speed.hardware import RTX_4090, Hardware
from offload.speed.routing import distinct_experts
from offload.transfer.link import PacedLink
from offload.transfer.memory import Memory
from offload.weights.checkpoint import Checkpoint
from offload.weights.experts import HostExperts, in_prefill, load_experts, prefill_turn
from offload.weights.prefill_experts import PrefillExperts
from offload.weights.streamed_experts import StreamedExperts
from offload.worker import curve_timer
from offload.worker.curve_timer import timed
from test_experts import scene

NUM_LAYERS = 24
GPU = Hardware("cuda:0", "GPU", 8 * 10**9, 256 * 10**9, True)
WEIGHTS = frozenset({"weights"})
MODELS = ["qwen3_moe", "glm4_moe", "gpt_oss", "gemma4, sparse", "qwen3_5_moe", "minimax_m2", "ernie4_5_moe"]


def mixture(*encodings: str) -> ModelConfig:
    """30 GB of experts in Q4_0."""
    own = Experts(FeedForward(1408), 128, 8)
    config = llama_shaped("llama", 32000, 4096, 0, NUM_LAYERS, 32, 8, 128, 40960)
    return config.mapped(lambda block: replace(block, experts=own, encodings=Encodings(experts=encodings)))


MIXTURE = mixture("Q4_0", "Q4_0", "Q4_0")


def linked(gigabytes: float, **changes: Any) -> Hardware:
    """The GPU on a link of so many GB/s."""
    return replace(GPU, rates=replace(RTX_4090, to_device=gigabytes * 1e9), **changes)


def planned(hardware: Hardware, options: Options | None = None, curves: Curves | None = None) -> Plan:
    sizes = {"num_prompt_tokens": 2000, "max_tokens": 100}
    return Request(MIXTURE, None, options or Options(), hardware, curves).plan(**sizes)


def by_byte(seconds: float) -> Curves:
    """Curves of so many seconds for a byte of experts, whatever the rows."""
    return replace(CURVES, weights=CURVES.weights | {"Q4_0": (seconds,) * len(ROWS)})


def by_cpu(*given: Any) -> int:
    return planned(*given).placement.cpu_experts


class TestThePlan:
    def test_leaves_more_layers_to_the_cpu_the_slower_the_link_is(self) -> None:
        found = [by_cpu(linked(rate)) for rate in (100.0, 25.0, 6.0, 2.0)]
        assert found == sorted(found)
        assert found[0] == 0
        assert found[-1] == NUM_LAYERS

    def test_leaves_none_where_all_experts_fit(self) -> None:
        assert by_cpu(linked(2.0, device_free_bytes=40 * 10**9)) == 0

    def test_goes_by_measured_seconds(self) -> None:
        slow, fast = by_byte(1e-6), by_byte(1e-14)
        assert by_cpu(linked(2.0), None, slow) == 0
        assert by_cpu(linked(25.0), None, fast) == NUM_LAYERS

    @pytest.mark.few(3)
    @pytest.mark.parametrize(
        "options",
        [{"speculation": False}, {"gamma": 3}, {"lookup": False}, {"kv_bits": 16}, {"budget": 512}, {"masses": True}],
        ids=str,
    )
    def test_leaves_as_many_whatever_speculates(self, options: dict[str, Any]) -> None:
        """Or a seed would give another text."""
        usual = by_cpu(linked(9.0))
        assert 0 < usual < NUM_LAYERS
        assert by_cpu(linked(9.0), Options(**options)) == usual

    def test_gives_the_other_layers_the_slots(self) -> None:
        all_slots, half = (planned(linked(25.0), Options(cpu_experts=number)).placement for number in (0, 12))
        assert half.expert_slots > 1.7 * all_slots.expert_slots
        assert max(sum(each.device_bytes.values()) for each in (all_slots, half)) <= GPU.device_free_bytes
        assert half.host_bytes["target experts"] == all_slots.host_bytes["target experts"]

    def test_has_only_a_prefills_slots_where_the_cpu_runs_all(self) -> None:
        made = planned(linked(25.0), Options(cpu_experts=99))
        sizing = Sizing(MIXTURE, None, Options(), GPU, "bf16")
        assert made.placement.cpu_experts == NUM_LAYERS
        assert made.placement.staged_experts == 2**28 // sizing.largest_expert_bytes == 27
        assert made.placement.device_bytes["expert slots"] == made.placement.prefill_bytes
        assert 0 <= made.placement.prefill_bytes - 27 * sizing.largest_expert_bytes < 256  # torch makes the rest
        assert made.predicted.missed_bytes == 0

    def test_counts_the_cpus_seconds_and_not_the_links(self) -> None:
        seconds = 8 * MIXTURE.expert_bytes(2) * 2e-11
        options = [Options(cpu_experts=number, speculation=False) for number in (0, NUM_LAYERS)]
        link, own = (planned(linked(1.0), each, by_byte(2e-11)).predicted for each in options)
        assert NUM_LAYERS * seconds < own.full_pass_seconds < NUM_LAYERS * seconds * 1.5 < link.full_pass_seconds

    def test_keeps_the_number_when_it_is_given(self) -> None:
        made = planned(linked(2.0))
        sizes = {"num_prompt_tokens": 1000, "max_tokens": 100}
        again = replace(Request(MIXTURE, None, Options(), linked(100.0)), given=made).plan(**sizes)
        assert again.placement.cpu_experts == made.placement.cpu_experts == NUM_LAYERS

    def test_shares_all_layers_whose_experts_both_give_the_same_bits(self) -> None:
        """Then every layer has slots, and misses are shared as is soonest done."""
        options = Options(dtype="bf16"), Options(dtype="bf16", cpu_experts=0)
        made, none = (planned(linked(25.0), each) for each in options)
        assert (made.placement.cpu_experts, none.placement.cpu_experts) == (NUM_LAYERS, 0)
        assert (made.placement.shares_experts, none.placement.shares_experts) == (True, False)
        assert made.placement.expert_slots == none.placement.expert_slots
        assert made.predicted.missed_bytes == none.predicted.missed_bytes > 0
        waits, fewer = (each.predicted.full_pass_seconds for each in (none, made))
        assert none.predicted.missed_bytes / 25e9 < waits
        assert 0.3 * waits < fewer < 0.8 * waits

    def test_shares_as_many_layers_as_are_asked_for(self) -> None:
        seconds = [
            planned(linked(25.0), Options(dtype="bf16", cpu_experts=number, speculation=False)).predicted
            for number in (0, 6, 12, 24)
        ]
        found = [each.full_pass_seconds for each in seconds]
        assert found == sorted(found, reverse=True)
        assert len({*found}) == 4

    @pytest.mark.parametrize("dtype", ["bf16", "fp32"])
    @pytest.mark.parametrize("encodings", [("Q4_0", "Q4_0", "INT4_F16/64"), ("", "", "")])
    def test_shares_no_layer_whose_bits_differ(self, encodings: tuple[str, ...], dtype: str) -> None:
        for model in (mixture(*encodings), MIXTURE if dtype == "fp32" else mixture(*encodings)):
            assert not shares_experts(model, linked(25.0), dtype)
        assert shares_experts(MIXTURE, linked(25.0), "bf16")
        assert not shares_experts(MIXTURE, linked(25.0, has_kernels=False), "bf16")

    def test_refuses_what_no_cpu_can_run(self) -> None:
        with pytest.raises(UsageError, match="cpu-experts is 3 and this CPU has no kernels"):
            planned(linked(25.0, packs=False), Options(cpu_experts=3))
        assert by_cpu(linked(2.0, packs=False)) == 0
        plain = llama_shaped("llama", 32000, 512, 512, 2, 4, 4, 128, 4096)
        with pytest.raises(UsageError, match="cpu-experts is 3 and the model has no experts"):
            Request(plain, None, Options(cpu_experts=3), GPU).plan(num_prompt_tokens=9, max_tokens=9)

    def test_says_so_where_the_number_is_not_used(self) -> None:
        made = planned(linked(2.0, device_free_bytes=40 * 10**9), Options(cpu_experts=3))
        assert any("--cpu-experts 3 is not used: no experts are on the host" in note for note in made.notes)

    @pytest.mark.parametrize(("has_kernels", "rows", "groups"), [(True, 5632, 4), (False, 512, 40)])
    def test_fetches_experts_once_for_the_rows_of_a_prompt_that_run_at_once(
        self, has_kernels: bool, rows: int, groups: int
    ) -> None:
        """As many as what experts make of them has 512 MiB for; a block where torch's operators run them. Those that
        are in slots or, of the rows before, in staging slots, are not fetched again."""
        options = Options(cpu_experts=0, speculation=False, dtype="bf16")
        sizes = {"num_prompt_tokens": 20480 + BLOCK_ROWS, "max_tokens": 100}
        both = (linked(rate, has_kernels=has_kernels) for rate in (0.2, 0.1))
        fast, slow = (Request(MIXTURE, None, options, each).plan(**sizes) for each in both)
        assert fast.placement.expert_rows == slow.placement.expert_rows == rows
        more = slow.predicted.prefill_seconds - fast.predicted.prefill_seconds
        experts = Sizing(MIXTURE, None, options, GPU, "bf16").experts_bytes(128)
        assert fast.placement.expert_slots == slow.placement.expert_slots
        lent = -(-fast.placement.prefill_bytes * 128 // experts)
        held = fast.placement.expert_slots - lent + fast.placement.staged_experts
        assert more == pytest.approx((1 + (groups - 1) * max(1 - held / 128, 0)) * experts / 2e8, rel=0.01)

    def test_waits_for_no_expert_that_comes_ahead_of_the_choice(self) -> None:
        """But for a bank of staging slots, if rows want nearly all: the link is as busy, behind computation. Those in
        the file do not come ahead, so a bank is waited for in each layer."""
        options = Options(cpu_experts=0, speculation=False, dtype="bf16")
        made, experts = planned(linked(25.0), options), Sizing(MIXTURE, None, options, GPU, "bf16").experts_bytes(128)

        def seconds(tokens: int, rate: float, slots: int, places: int = 0, by_cpu: int = 0) -> float:
            hardware = linked(rate, disk_read=1e18)
            sizing = Sizing(MIXTURE, None, options, hardware, "bf16")
            placement = replace(made.placement, expert_slots=slots, expert_places=places, expert_rows=2048)
            placement = replace(placement, cpu_experts=by_cpu, shares_experts=False, staged_experts=16, prefill_bytes=0)
            return Cost(sizing, placement, made.request.capacity, made.composition).prefill(tokens)

        computed = seconds(4096, 1e9, 128)
        bank = 8 / 128 * experts
        assert seconds(4096, 100.0, 128) == pytest.approx(computed + bank / 24 / 1e11, rel=1e-6)
        assert seconds(4096, 100.0, 32) == pytest.approx(computed + bank / 24 / 1e11, rel=1e-6)
        assert seconds(4096, 1.0, 128) == pytest.approx(experts / 1e9, rel=0.01)
        assert seconds(4096, 100.0, 32, 96) == pytest.approx(computed + 2 * bank / 1e11, rel=1e-6)
        held = 0.75 * (32 + 16) / 128 + 0.25 * 16 / 128  # a quarter of the layers has staging slots alone
        assert seconds(4096, 1.0, 32, by_cpu=6) == pytest.approx((2 - held) * experts / 1e9, rel=0.01)
        few = distinct_experts(Experts(FeedForward(1408), 128, 8), 32) / 128
        assert few < 0.9
        assert seconds(32, 100.0, 128) > few * experts / 1e11 + 0.9 * seconds(32, 1e9, 128)

    def test_lets_experts_that_all_stay_have_the_memory(self) -> None:
        made = planned(linked(25.0, has_kernels=True, device_free_bytes=40 * 10**9))
        assert (made.placement.expert_slots, made.placement.expert_rows) == (0, 512)

    def test_estimates_more_seconds_for_more_rows(self) -> None:
        sizing = Sizing(MIXTURE, None, Options(), GPU, "bf16")
        found = [CpuPass(MIXTURE.layer(0), 2, sizing.curves).experts(rows) for rows in ROWS]
        assert found == sorted(found)
        read = 8 * sizing.largest_expert_bytes / RTX_4090.host_read
        assert read < found[0] < 4 * read


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def folder(name: str) -> Path:
        fields = {"vocab_size": 264, "hidden_size": 64, "max_position_embeddings": 512}
        return save_tiny(name, tmp_path_factory.mktemp("experts") / name, tokenizer=True, **fields)

    return folder


def said(folder: Path, sampling: SamplingParams, **options: Any) -> tuple[list[int], Engine, dict[str, int]]:
    """The tokens after a prompt, the engine, which is closed, and the bytes that it had by purpose."""
    options = {"device": "cpu", "dtype": "bf16", **options}
    plan = plan_request(folder, None, Options(**options), num_prompt_tokens=60, max_tokens=24)
    with Engine.load(plan, folder, None, load_tokenizer(folder, None)) as engine:
        request = GenerationRequest(random_tokens(60, seed=3), sampling, max_tokens=24)
        tokens = [token for step in engine.generate(request) for token in step.tokens]
        allocated = engine.worker.memory.allocated()
        return tokens, engine, {**allocated["device"], **allocated["host"]}


@pytest.mark.few(5)
@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=5)])
@pytest.mark.parametrize("options", [{"cpu_experts": 99}, {"cpu_experts": 1}, {"cpu_experts": 1, "speculation": False}])
@pytest.mark.parametrize("name", MODELS)
def test_text_is_the_same_wherever_experts_run(
    name: str, options: dict[str, Any], sampling: SamplingParams, folders: Callable[[str], Path]
) -> None:
    """On a CPU, whose link is emulated, the device and the host round alike."""
    best()
    folder = folders(name)
    expected, *_ = said(folder, sampling, **options | {"cpu_experts": None})
    found, engine, allocated = said(folder, sampling, offload=WEIGHTS, **options)
    assert found == expected
    placement, stats = engine.plan.placement, engine.stats.decode_link.experts
    assert placement.shares_experts
    for purpose, tier in (("expert slots", placement.device_bytes), ("target experts", placement.host_bytes)):
        assert allocated[purpose] == tier[purpose]
    assert 0 < stats.by_cpu <= stats.misses


@pytest.mark.parametrize("options", [{}, {"cpu_experts": 1}, {"dtype": "fp32"}], ids=str)
def test_a_prefill_fetches_experts_before_their_router_has_chosen(
    options: dict[str, Any], folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a pass, whose rows want few, does not."""
    best()
    folder, greedy = folders("qwen3_moe"), SamplingParams(temperature=0.0)
    expected, *_ = said(folder, greedy, **options | {"cpu_experts": None})
    fetched, ahead = list[tuple[int, bool]](), PrefillExperts.ahead
    batches: Any = {kind: kind.batches for kind in (StreamedExperts, PrefillExperts)}

    def noted(own: PrefillExperts, *then: Any, **busy: Any) -> None:
        ahead(own, *then, **busy)
        vars(own).update(came=True)

    def seen(own: Any, chosen: torch.Tensor) -> Iterator[Batch]:
        came = own.__dict__.pop("came", False) and sum(each.stats.fetched_bytes for each in own.parts) > 0
        fetched.append((len(chosen), came))
        return batches[type(own)](own, chosen)

    monkeypatch.setattr(PrefillExperts, "ahead", noted)
    for kind in batches:
        monkeypatch.setattr(kind, "batches", seen)
    found, *_ = said(folder, greedy, offload=WEIGHTS, **options)
    assert found == expected
    assert {rows > 32 for rows, came in fetched if came} == {True}
    assert {came for rows, came in fetched if rows > 32} == {True}
    assert {came for rows, came in fetched if rows <= 32} == {False}
    fetched.clear()
    monkeypatch.setattr(torch_layers, "wants_nearly_all", lambda experts, rows: rows > 60)  # no group of the prompt's
    found, *_ = said(folder, greedy, offload=WEIGHTS, **options)
    assert found == expected
    assert {came for _, came in fetched} == {False}


@pytest.mark.parametrize("shared", [True, False])
def test_the_last_layers_are_the_cpus(shared: bool, folders: Callable[[str], Path]) -> None:
    folder, memory, link = folders("glm4_moe"), Memory(torch.device("cpu")), PacedLink(None)
    config = read_config(folder)  # its first layer has no experts
    given = {"dtype": torch.bfloat16, "name": "target", "link": link, "slots": 2, "on_bytes": lambda num_bytes: None}
    with Checkpoint.open(folder) as checkpoint:
        found = load_experts(checkpoint, config, memory, on_cpu=1, shared=shared, **given)
    assert [type(each) for each in found] == [type(None), StreamedExperts, StreamedExperts if shared else HostExperts]
    both = [each for each in found if each is not None]
    of_prefill = in_prefill(both[1])
    assert isinstance(of_prefill, StreamedExperts if shared else PrefillExperts)
    with prefill_turn(found, 1, 1):  # a layer without slots needs staging slots for any number of rows
        for _ in range(4):  # in a prefill the CPU runs none
            assert all(batch.bank is of_prefill.bank for batch in of_prefill.batches(torch.tensor([0, 1, 2, 3])))
    parts = of_prefill.parts if isinstance(of_prefill, PrefillExperts) else [of_prefill]
    assert sum(each.stats.by_cpu for each in parts) == 0
    link.close()


def test_layers_that_all_stay_need_no_staging(folders: Callable[[str], Path]) -> None:
    """Only experts are on the host then, which have slots."""
    folder, greedy = folders("qwen3_moe"), SamplingParams(temperature=0.0)
    expected, *_ = said(folder, greedy)
    found, engine, allocated = said(folder, greedy, offload=WEIGHTS, device_memory=0.4)
    assert found == expected
    placement = engine.plan.placement
    assert placement.resident_layers == engine.worker.target.config.num_layers
    assert placement.weight_link_bits == 16
    assert "weight staging" not in placement.device_bytes.keys() | allocated.keys()
    assert allocated["expert slots"] == placement.device_bytes["expert slots"]


@pytest.mark.parametrize("latent", [0, 32])
def test_what_experts_make_of_rows_comes_back_to_the_device(latent: int) -> None:
    """Of the pairs in the batch alone, each as it is where all experts are in it; padding has none."""
    best()
    given = scene(Experts(FeedForward(32), 8, 3, latent=latent), torch.bfloat16, 5)
    rows = given.rows[:, :latent].contiguous() if latent else given.rows
    chosen = torch.tensor([[0, 3, 7], [1, 2, 3], [8, 8, 8], [7, 6, 0], [3, 4, 5]])
    marked = torch.full((15, rows.shape[1]), 99.0).bfloat16()

    def made(*experts: int) -> torch.Tensor:
        places = torch.full((8,), -1, dtype=torch.int32)
        places[[*experts]] = torch.tensor(experts, dtype=torch.int32)
        found = marked.clone()
        HostRows(rows, chosen).run(given.experts, Batch(given.homes.bank, places), found)
        return found

    whole, some = made(*range(8)), made(3, 7)
    inside = torch.isin(chosen, torch.tensor([3, 7])).flatten()
    assert inside.sum() == 5
    assert torch.equal(some[inside], whole[inside])
    assert torch.equal(some[~inside], marked[~inside])
    assert torch.equal(whole[6:9], marked[6:9])
    assert (whole[[*range(6), *range(9, 15)]] != 99).all()


class TestSeconds:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRIFORCE_CACHE_DIR", str(tmp_path / "cache"))

    def test_are_those_of_the_distinct_experts_by_their_own_rows(self) -> None:
        experts, layer = MIXTURE.block.experts, MIXTURE.layer(0)
        assert experts is not None
        flat = replace(CURVES, weights={"": (1e-9,) * len(ROWS), "Q4_0": (1e-9,) * len(ROWS)})
        steep = replace(flat, weights={"": flat.weights[""], "Q4_0": tuple(1e-9 * rows for rows in ROWS)})
        for rows in (1, 5, 64):
            distinct = distinct_experts(experts, rows)
            own = CpuPass(layer, 2, flat).experts(rows)
            assert own == pytest.approx(distinct * layer.expert_bytes(2) * 1e-9)
            assert CpuPass(layer, 2, steep).experts(rows) == pytest.approx(own * rows * experts.used / distinct)
        assert CpuPass(llama_shaped("llama", 99, 64, 64, 2, 4, 4, 16, 999), 2, flat).experts(1) == 0.0

    def test_of_a_prefill_are_those_of_products_and_of_making_experts_numbers_for_each_group_of_rows(self) -> None:
        own, products = CpuPass(MIXTURE.layer(0), 2, replace(CURVES, pair=0.0)), 3 * 1408 * 4096 * CURVES.product
        dense = 4096 * MIXTURE.layer(0).layer_matrix_elements() * CURVES.product
        for group in (512, 2048, 4096):
            distinct = 4096 // group * distinct_experts(Experts(FeedForward(1408), 128, 8), group)
            made = products * (8 * 4096 + 16 * distinct) / 0.85
            assert own.prefill(4096, group) == pytest.approx(dense + made, rel=1e-3)
        assert own.prefill(4097, 4096) - own.prefill(4096, 4096) > 16 * 8 * products  # one row more wants eight experts

    def test_are_measured_for_a_gpu_that_may_leave_some_to_the_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        best()
        asked: list[str] = []

        def measure(dtype: str, form: str, known: Curves) -> Curve:
            asked.append(f"{form} beside {dtype}")
            return (1e-9,) * len(ROWS)

        monkeypatch.setattr(curve_timer, "time_weights", measure)
        request = Request(MIXTURE, None, Options(dtype="bf16"), linked(2.0))
        first = timed(request)
        assert timed(request).curves == first.curves == request.with_known_curves().curves
        assert first.curves is not None
        assert first.curves.weights["Q4_0"] == (1e-9,) * len(ROWS)
        assert asked == ["Q4_0 beside bf16"]
        assert timed(replace(request, target=llama_shaped("llama", 99, 64, 64, 2, 4, 4, 16, 999))).curves is None


def test_rows_that_the_kernels_do_not_know_run_by_torchs_operators(tmp_path: Path) -> None:
    """Half of the program took the kernels, whose assertion about 16 numbers then failed."""
    folder = save_tiny("qwen3_moe", tmp_path / "model", tokenizer=True, vocab_size=264, hidden_size=40)
    request = GenerationRequest(random_tokens(40), SamplingParams(temperature=0.0), max_tokens=4)
    plan = plan_request(folder, None, Options(device="cpu"), num_prompt_tokens=40, max_tokens=4)
    with Engine.load(plan, folder, None, load_tokenizer(folder, None)) as engine:
        assert sum(len(step.tokens) for step in engine.generate(request)) == 4
