"""What bf16 weights have beside their codes in 4 or 6 bits: that both together give every weight back, and that kernels
and twins agree to the bit. The GPU's program is in codes_interpreted.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kit.oracles import split_off_with_torch
from kit.processor import before_a_guard, built, on_this_machine
from offload.formats.quantised import GROUP, TILE, Codes, encode_with_torch
from offload.formats.residuals import restore, split_off
from offload.native.interface import Library

ALL = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
USUAL = ALL[ALL.abs() < 2.0**126]  # 15 steps of a group are finite


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def mixed(*size: int, share: float, seed: int = 0) -> Tensor:
    """Of a normal distribution, a share of them any smaller number: escapes."""
    generator = torch.Generator().manual_seed(seed)
    small = USUAL[USUAL.abs() < 1.0]
    some = small[torch.randint(len(small), size, generator=generator)]
    return torch.where(torch.rand(size, generator=generator) < share, some, normal(*size, seed=seed).bfloat16())


def groups_of(*rows: Tensor) -> Tensor:
    """[outputs, GROUP] rows, as often as it takes for whole tiles."""
    some = torch.stack(rows)
    return some.repeat(-(-TILE // len(some)), 1)[:TILE]


MATRICES = {
    "normal": normal(48, 192).bfloat16(),
    "small and large": (normal(32, 128, seed=1) * 10.0 ** torch.arange(-19, 13).float()[:, None]).bfloat16(),
    "escapes": mixed(32, 256, share=0.05),
    "sparse": mixed(32, 128, share=0.01) * (torch.rand(32, 128, generator=torch.Generator().manual_seed(3)) < 0.4),
    "escapes everywhere": groups_of(torch.tensor([9.0, -9.0, *[3e-20] * (GROUP - 2)]).bfloat16()),
    "far from zero": groups_of(*(normal(GROUP, seed=i).bfloat16() + value for i, value in enumerate((100.0, -7.0)))),
    "every number, scattered": USUAL[torch.arange(len(USUAL)) * 40507 % len(USUAL)].view(-1, GROUP).repeat(4, 1),
    "neighbours": USUAL.sort().values.view(-1, GROUP).repeat(4, 1),
    "of one number": groups_of(*(torch.full((GROUP,), value).bfloat16() for value in (0.0, -0.0, 1.5, -1e-40))),
    "two zeros": torch.tensor([0.0, -0.0]).bfloat16().repeat(TILE, GROUP // 2),
    "largest": groups_of(torch.tensor([3.38e38, 1e38, 3.3e38, 1.5e38]).bfloat16().repeat(GROUP // 4)),
}  # fmt: skip


@pytest.fixture(params=[4, 6])
def code_bits(request: pytest.FixtureRequest) -> int:
    return request.param


def codes_of(weight: Tensor, code_bits: int) -> Codes:
    codes = Codes(torch.zeros(Codes.shape_of_blocks(weight.shape, code_bits), dtype=torch.uint8))
    encode_with_torch(weight, codes)
    return codes


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16)


@pytest.fixture(params=on_this_machine() or ["none"])
def kernels(request: pytest.FixtureRequest) -> Library:
    if request.param == "none":
        pytest.skip("there are no kernels for this machine")
    return built(request.param)


def near_and_far(outputs: int, share: float, seed: int) -> tuple[Tensor, Tensor, Codes]:
    """Which weights of a group are near zero, about that share and never all; weights without escapes; their codes."""
    generator = torch.Generator().manual_seed(seed)
    near = torch.rand(outputs, GROUP, generator=generator) < share
    some = torch.rand(outputs, GROUP, generator=generator).argsort(1)[:, :2]
    near.scatter_(1, some, torch.tensor([[True, False]]).expand_as(some))
    size = torch.rand(outputs, GROUP, generator=generator) * 0.2 + 0.05
    weight = torch.where(near, torch.where(size < 0.15, -size, size), 8 + size).bfloat16()
    return near, weight, codes_of(torch.where(near, 0.0, 8.0).bfloat16(), 4)


@pytest.mark.parametrize("share", [0.01, 0.05, 0.2, 0.5, 0.8, 0.99])
def test_any_weights_of_a_group_may_be_near_zero_and_nothing_is_read_behind_a_part(
    share: float, kernels: Library
) -> None:
    """4 bits each begin and end anywhere in a byte, and the last ones at the end of what can be read."""
    odd = set[int]()
    for seed in range(20):
        near, weight, codes = near_and_far(TILE, share, seed)
        with before_a_guard(weight) as numbers, before_a_guard(codes.blocks) as blocks:
            split, twin = split_off(numbers, Codes(blocks), kernels), split_off_with_torch(weight, codes)
            assert split is not None
            assert twin is not None
            assert torch.equal(split.content[: split.escapes], twin.content[: split.escapes])
            assert split.escapes == weight.numel() + 8 + (int(near.sum()) + 1) // 2
            out = torch.full_like(weight, torch.nan)
            with before_a_guard(split.content[: split.escapes]) as content:
                restore(content, split.escapes, Codes(blocks), out, kernels)
        assert torch.equal(bits(out), bits(weight))
        odd.add(int(near.sum()) % 2)
    assert odd == {0, 1}


def test_codes_with_any_steps_are_split_as_by_the_twin(code_bits: int, kernels: Library) -> None:
    """Those that no encoder makes, too: of either sign, and so small that a bound is zero where another is not near."""
    generator = torch.Generator().manual_seed(0)
    came_back = 0
    for seed in range(300):
        shape = Codes.shape_of_blocks((TILE, GROUP), code_bits)
        codes = Codes(torch.randint(256, shape, generator=generator, dtype=torch.uint8))
        scales = codes.blocks[..., : 4 * TILE].view(torch.bfloat16).view(TILE, 2)
        if seed % 3:
            scales[:, 0] = (
                scales[:, 0].abs() if seed % 3 == 1 else torch.arange(0, 2 * TILE, 2).short().view(torch.bfloat16)
            )
            scales[:, 1] = scales[:, 0] * -0.5 * torch.randint(4, (TILE,), generator=generator)
        weight = codes.matrix(torch.bfloat16)
        split, twin = split_off(weight, codes, kernels), split_off_with_torch(weight, codes)
        assert (split is None) == (twin is None)
        if split is None or twin is None:
            continue
        came_back += 1
        assert split.escapes == twin.escapes
        assert torch.equal(split.content[: split.escapes], twin.content[: twin.escapes])
        out = torch.full_like(weight, torch.nan)
        restore(split.content, split.escapes, codes, out, kernels)
        assert torch.equal(bits(out), bits(weight))
    assert 100 < came_back < 250


def test_other_codes_than_a_weight_s_are_noticed(code_bits: int, kernels: Library) -> None:
    weight = normal(32, 128).bfloat16()
    codes = codes_of(weight, code_bits)
    codes.blocks[1, 0, 4 * TILE + 5] ^= 0x08
    assert split_off(weight, codes, kernels) is None
    assert split_off_with_torch(weight, codes) is None


def test_a_normal_matrix_takes_nine_bits_or_little_more_than_eight(code_bits: int) -> None:
    weight = normal(256, 1024).bfloat16()
    split = split_off_with_torch(weight, codes_of(weight, code_bits))
    assert split is not None
    least, most = {4: (8.5, 9.05), 6: (8.1, 8.4)}[code_bits]
    assert least < 8 * len(split.content) / weight.numel() < most
