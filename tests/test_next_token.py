"""A next-token head as a draft: its logits are those of the formula, and texts are the target's whatever it
proposes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu
from transformers import AutoModelForCausalLM

import asked
from families import save_tiny
from forked import Forked, forked_ranks
from models import GREEDY, Sizes, changed, random_tokens, tiny_engine, tiny_plan
from offload.config import next_token
from offload.decode.constraint import Constraint
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine, load_tokenizer, plan_request
from offload.engine.request import GenerationRequest
from offload.kv.last_hidden import LastHidden
from offload.model.next_token import NextTokenLevel
from offload.model.passes import forward
from offload.plan.options import Options
from offload.transfer.memory import Memory
from processor import best
from quantised import level_stats
from test_placement import TEMPORARY

SHAPES = {
    "vocab_size": 264, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 8, "head_dim": 16,
    "max_position_embeddings": 1024, "linear_num_value_heads": 8, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
SIZES = Sizes(
    gamma=6, draft_gamma=3, budget=64, chunk=16, window=32, any_rows=True, page=32, capacity=600, prefill_block=48
)


def with_head(folder: Path, *, seed: int = 3) -> Path:
    """The model with a random next-token head, as the authors' checkpoints have it."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(seed)
    hidden = config["hidden_size"]
    layers = [name for name in tensors if ".layers.3." in name]
    head = {f"mtp.layers.0.{name.split('.layers.3.')[1]}": tensors[name].shape for name in layers}
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    head |= {f"mtp.{name}.weight": (hidden,) for name in norms} | {"mtp.fc.weight": (hidden, 2 * hidden)}
    for name, shape in head.items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 0.2 * noise if "norm" in name else noise / shape[-1] ** 0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_head(save_tiny("qwen3_5", tmp_path_factory.mktemp("head") / "model", tokenizer=True, **SHAPES))


@pytest.fixture
def forked_here() -> Iterator[list[Forked]]:
    with forked_ranks() as started:
        yield started


def engine(folder: Path, sizes: Sizes = SIZES, *, draft: bool = True, dtype: str = "fp32", **options: object) -> Engine:
    wanted = folder if draft else None
    plan = tiny_plan(folder, wanted, sizes, num_prompt_tokens=400, max_tokens=60, dtype=dtype, **options)  # type: ignore[arg-type]
    return tiny_engine(plan, folder, wanted)


Z_ONLY = replace(GREEDY, constraint=Constraint("regex", "[x-z]+"))


class Reference:
    """transformers' model, and the head by its formula (DeepSeek-V3, arXiv 2412.19437, section 2.2), with full
    attention."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.weights = {name: t for name, t in load_file(folder / "model.safetensors").items() if name[:4] == "mtp."}
        self.config = json.loads((folder / "config.json").read_text())

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = 1 + self.weights[f"mtp.{name}.weight"]
        return rms_norm(x, weight.shape, weight, self.config["rms_norm_eps"])

    def product(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.weights[f"mtp.layers.0.{name}.weight"])

    @torch.inference_mode()
    def drafted(self, tokens: list[int], count: int) -> list[Tensor]:
        """The logits of `count` drafts after `tokens`, each the likeliest token, and of the last one's place: the model
        has run all but the last token."""
        hidden = self.model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]  # after its final norm
        text, found = list(tokens), list[Tensor]()
        for _ in range(count):
            out = self.rows(hidden, text)
            hidden = torch.cat([hidden, out[-1:]])
            found.append(self.model.lm_head(out[-1]))
            text.append(int(found[-1].argmax()))
        return found

    def rows(self, hidden: Tensor, tokens: list[int]) -> Tensor:
        """The normed outputs of all rows: of each but the last token, joined with the one after it."""
        embedded = self.model.model.embed_tokens(torch.tensor(tokens[1:]))
        rows = torch.cat([self.norm(embedded, "pre_fc_norm_embedding"), self.norm(hidden, "pre_fc_norm_hidden")], 1)
        x = linear(rows, self.weights["mtp.fc.weight"])
        x = x + self.attention(self.norm(x, "layers.0.input_layernorm"))
        inner = self.norm(x, "layers.0.post_attention_layernorm")
        inner = silu(self.product(inner, "mlp.gate_proj")) * self.product(inner, "mlp.up_proj")
        return self.norm(x + self.product(inner, "mlp.down_proj"), "norm")

    def attention(self, x: Tensor) -> Tensor:
        heads, dim = self.config["num_attention_heads"], self.config["head_dim"]
        q, gate = self.product(x, "self_attn.q_proj").unflatten(1, (heads, 2 * dim)).chunk(2, 2)
        k, v = (self.product(x, f"self_attn.{each}_proj").unflatten(1, (-1, dim)) for each in "kv")
        q, k = self.norm(q, "layers.0.self_attn.q_norm"), self.norm(k, "layers.0.self_attn.k_norm")
        q, k = (self.rotated(each) for each in (q, k))
        k, v = (each.repeat_interleave(heads // each.shape[1], 1) for each in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) / dim**0.5
        scores += torch.full(scores.shape[1:], -torch.inf).triu(1)
        out = torch.einsum("hts,shd->thd", scores.softmax(-1), v) * gate.sigmoid()
        return self.product(out.flatten(1), "self_attn.o_proj")

    def rotated(self, x: Tensor) -> Tensor:
        rope = self.config["rope_parameters"]
        rotated = int(x.shape[2] * rope["partial_rotary_factor"])
        angles = torch.arange(len(x))[:, None] / rope["rope_theta"] ** (torch.arange(0, rotated, 2) / rotated)
        cos, sin = (torch.cat([each, each], 1)[:, None] for each in (angles.cos(), angles.sin()))
        first, rest = x[..., :rotated], x[..., rotated:]
        half = torch.cat([-first[..., rotated // 2 :], first[..., : rotated // 2]], 2)
        return torch.cat([first * cos + half * sin, rest], 2)


def test_drafts_have_the_logits_of_the_formula(folder: Path) -> None:
    """Of the first draft after any number of verified tokens, and of drafts after drafts."""
    reference, tokens = Reference(folder), random_tokens(30, seed=4)
    with engine(folder) as made:
        worker = made.worker
        level, target = worker.levels["draft"], worker.levels["target"]
        assert isinstance(level, NextTokenLevel)
        worker.prefill(tokens[:17], lambda count: None)
        for start, stop in ((17, 20), (20, 21), (21, 28)):
            forward(target, [*tokens[start:stop], 1, 2], 1)  # of which two are rejected
            for each in (target, level):
                each.truncate(stop)
            text = tokens[: stop + 1]
            for theirs in reference.drafted(text, 4):
                ours = forward(level, text[level.length :], 1)[0]
                assert float((ours - theirs[: len(ours)]).abs().max()) < 1e-4 * float(theirs.abs().max())
                text.append(int(theirs.argmax()))
            level.truncate(stop)


@pytest.mark.parametrize("window", [10, 24, 60])
@pytest.mark.parametrize("length", [0, 3, 9, 40, 50])
def test_hidden_rows_are_copied_between_rings_of_any_sizes(window: int, length: int) -> None:
    """A chat's engine for a longer context may draft otherwise, and has another ring then."""
    rows = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))

    def ring(size: int) -> LastHidden:
        memory = Memory(torch.device("cpu"))
        return LastHidden(memory, hidden_size=4, dtype=torch.float32, sinks=4, window=size)

    source, copied = ring(24), ring(window)
    for start in range(0, 50, 7):
        source.write(start, rows[start : start + 7])
    copied.copy_from(source, length)
    assert copied.length == length
    first = max(26, length - window)
    assert torch.equal(copied.read(0, min(length, 4)), rows[: min(length, 4)])
    if first < length:
        assert copied.oldest <= first
        assert torch.equal(copied.read(first, length), rows[first:length])
    assert not copied.read(5, 6).any() or copied.oldest <= 5 < length


def test_a_head_that_catches_up_at_once_drafts_what_one_does_that_has_followed(folder: Path) -> None:
    """It has one layer: what it holds of a token depends on that token alone. Sinks, and what is skipped, among it."""
    tokens, found = random_tokens(140, seed=5), []
    for follows in (True, False):
        with engine(folder) as made:
            worker = made.worker
            level, target = worker.levels["draft"], worker.levels["target"]
            worker.prefill(tokens[:20], lambda count: None)
            for start in range(20, 139, 7):
                if follows:
                    forward(level, tokens[level.length : start], 1)
                forward(target, tokens[start : start + 7], 1)
            target.truncate(139)
            level.truncate(139)
            found.append(forward(level, tokens[level.length :], 1))
    assert float((found[0] - found[1]).abs().max()) < 1e-5 * float(found[0].abs().max())


def say(made: Engine, prompt: list[int], *, num_tokens: int = 26, sampling: SamplingParams = GREEDY) -> list[int]:
    steps = made.generate(GenerationRequest(prompt, sampling, max_tokens=num_tokens))
    return [token for step in steps for token in step.tokens]


@pytest.fixture
def trimmed(monkeypatch: pytest.MonkeyPatch) -> int:
    """A head that drafts the first 110 tokens of 264 only: bytes up to "m"."""
    monkeypatch.setattr(next_token, "DRAFTED_TOKENS", 110)
    return 110


def test_of_a_large_vocabulary_the_first_tokens_are_drafted(folder: Path, trimmed: int) -> None:
    """And the text is the target's, also where none of those that are drafted may follow."""
    reference, tokens = Reference(folder), random_tokens(20, seed=4)
    with engine(folder) as made:
        worker = made.worker
        level, target = worker.levels["draft"], worker.levels["target"]
        worker.prefill(tokens[:17], lambda count: None)
        forward(target, tokens[17:19], 1)
        [theirs] = reference.drafted(tokens, 1)
        ours = forward(level, tokens, 1)[0]
        assert float((ours - theirs[: len(ours)])[:trimmed].abs().max()) < 1e-4 * float(theirs.abs().max())
        assert float(ours[trimmed:].max()) < float(ours[:trimmed].min()) - 1e3
    with engine(folder, replace(SIZES, gamma=0, draft_gamma=0), draft=False) as made:
        plain = [say(made, PROMPT), say(made, PROMPT, sampling=Z_ONLY)]
    with engine(folder, replace(SIZES, budget=0)) as made:
        assert say(made, PROMPT) == plain[0]
        assert level_stats(made, "target").drafted_by["draft"] > 0
        assert say(made, PROMPT, sampling=Z_ONLY) == plain[1]


ALL = frozenset(("kv", "weights"))
MODES: dict[str, tuple[Sizes, dict[str, object]]] = {
    "straight under the target": (replace(SIZES, budget=0), {}),
    "under chunks": (SIZES, {}),
    "under chunks, all streamed": (SIZES, {"offload": ALL}),
    "under the cache in 4 bits": (replace(SIZES, budget=0, kv_bits=4), {"offload": frozenset(("kv",))}),
    "under weights in 4 bits": (replace(SIZES, budget=0, weight_bits=4), {}),
    "with lookups, lengths adapt": (replace(SIZES, budget=0, lookup=True, adaptive=True), {}),
}
PROMPT = random_tokens(150, seed=7)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_says_what_the_target_says_alone(folder: Path, mode: str) -> None:
    sizes, options = MODES[mode]
    best()
    with engine(folder, replace(SIZES, gamma=0, draft_gamma=0), draft=False, dtype="bf16") as made:
        expected = say(made, PROMPT)
    with engine(folder, sizes, dtype="bf16", **options) as made:
        assert "draft" in made.plan.composition.levels
        assert say(made, PROMPT) == expected
        below = made.plan.composition.inner or "target"
        assert level_stats(made, below).drafted_by["draft"] > 0 or sizes.adaptive


@pytest.mark.parametrize(
    "options",
    [
        {"gamma": 7},
        {"gamma": 0},
        {"gamma": 7, "draft_gamma": 3, "kv_bits": 4, "weight_bits": 16, "offload": ALL},
        {"gamma": 7, "draft_gamma": 3, "kv_bits": 16, "weight_bits": 4},
    ],
)
def test_planned_bytes_are_allocated_bytes_within_two_percent(folder: Path, options: dict[str, object]) -> None:
    """Of states, their checkpoints, the head and the hidden rows that it reads, too."""
    best()
    asked_for = Options(device="cpu", dtype="bf16", **options)  # type: ignore[arg-type]
    plan = plan_request(folder, folder, asked_for, num_prompt_tokens=500, max_tokens=20)
    with Engine.load(plan, folder, folder, load_tokenizer(folder, folder)) as made:
        say(made, random_tokens(500, seed=1), num_tokens=20)
        ledger = made.worker.memory.allocated()
    for tier, planned in (("device", plan.placement.device_bytes), ("host", plan.placement.host_bytes)):
        names = {*planned} - TEMPORARY - {"gathered chunks"}
        assert {*ledger[tier]} - TEMPORARY - {"gathered chunks"} == names  # type: ignore[index]
        for name in names:
            assert ledger[tier][name] == pytest.approx(planned[name], rel=0.02), name  # type: ignore[index]


@pytest.mark.usefixtures("forked_here")
def test_two_ranks_say_the_same(folder: Path) -> None:
    """The head is whole on rank 0, which has the hidden rows of all."""
    with engine(folder, replace(SIZES, gamma=0, draft_gamma=0), draft=False) as made:
        expected = say(made, PROMPT)
    best()
    plan = tiny_plan(folder, folder, replace(SIZES, budget=0), num_prompt_tokens=400, max_tokens=60, dtype="fp32")
    with tiny_engine(changed(plan, num_devices=2), folder, folder) as made:
        assert say(made, PROMPT) == expected
        assert level_stats(made, "target").drafted_by["draft"] > 0


@pytest.mark.parametrize("sizes", [replace(SIZES, budget=0), replace(SIZES, budget=0, kv_bits=4)])
def test_sequences_of_a_batch_say_what_each_says_alone(folder: Path, sizes: Sizes) -> None:
    best()
    requests = asked.some(6, seed=2, most=150, output=26)
    plan = tiny_plan(folder, folder, sizes, num_prompt_tokens=400, max_tokens=60, dtype="fp32", num_sequences=3)
    with tiny_engine(plan, folder, folder) as made:
        asked.check(made, requests)
