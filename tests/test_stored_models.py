"""Engines of quantised checkpoints, besides the contract: rows of a prefill have the bits of the plain numbers, ranks
cut no block, and numbers beyond fp16 are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kit.contract import CONTEXT, DRAFTED, PLAIN, Pair, say
from kit.gguf_models import write_gguf
from kit.models import load
from kit.quantised import engine_of, level_stats, saved
from kit.stored_models import FORMS, GGUF, twin
from offload.config.encodings import encoded
from offload.config.matrices import Matrix
from offload.config.model import llama_shaped
from offload.config.reading import read_config
from offload.errors import ModelError, UsageError
from offload.formats.stored import StoredMatrix
from offload.plan.shards import check_divides
from offload.session.fingerprints import identity_of
from offload.weights import quantised_folder


@pytest.mark.parametrize("form", [*FORMS, *GGUF])
def test_rows_of_a_prefill_have_the_bits_of_the_plain_numbers(
    pairs: Callable[[str], Pair], tmp_path: Path, form: str
) -> None:
    """Both are rounded to the dtype."""
    pair, rows = pairs(f"qwen2 in {form}"), []
    plain = twin(pair[0], tmp_path / "twin", torch.bfloat16)
    for each in (pair, (plain, plain)):
        with engine_of(each, PLAIN, prompt_tokens=CONTEXT) as engine:
            say(engine)
            rows.append([page.clone() for page in engine.worker.full.page_of_all(0)])
            identity = identity_of(each[0], engine.plan)
    assert all(map(torch.equal, *rows))
    with engine_of(pair, PLAIN, prompt_tokens=CONTEXT) as engine:  # a session is of a checkpoint, not of its numbers
        assert identity_of(pair[0], engine.plan) != identity


def test_a_matrix_is_unpacked_once_although_its_rows_are_read_in_parts(
    pairs: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each head: a folder of Qwen3-Next's size would have loaded for hours. Queries and their gates are in one
    matrix, and keys and values between them."""
    unpacked, get_tensor = Counter[str](), quantised_folder._Reader.get_tensor

    def counted(self: quantised_folder._Reader, name: str) -> torch.Tensor:
        unpacked[self.module] += 1
        return get_tensor(self, name)

    monkeypatch.setattr(quantised_folder._Reader, "get_tensor", counted)
    load(pairs("qwen3_next in int4")[0])
    assert {module for module, times in unpacked.items() if times > 1} == {"model.layers.3.self_attn.q_proj"}
    assert unpacked["model.layers.0.linear_attn.in_proj_qkvz"] == unpacked["model.layers.3.self_attn.q_proj"] / 2 == 1


def test_ranks_cut_no_block(pairs: Callable[[str], Pair]) -> None:
    """Of 256 inputs; 512 are two of them."""
    config = read_config(pairs("qwen2 in Q4_K and others")[0])
    check_divides(config, 2)
    with pytest.raises(UsageError, match=r"gpus is 4, .* in blocks of 256 do not divide so; --gpus may be 1, 2$"):
        check_divides(config, 4)


@pytest.mark.parametrize("operator", ["self_attn.o_proj", "mlp.down_proj"])
def test_ranks_cut_no_block_of_either_matrix_that_they_share_by_inputs(operator: str) -> None:
    """A planted fault lived: blocks of the feed-forward network alone could be cut."""
    plain = llama_shaped("llama", 264, 256, 256, 1, num_heads=4, num_kv_heads=4, head_dim=64, max_positions=400)
    check_divides(plain, 2)
    stored = encoded(plain, lambda name: "Q4_K" if operator in name else "")
    with pytest.raises(UsageError, match=r"in blocks of 256 do not divide so; --gpus may be 1$"):
        check_divides(stored, 2)


def test_a_tied_head_is_stored_as_its_table_is() -> None:
    plain = llama_shaped("llama", 264, 256, 256, 1, num_heads=4, num_kv_heads=4, head_dim=64, max_positions=400)
    tied = encoded(replace(plain, tie_embeddings=True), lambda name: "Q4_K" if name == plain.names.embeddings else "")
    assert tied.head == tied.table == Matrix(264, 256, "Q4_K")


@pytest.mark.parametrize("kind", ["Q4_K", "IQ3_S", "F32"])
def test_rows_of_an_embedding_in_blocks_are_read_from_the_file(tmp_path: Path, kind: str) -> None:
    """Where the head is another matrix: such a table may be larger than memory."""
    target, draft = saved(tmp_path, hidden_size=256, intermediate_size=512, head_dim=64)
    write_gguf(target, file := tmp_path / "target.gguf", kind=lambda name: kind if "embed" in name else "Q8_0")
    config, plain = read_config(file), twin(file, tmp_path / "twin", torch.bfloat16)
    with engine_of((file, draft), PLAIN, prompt_tokens=400) as engine:
        placement, table = engine.plan.placement, engine.worker.models.decoders["target"].weights.embedding.table
        assert placement.table == ("device" if kind == "F32" else "file")
        head, norm = config.head.nbytes(2), 2 * config.hidden_size
        planned = placement.device_bytes["target embeddings"]
        assert planned == head + norm + (config.table.nbytes(2) if kind == "F32" else 0)
        assert engine.worker.memory.allocated()["device"]["target embeddings"] == planned
        wanted = load_file(plain / "model.safetensors")["model.embed_tokens.weight"]
        rows = engine.worker.models.decoders["target"].weights.embedding.rows(torch.arange(config.vocab_size))
        assert torch.equal(rows, wanted)
        assert isinstance(table, StoredMatrix) == (kind != "F32")


@pytest.mark.parametrize("bits", [4, 6])
def test_a_head_that_is_stored_in_blocks_stays_so_beside_quantised_layers(tmp_path: Path, bits: int) -> None:
    """Such a file, with layers as plain numbers, could not be run by the CPU's kernels at all."""
    target, draft = saved(tmp_path, hidden_size=256, intermediate_size=512, head_dim=64)
    write_gguf(target, file := tmp_path / "target.gguf", kind=lambda name: "BF16" if "layers" in name else "Q8_0")
    assert (config := read_config(file)).head_encoding
    assert not config.stored_in
    sizes = replace(DRAFTED, budget=0, draft_gamma=0, weight_bits=bits)
    with engine_of((file, draft), PLAIN, prompt_tokens=400) as engine:
        expected = say(engine)
    with engine_of((file, draft), sizes, prompt_tokens=400) as engine:
        assert say(engine) == expected
        assert level_stats(engine, "target").accepted > 0
        planned, device = engine.plan.placement.device_bytes, engine.worker.memory.allocated()["device"]
        assert device["quantised weights"] == planned["quantised weights"]


@pytest.mark.parametrize(
    ("weight", "owner"),
    [("model.layers.1.mlp.down_proj.weight", "layer 1"), ("model.embed_tokens.weight", "model.embed_tokens.weight")],
)
def test_stored_weights_beyond_fp16_are_refused_in_fp16(tmp_path: Path, weight: str, owner: str) -> None:
    """As plain ones are; they were infinite."""
    target, draft = saved(tmp_path, hidden_size=256, intermediate_size=512, head_dim=64)
    tensors = load_file(target / "model.safetensors")
    tensors[weight] = tensors[weight].float() * 1e5 / tensors[weight].abs().max()
    save_file(tensors, target / "model.safetensors")
    write_gguf(target, file := tmp_path / "target.gguf", kind="Q8_0")
    engine_of((file, draft), PLAIN, prompt_tokens=400).close()
    with pytest.raises(ModelError, match=f"^{owner} has weights beyond fp16's range of 65504; try --dtype bf16"):
        engine_of((file, draft), PLAIN, prompt_tokens=400, dtype="fp16")
