"""Prefill by flash-attn: rehearsed on the CPU against a function with its signature and conditions."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

from kit.fake_flash import flash_attn_with_kvcache
from kit.models import load, random_model, random_tokens, resident_rows, save
from offload.config.mixers import Attention, Latent
from offload.engine import engine
from offload.engine.engine import prefill_problem
from offload.errors import UsageError
from offload.kernels import choice
from offload.kernels.attention import attend, fold, unfold
from offload.kernels.device import NONE
from offload.kernels.gpu import flash as module
from offload.kernels.gpu.flash import Flash, FlashTiles
from offload.kernels.rope import Scoring, scorings
from offload.kv.full import FullCache
from offload.pages.tiles import TileShape
from offload.transfer.memory import Memory

PAGE, PAGES = 256, 2
TOKENS = PAGE * PAGES


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("first", "count"),
    [
        (512, 40),  # after the tile
        (511, 40),  # the first row sees all of it
        (100, 40),  # within its first page
        (300, 40),  # within its second
        (505, 40),  # seven rows before its end
        (500, 40),  # over its end
        (0, 40),  # from its start on
        (-20, 40),  # over its start
        (-20, 600),  # over both
    ],
)
def test_rows_see_of_a_tile_what_is_before_them(first: int, count: int, dtype: torch.dtype, group: int) -> None:
    base, kv_heads, dim = 1024, 2, 16
    generator = torch.Generator().manual_seed(count + first)
    before, tile = torch.randn(2, 2, PAGES, kv_heads, PAGE, dim, generator=generator).to(dtype)
    rows = torch.randn(count, group * kv_heads, dim, generator=generator).to(dtype)
    block = FlashTiles(flash_attn_with_kvcache).block(rows, base + first, Scoring(None))  # type: ignore[arg-type]
    block.attend(before, base - TOKENS)
    block.attend(tile, base)
    block.attend(tile, base + 4 * TOKENS)  # after all rows
    got = block.attended()
    seen = (torch.arange(count) + first + 1 + TOKENS).clamp(max=2 * TOKENS).repeat(group)
    both = torch.cat([before, tile], 1).float()
    expected = unfold(attend(fold(rows, kv_heads).float(), both[0], both[1], seen).out, count)
    assert got.dtype == torch.float32
    assert (got - expected).abs().max() < (2e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.few(2)
@pytest.mark.parametrize("cuts", [(1200,), (300, 900), (512, 600, 88)])
def test_a_prefill_fills_the_cache_with_the_rows_that_torchs_kernel_gives(
    cuts: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Blocks of 200 rows over three tiles, in one prefill or several."""
    folder = save(random_model("llama-gqa", max_position_embeddings=2048), tmp_path_factory.mktemp("model"))
    decoder = load(folder, dtype=torch.float16)
    calls = []

    def counted(*args: object, **more: object) -> object:
        calls.append(more["causal"])
        return flash_attn_with_kvcache(*args, **more)  # type: ignore[arg-type]

    def filled(flash: FlashTiles | None) -> torch.Tensor:
        config, tokens = decoder.config, random_tokens(sum(cuts))
        cache = FullCache(
            Memory(torch.device("cpu")),
            TileShape(config.num_kv_heads, config.head_dim, PAGE, PAGES, torch.float16),
            num_layers=config.num_layers,
            scorings=scorings(config, 2048, 2048, "cpu", torch.float16),
            prefill=flash,
        )
        for count in cuts:
            done = cache.length
            decoder.prefill(cache, tokens[done : done + count], resident_rows(decoder, 200))
        return cache.pages.reader.tokens(0, sum(cuts)).float()

    expected, got = filled(None), filled(FlashTiles(counted))
    assert {True, False} == set(calls)
    assert (got - expected).abs().max() < 0.03
    assert (got - expected).abs().mean() < 5e-4


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """One that knows bf16, without Triton."""
    monkeypatch.setattr(engine, "gpu_kernels", lambda device: NONE)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    module.flash.cache_clear()
    yield torch.device("cuda:0")
    module.flash.cache_clear()


def test_it_is_used_where_it_is_installed(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("flash_attn")
    package.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr(module, "installed_version", lambda name: "2.8.3")
    assert module.flash(gpu) == Flash("2.8.3", call=flash_attn_with_kvcache)
    assert prefill_problem("cuda:0") == ""


def test_one_that_is_missing_or_does_not_load_is_named_with_the_remedy(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "installed_version", lambda name: None)
    assert "pip install 'triforce[flash]'" in prefill_problem("cuda:0")
    module.flash.cache_clear()
    monkeypatch.setattr(module, "installed_version", lambda name: "2.8.3")
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert "flash-attn 2.8.3 cannot be loaded" in prefill_problem("cuda:0")


def test_tritons_kernel_takes_its_place(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers with a window, too, and of heads that flash-attn does not take; then a prefill has torch's operators
    only where heads or pages fit neither."""
    kernels = pytest.importorskip("offload.kernels.gpu.kernels").GPU_KERNELS
    for module_of_it in (engine, choice):
        monkeypatch.setattr(module_of_it, "gpu_kernels", lambda device: kernels)
    monkeypatch.setattr(module, "installed_version", lambda name: None)
    assert prefill_problem("cuda:0") == ""

    def chosen(head_dim: int, *, page: int = 512, windows: bool = False) -> str:
        attention = Attention(8, 8, head_dim)
        return type(choice.prefill_attention(gpu, attention, page=page, windows=windows)).__name__

    assert [chosen(dim) for dim in (64, 128, 256, 512, 528, 40)] == ["TritonTiles"] * 4 + ["NoneType"] * 2
    assert (chosen(128, page=32), chosen(128, page=64)) == ("NoneType", "TritonTiles")
    assert choice.prefill_attention(torch.device("cpu"), Attention(8, 8, 128), page=512, windows=False) is None
    monkeypatch.setattr(choice, "flash", lambda device: Flash("2.8.3", call=flash_attn_with_kvcache))
    assert [chosen(dim) for dim in (64, 128, 256, 512, 40)] == ["FlashTiles"] * 3 + ["TritonTiles", "FlashTiles"]
    assert (chosen(128, page=64), chosen(128, windows=True)) == ("TritonTiles", "TritonTiles")
    for rank, rotated, kind in (
        (512, 64, "LatentTiles"),
        (32, 64, "LatentTiles"),
        (48, 16, "NoneType"),
        (640, 64, "NoneType"),
    ):
        attention = Attention(8, 1, rank + rotated, latent=Latent(rank, 8, rotated, 8))  # flash-attn has none
        found = choice.prefill_attention(gpu, attention, page=512, windows=False)
        assert type(found).__name__ == kind, rank


def test_nothing_is_said_where_it_could_not_be_used(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prefill_problem("cpu") == ""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not module.flash(gpu).usable
    assert prefill_problem("cuda:0") == ""


def test_the_user_may_turn_it_off(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the other kernels: it stayed on."""
    package = ModuleType("flash_attn")
    package.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr(module, "installed_version", lambda name: "2.8.3")
    monkeypatch.setenv("TRIFORCE_KERNELS", "off")
    assert module.flash(gpu) == Flash(reason="TRIFORCE_KERNELS is off")
    assert prefill_problem("cuda:0") == ""
    module.flash.cache_clear()
    monkeypatch.setenv("TRIFORCE_KERNELS", "maybe")
    with pytest.raises(UsageError, match="on and off are known"):
        module.flash(gpu)


def test_a_run_says_once_that_it_is_missing(
    triforce: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.engine.engine.prefill_problem", lambda device: "flash-attn is not here")
    with open(os.devnull, encoding="utf-8") as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        code, _, err = triforce("generate", "--prompt", "Once", "--max-tokens", "1")
    assert code == 0
    assert err.count("prompts are read by torch's fused kernel: flash-attn is not here") == 1
