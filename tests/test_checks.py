"""The checks of `triforce doctor`: they hold here, and each finds the fault that it is there for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.models import TOKENIZER_SIZE, perturbed, random_model, save
from kit.processor import best, swapped
from offload.bench import checks, text_checks
from offload.bench.checks import Check, check_device
from offload.bench.kernel_checks import kernel_checks
from offload.errors import DoesNotFit
from offload.kernels import cpu
from offload.kernels.cpu import kernels
from offload.kernels.products import Steps
from offload.kv.full import FullCache
from offload.kv.layer_states import LayerStates
from offload.model.level import Level
from offload.model.passes import Pass
from offload.plan.what_if import LLAMA31_8B
from offload.speed.hardware import probe
from offload.transfer.link import PacedLink

EMBEDDED = Path(__file__).parents[1] / "triforce_cli" / "models"
SMALL = LLAMA31_8B.changed(hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=16)
Patch = pytest.MonkeyPatch
Failed = Callable[[], set[str]]


PROMPT = [token % TOKENIZER_SIZE for token in text_checks.PROMPT[:1100]]  # with a whole page that has codes


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a target and a draft that write a text, with whole groups of codes."""
    folder = tmp_path_factory.mktemp("models")
    sizes = {"vocab_size": TOKENIZER_SIZE, "max_position_embeddings": 2048, "hidden_size": 64, "intermediate_size": 128}
    fields: dict[str, Any] = {**sizes, "head_dim": 16}
    save(random_model(**fields), folder / "demo-target", tokenizer=True)
    save(perturbed(random_model(**fields), 0.1), folder / "demo-draft", tokenizer=True)
    return folder


@pytest.fixture(autouse=True)
def small(monkeypatch: Patch) -> None:
    monkeypatch.setattr(checks, "MODELS", {"small": SMALL})
    monkeypatch.setattr(checks, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(text_checks, "PROMPT", PROMPT[:150])


@pytest.fixture
def no_texts(monkeypatch: Patch) -> None:
    """Texts, which take longest, are not written: for what says nothing of them."""
    monkeypatch.setattr(checks, "text_checks", lambda *models: ())


def run(models: Path, device: str = "cpu") -> list[Check]:
    return check_device(probe(device), models / "demo-target", models / "demo-draft", lambda step: None)


def other(call: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a result that is a little larger."""
    return lambda *args: call(*args) * 1.1


@pytest.mark.parametrize(
    ("field", "change", "found"),
    [
        ("gated", other, "gated activations"),
        ("multiply", other, "4 and 6 bits"),
        ("multiply_stored", other, "stored matrices"),
        ("decode_stored", other, "stored matrices"),
        ("experts", other, "experts"),
    ],
)
@pytest.mark.skipif(not kernels().usable, reason="the CPU's kernels do not run here")
def test_a_kernel_of_each_sort_that_is_wrong_is_found(
    field: str, change: Callable[..., Any], found: str, monkeypatch: Patch
) -> None:
    with_fault = replace(kernels(), **{field: change(getattr(kernels(), field))})
    assert all(check()[0] for _, check, _ in kernel_checks(probe("cpu"), ["bf16"], ""))
    monkeypatch.setattr("offload.bench.kernel_checks.fitting", lambda *given: with_fault)
    wrong = [name for name, check, _ in kernel_checks(probe("cpu"), ["bf16"], "") if not check()[0]]
    assert wrong == [f"products, {found}, bf16"]


@pytest.fixture
def failed(tiny: Path) -> Failed:
    """Kinds of checks that fail."""
    return lambda: {check.name.partition(",")[0] for check in run(tiny) if not check.passed}


@pytest.mark.parametrize("models", ["tiny", pytest.param("embedded", marks=pytest.mark.deep)])
@pytest.mark.parametrize("kernels", ["on", "off"])
def test_all_hold_here_with_kernels_and_without(kernels: str, models: str, tiny: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("TRIFORCE_KERNELS", kernels)
    cpu.kernels.cache_clear()
    try:
        found = run(tiny if models == "tiny" else EMBEDDED)
    finally:
        cpu.kernels.cache_clear()
    assert [check for check in found if not check.passed] == []
    kinds = ["attention", "copies", "products", "rows of attention", "states", "streamed tiles", "text"]
    kinds += ["short convolutions"]
    kinds += ["packed tiles", "packed weights"] if probe("cpu").fast_bf16 and kernels == "on" else []
    assert sorted({check.name.partition(",")[0] for check in found}) == sorted(kinds)
    assert all(check.seconds > 0 and check.found for check in found)


def of_output(monkeypatch: Patch, change: Callable[[Tensor, FullCache], Tensor], phase: str) -> None:
    """Attention gives something else in `phase`."""
    real = FullCache.attend

    def attend(self: FullCache, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = real(self, layer, q, k, v)
        return change(out, self) if self._phase == phase else out

    monkeypatch.setattr(FullCache, "attend", attend)


@pytest.mark.usefixtures("no_texts")
def test_attention_of_a_pass_that_is_a_little_off_is_found(tiny: Path, monkeypatch: Patch) -> None:
    """And the remedy names the other path."""
    of_output(monkeypatch, lambda out, cache: out * 1.05, "decode")
    [problem] = {check.problem for check in run(tiny) if check.name.startswith("attention") and not check.passed}
    assert "TRIFORCE_KERNELS=off" in problem
    assert "--report" in problem


@pytest.mark.deep
@pytest.mark.usefixtures("no_texts")
def test_attention_of_a_prefill_that_is_a_little_off_is_found(failed: Failed, monkeypatch: Patch) -> None:
    of_output(monkeypatch, lambda out, cache: out * 1.05, "prefill")
    assert "attention" in failed()


@pytest.mark.usefixtures("no_texts")
def test_a_number_that_is_none_is_found(failed: Failed, monkeypatch: Patch) -> None:
    of_output(monkeypatch, lambda out, cache: out.index_fill(1, torch.tensor([3]), torch.nan), "decode")
    assert "attention" in failed()


@pytest.mark.usefixtures("no_texts")
@pytest.mark.parametrize(
    "change",
    [
        lambda out, count: out * 1.05,  # a little off
        lambda out, count: out * (1 + 2**-12) if len(out) > 8 else out,  # as many rows run together
        lambda out, count: out * 1.05 if count > 4 else out,  # of a pass after several tokens that were kept
    ],
)
def test_states_that_are_wrong_are_found(
    change: Callable[[Tensor, int], Tensor], failed: Failed, monkeypatch: Patch
) -> None:
    real = LayerStates.run

    def run(self: LayerStates, layer: int, start: int, *others: Any, settles: bool) -> Tensor:
        count = start - self.bases[layer]
        return change(real(self, layer, start, *others, settles=settles), count)

    monkeypatch.setattr(LayerStates, "run", run)
    assert failed() == {"states", "short convolutions"}


@pytest.mark.usefixtures("no_texts")
def test_rows_whose_bits_depend_on_others_are_found(failed: Failed, monkeypatch: Patch) -> None:
    """A bug of this test: how many rows a text's passes have follows the clock, and then its check failed, too."""
    of_output(monkeypatch, lambda out, cache: out * (1 + 2**-20) if len(out) > 8 else out, "decode")
    assert failed() == {"rows of attention"}


@pytest.mark.usefixtures("no_texts")
def test_a_cache_that_streams_and_computes_otherwise_is_found(failed: Failed, monkeypatch: Patch) -> None:
    def change(out: Tensor, cache: FullCache) -> Tensor:
        return out * (1 + 2**-7) if cache.pages._traffic is not None else out

    of_output(monkeypatch, change, "decode")
    assert failed() - {"packed tiles"} == {"streamed tiles"}  # these stream, too


@pytest.mark.skipif(not probe("cpu").fast_bf16, reason="bf16 alone is packed, and slow here")
@pytest.mark.usefixtures("no_texts")
def test_pages_that_are_unpacked_wrongly_are_found(failed: Failed, monkeypatch: Patch) -> None:
    best()
    real = kernels().unpack_tile

    def unpack_tile(tile: Tensor, *others: Any) -> None:
        real(tile, *others)
        tile[0, 0, 0, 5, 3] += 1

    swapped(monkeypatch, kernels(), unpack_tile=unpack_tile)
    assert failed() == {"packed tiles"}


@pytest.mark.skipif(not probe("cpu").fast_bf16, reason="bf16 alone is packed, and slow here")
@pytest.mark.few(1)
@pytest.mark.parametrize("function", ["restore", "unpack_numbers"])
@pytest.mark.usefixtures("no_texts")
def test_weights_that_arrive_with_another_bit_are_found(failed: Failed, monkeypatch: Patch, function: str) -> None:
    best()
    real = getattr(kernels(), function)

    def off(*arguments: Any) -> None:
        real(*arguments)
        out = arguments[2 if function == "unpack_numbers" else 3]
        out.view(-1)[77] *= 1.01

    swapped(monkeypatch, kernels(), **{function: off})
    assert failed() == {"packed weights"}


@pytest.mark.skipif(not probe("cpu").fast_bf16, reason="bf16 alone is packed, and slow here")
def test_another_text_of_pages_beside_codes_is_found(failed: Failed, monkeypatch: Patch) -> None:
    best()
    monkeypatch.setattr(text_checks, "PROMPT", PROMPT)
    real = kernels().restore_tile

    def restore_tile(tile: Tensor, *others: Any) -> None:
        real(tile, *others)
        tile[1] = -20

    swapped(monkeypatch, kernels(), restore_tile=restore_tile)
    assert failed() == {"text"}


@pytest.mark.usefixtures("no_texts")
def test_products_that_are_a_little_off_are_found(failed: Failed, monkeypatch: Patch) -> None:
    real, plain = Steps.run, checks.linear

    def off(self: Steps, num_rows: int) -> None:
        real(self, num_rows)
        self._kept[-1].out.mul_(1.05)

    monkeypatch.setattr(Steps, "run", off)
    monkeypatch.setattr(checks, "linear", lambda x, weight: plain(x, weight) * 1.05)
    assert "products" in failed()


@pytest.mark.deep
def test_products_whose_bits_depend_on_the_number_of_rows_are_found(failed: Failed, monkeypatch: Patch) -> None:
    real = checks.Trial._product

    def product(self: checks.Trial, x: Tensor, weight: Tensor) -> Tensor:
        out = real(self, x, weight)
        return out * (1 + 2**-7) if len(x) > 1 else out

    monkeypatch.setattr(checks.Trial, "_product", product)
    assert failed() == {"products"}


@pytest.mark.usefixtures("no_texts")
def test_a_byte_that_changes_on_its_way_is_found(failed: Failed, monkeypatch: Patch) -> None:
    real = PacedLink.to_host

    def to_host(self: PacedLink, dst: Tensor, src: Tensor, after: object = ()) -> object:
        event = real(self, dst, src, after)  # type: ignore[arg-type]
        event.synchronize()
        if dst.dtype == torch.uint8:
            dst[12345] ^= 1
        return event

    monkeypatch.setattr(PacedLink, "to_host", to_host)
    assert failed() == {"copies"}


def test_a_text_that_is_not_the_targets_is_found(failed: Failed, monkeypatch: Patch) -> None:
    real = Level.run

    def run(self: Level, passes: Sequence[Pass]) -> None:
        real(self, passes)
        for each in passes if self.stats.name == "target" else ():
            each.made = tuple(logits + 0.01 * len(each.tokens) for logits in each.made)

    monkeypatch.setattr(Level, "run", run)
    assert failed() == {"text"}


@pytest.mark.usefixtures("no_texts")
def test_a_check_that_cannot_run_fails_with_the_reason_and_the_others_run(tiny: Path, monkeypatch: Patch) -> None:
    def refuse(*args: object, **options: object) -> object:
        raise DoesNotFit("no memory for this")

    monkeypatch.setattr(checks, "full_cache", refuse)
    found = {check.name.partition(",")[0]: check for check in run(tiny)}
    assert found["attention"].found == "no memory for this"
    assert not found["attention"].passed
    assert found["copies"].passed
