"""Shards: every weight of a model is on the ranks that need it, and is counted once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kit.models import FAMILIES, random_model, save
from offload.config.model import ModelConfig
from offload.config.reading import read_config
from offload.errors import UsageError
from offload.plan.shards import ALONE, Shard, check_divides
from offload.transfer.memory import Memory
from offload.weights.checkpoint import Checkpoint
from offload.weights.layout import NORMS, LayerWeights
from offload.weights.linear import Linear
from offload.weights.loader import Weights, load_weights

SIZES = pytest.mark.parametrize("size", [2, 4])
FAMILY = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("shards")
    return {family: save(random_model(family, seed=1), root / family) for family in FAMILIES}


def load(folder: Path, shard: Shard = ALONE) -> Weights:
    with Checkpoint.open(folder) as checkpoint:
        config, memory = read_config(folder), Memory(torch.device("cpu"))
        return load_weights(checkpoint, config, memory, dtype=torch.float32, shard=shard)


def load_all(folder: Path, size: int) -> list[Weights]:
    return [load(folder, Shard(rank, size)) for rank in range(size)]


def parts(linear: Linear, sizes: list[int]) -> list[tuple[Tensor, Tensor | None]]:
    """(weight, bias) of each of the operators that are fused into one, of so many outputs."""
    weights = linear.weight.split(sizes)
    biases = [None] * len(sizes) if linear.bias is None else linear.bias.split(sizes)
    return list(zip(weights, biases, strict=True))


def q_k_v(config: ModelConfig) -> list[int]:
    return [config.head_dim * heads for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]


def layers(weights: list[Weights]) -> list[list[LayerWeights]]:
    """By layer, the shards of it."""
    return [list(each) for each in zip(*(list(one.layers) for one in weights), strict=True)]


def assert_joined(shards: list[Tensor | None], whole: Tensor | None, dim: int = 0) -> None:
    if whole is None:
        assert shards == [None] * len(shards)
    else:
        assert torch.equal(torch.cat([shard for shard in shards if shard is not None], dim), whole)


@SIZES
@FAMILY
def test_operators_that_are_split_by_outputs_are_whole_when_put_side_by_side(
    folders: dict[str, Path], family: str, size: int
) -> None:
    config = read_config(folders[family])
    shards = [Shard(rank, size).config(config) for rank in range(size)]
    for [whole], split in zip(layers([load(folders[family])]), layers(load_all(folders[family], size)), strict=True):
        q, k, v = parts(whole.qkv, q_k_v(config))
        pieces = [parts(layer.qkv, q_k_v(shard)) for layer, shard in zip(split, shards, strict=True)]
        gate_up = [
            parts(layer.gate_up, [shard.intermediate_size] * 2) for layer, shard in zip(split, shards, strict=True)
        ]
        for kind in range(2):  # weight, bias
            assert_joined([piece[0][kind] for piece in pieces], q[kind])
            for half, both in enumerate(parts(whole.gate_up, [config.intermediate_size] * 2)):
                assert_joined([piece[half][kind] for piece in gate_up], both[kind])
            for rank, piece in enumerate(pieces):
                heads = Shard(rank, size).kv_heads(config)
                rows = slice(heads.start * config.head_dim, heads.stop * config.head_dim)
                for own, both in zip(piece[1:], (k, v), strict=True):
                    assert_joined([own[kind]], None if both[kind] is None else both[kind][rows])


@SIZES
@FAMILY
def test_operators_that_are_split_by_inputs_add_up_and_their_biases_are_added_once(
    folders: dict[str, Path], family: str, size: int
) -> None:
    for [whole], split in zip(layers([load(folders[family])]), layers(load_all(folders[family], size)), strict=True):
        for name in ("o", "down"):
            ours, theirs = getattr(whole, name), [getattr(layer, name) for layer in split]
            assert_joined([linear.weight for linear in theirs], ours.weight, dim=1)
            x = torch.randn(3, ours.weight.shape[1], dtype=torch.float64)
            inputs = x.split([linear.weight.shape[1] for linear in theirs], 1)
            summed = sum(in_fp64(linear)(part) for linear, part in zip(theirs, inputs, strict=True))
            torch.testing.assert_close(summed, in_fp64(ours)(x), rtol=0, atol=1e-12)


def in_fp64(linear: Linear) -> Linear:
    return Linear(linear.weight.double(), None if linear.bias is None else linear.bias.double())


@SIZES
@FAMILY
def test_norms_and_embeddings_are_whole_everywhere_and_the_head_is_rank_0s(
    folders: dict[str, Path], family: str, size: int
) -> None:
    whole, split = load(folders[family]), load_all(folders[family], size)
    for name in NORMS:
        for layer, [ours] in zip(layers(split), layers([whole]), strict=True):
            for own, theirs in ((getattr(each, name), getattr(ours, name)) for each in layer):
                assert own is theirs is None or torch.equal(own.weight, theirs.weight)
    for weights in split:
        assert torch.equal(weights.embedding.table, whole.embedding.table)
        assert torch.equal(weights.final_norm.weight, whole.final_norm.weight)
    first, *others = split
    assert first.head is not None
    assert whole.head is not None
    assert torch.equal(first.head.weight, whole.head.weight)
    assert [weights.head for weights in others] == [None] * (size - 1)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_every_query_head_is_beside_its_own_kv_head(folders: dict[str, Path], kv_heads: int, size: int) -> None:
    """Fewer KV heads than ranks: neighbours have the same one."""
    whole = read_config(folders["llama-gqa"]).changed(num_heads=16, num_kv_heads=kv_heads)
    check_divides(whole.changed(intermediate_size=64), size)
    held = []
    for rank in range(size):
        shard = Shard(rank, size)
        own, heads, kv = shard.config(whole), shard.heads(whole), shard.kv_heads(whole)
        assert (own.num_heads, own.num_kv_heads) == (len(heads), len(kv))
        group = own.num_heads // own.num_kv_heads
        assert [kv[i // group] for i in range(len(heads))] == [head // (16 // kv_heads) for head in heads]
        held += heads
    assert held == list(range(16))


def test_ranks_that_do_not_divide_a_model_are_refused_with_those_that_do(folders: dict[str, Path]) -> None:
    config = read_config(folders["llama-gqa"])
    uneven = config.changed(num_heads=12, num_kv_heads=6, intermediate_size=96)
    with pytest.raises(UsageError) as error:
        check_divides(uneven, 4)
    assert str(error.value) == (
        "gpus is 4, and 12 heads, 6 KV heads and 96 feed-forward rows of the model do not divide so; "
        "--gpus may be 1, 2, 3, 6"
    )
    for number in (1, 2, 3, 6):
        check_divides(uneven, number)
    with pytest.raises(UsageError, match="49 feed-forward rows"):
        check_divides(config.changed(intermediate_size=49), 2)
