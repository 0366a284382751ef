"""A next-token head as a draft: its logits are those of the formula, and texts are the target's whatever it
proposes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu
from transformers import AutoModelForCausalLM

from kit.families import save_tiny
from kit.heads import FORMS, MIXTURES, SHAPES, form_of, shapes_of, with_head
from kit.models import GREEDY, TOKENIZER_SIZE, Sizes, random_tokens, tiny_engine, tiny_plan
from kit.processor import best
from kit.quantised import level_stats
from kit.stored_models import in_blocks, spread
from offload.config import next_token
from offload.config.encodings import matrices
from offload.config.next_token import head_of
from offload.config.reading import read_config
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine, load_tokenizer, plan_request
from offload.engine.request import GenerationRequest
from offload.grammar.constraint import Constraint
from offload.kv.last_hidden import LastHidden
from offload.metrics import ExpertStats
from offload.model.next_token import NextTokenLevel
from offload.model.passes import forward
from offload.plan.options import Options
from offload.transfer.memory import Memory
from offload.worker.assemble import last_hidden
from test_placement import TEMPORARY

SIZES = Sizes(
    gamma=6, draft_gamma=3, budget=64, chunk=16, window=32, any_rows=True, page=32, capacity=600, prefill_block=48
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("heads")

    @cache
    def made(name: str) -> Path:
        return with_head(save_tiny(name, root / name, tokenizer=True, **shapes_of(name)))

    return made


@pytest.fixture(scope="module")
def folder(folders: Callable[[str], Path]) -> Path:
    return folders("qwen3_5")


def engine(folder: Path, sizes: Sizes = SIZES, *, draft: bool = True, dtype: str = "fp32", **options: object) -> Engine:
    wanted = folder if draft else None
    if read_config(folder).indexer is not None:  # which leaves nothing to retrieve
        sizes = replace(sizes, budget=0)
    plan = tiny_plan(folder, wanted, sizes, num_prompt_tokens=400, max_tokens=60, dtype=dtype, **options)  # type: ignore[arg-type]
    return tiny_engine(plan, folder, wanted)


Z_ONLY = replace(GREEDY, constraint=Constraint("regex", "[x-z]+"))


class Reference:
    """transformers' model, and the head by its formula (DeepSeek-V3, arXiv 2412.19437, section 2.2), with full
    attention."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.form, self.config = form_of(folder), json.loads((folder / "config.json").read_text())
        self.weights = {_as_glms(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.form.plus_one + self.weights[f"{name}.weight"]
        return rms_norm(x, weight.shape, weight, self.config["rms_norm_eps"])

    def layer_norm(self, x: Tensor, name: str) -> Tensor:
        return self.norm(x, self.form.prefix + name)

    def product(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.weights[f"{self.form.prefix}{name}.weight"])

    @torch.inference_mode()
    def drafted(self, tokens: list[int], count: int) -> list[Tensor]:
        """The logits of `count` drafts after `tokens`, each the likeliest token, and of the last one's place: the model
        has run all but the last token."""
        hidden = self.hidden(tokens[:-1])
        text, found = list(tokens), list[Tensor]()
        for _ in range(count):
            out = self.rows(hidden, text)
            hidden = torch.cat([hidden, out[-1:]])
            last = self.mean(out[-1:], self.form.mean)[0][0] if self.form.mean else out[-1]
            found.append(self.model.lm_head(last))
            text.append(int(found[-1].argmax()))
        return found

    def hidden(self, tokens: list[int]) -> Tensor:
        """The model's hidden rows: after its final norm, or their streams before the mean that is in its place."""
        streams = list[Tensor]()
        if self.form.mean:
            mean = self.model.model.hyper_connection_mixer
            mean.register_forward_pre_hook(lambda _, given: streams.append(given[0][0]))
        hidden: Tensor = self.model.model(torch.tensor([tokens])).last_hidden_state[0]
        return streams[-1] if streams else hidden

    def mean(self, x: Tensor, prefix: str) -> tuple[Tensor, Tensor]:
        """What a part reads of streams x [n, count * hidden], and the factors of what it adds to each."""
        count = self.config["hc_count"]
        normed, one = self.norm_streams(x, f"{prefix}hc_norm"), self.weights
        low = silu(linear(normed, one[f"{prefix}input_mix_weight_down.weight"]) / count)
        mixes = linear(low, one[f"{prefix}input_mix_weight_up.weight"]).sigmoid()
        factors = x.new_empty(0)
        if f"{prefix}block_inject_weight.weight" in one:
            factors = 2 * (linear(normed, one[f"{prefix}block_inject_weight.weight"]) / count).sigmoid()
        return (mixes * normed).unflatten(1, (count, -1)).mean(1), factors

    def norm_streams(self, x: Tensor, name: str) -> Tensor:
        streams = x.unflatten(1, (self.config["hc_count"], -1))
        plain = rms_norm(streams, streams.shape[2:], None, self.config["rms_norm_eps"]).flatten(1)
        return plain * (1 + self.weights[f"{name}.weight"])

    def streamed(self, hidden: Tensor, tokens: list[int]) -> Tensor:
        """The streams of all rows after the head's layer."""
        embedded = self.model.model.embed_tokens(torch.tensor(tokens[1:]))
        of_embedding, of_hidden = self.form.norms
        first = linear(self.norm(embedded, of_embedding), self.weights[f"{self.form.join}.weight"])
        streams = self.norm_streams(hidden, of_hidden).unflatten(1, (self.config["hc_count"], -1))
        x = (linear(streams, self.weights[f"{self.form.join_hidden}.weight"]) + first[:, None]).flatten(1)
        for name, part in (("attn", self.attention), ("mlp", self.mixture)):
            read, factors = self.mean(x, f"{self.form.prefix}{name}_hyper_connection.")
            x = x + (part(read)[:, None] * factors[:, :, None]).flatten(1)
        return x

    def rows(self, hidden: Tensor, tokens: list[int]) -> Tensor:
        """The normed outputs of all rows: of each but the last token, joined with the one after it. Of streams their
        sums as they are."""
        if self.form.mean:
            return self.streamed(hidden, tokens)
        embedded = self.model.model.embed_tokens(torch.tensor(tokens[1:]))
        of_embedding, of_hidden, of_output = self.form.norms
        rows = torch.cat([self.norm(embedded, of_embedding), self.norm(hidden, of_hidden)], 1)
        x = linear(rows, self.weights[f"{self.form.join}.weight"])
        x = x + self.attention(self.layer_norm(x, "input_layernorm"))
        inner = self.layer_norm(x, "post_attention_layernorm")
        mixes = f"{self.form.prefix}mlp.gate.weight" in self.weights
        return self.norm(x + (self.mixture(inner) if mixes else self.network(inner, "mlp.")), of_output)

    def network(self, x: Tensor, name: str) -> Tensor:
        inner = silu(self.product(x, f"{name}gate_proj")) * self.product(x, f"{name}up_proj")
        return self.product(inner, f"{name}down_proj")

    def mixture(self, x: Tensor) -> Tensor:
        scores, correction = self.product(x, "mlp.gate"), f"{self.form.prefix}mlp.gate.e_score_correction_bias"
        if correction in self.weights:  # GLM's
            marks = scores.sigmoid()
            chosen = self.among_groups(marks + self.weights[correction]).topk(self.num_used)[1]
            factor, beside = self.config["routed_scaling_factor"], self.network(x, "mlp.shared_experts.")
        else:
            marks = scores.softmax(1)
            chosen = marks.topk(self.num_used)[1]
            factor = 1.0
            beside = self.network(x, "mlp.shared_expert.") * self.product(x, "mlp.shared_expert_gate").sigmoid()
        weights = marks.gather(1, chosen)
        weights = factor * weights / weights.sum(1, keepdim=True)
        for row, experts in enumerate(chosen.tolist()):
            for expert, weight in zip(experts, weights[row], strict=True):
                beside[row] += weight * self.network(x[row], f"mlp.experts.{expert}.")
        return beside

    @property
    def num_used(self) -> int:
        return int(self.config.get("num_experts_per_tok") or self.config["num_experts_per_token"])

    def among_groups(self, ranks: Tensor) -> Tensor:
        """Ranks of experts, -inf in all but the best groups, by the sums of their two best."""
        count = self.config.get("num_expert_group", 1)
        if count == 1:
            return ranks
        groups = ranks.unflatten(1, (count, -1))
        best = groups.topk(2, 2)[0].sum(2).topk(self.config["topk_group"])[1]
        outside = torch.ones(len(ranks), count, 1).scatter(1, best[..., None], 0).bool()
        return groups.masked_fill(outside, -torch.inf).flatten(1)

    def attention(self, x: Tensor) -> Tensor:
        if "kv_lora_rank" in self.config:
            out = attended(*self.latent(x))
            if f"{self.form.prefix}self_attn.g_proj.weight" in self.weights:  # Ling's
                gate = self.product(x, "self_attn.g_proj").sigmoid()
                out = (out.unflatten(1, (gate.shape[1], -1)) * gate[..., None]).flatten(1)
            return self.product(out, "self_attn.o_proj")
        heads, dim = self.config["num_attention_heads"], self.config["head_dim"]
        q = self.product(x, "self_attn.q_proj").unflatten(1, (heads, -1))
        q, gate = q[..., :dim], q[..., dim:]  # Qwen's
        k, v = (self.product(x, f"self_attn.{each}_proj").unflatten(1, (-1, dim)) for each in "kv")
        q, k = self.layer_norm(q, "self_attn.q_norm"), self.layer_norm(k, "self_attn.k_norm")
        q, k = (self.rotated(each) for each in (q, k))
        k, v = (each.repeat_interleave(heads // each.shape[1], 1) for each in (k, v))
        out = attended(q, k, v)
        return self.product(out * gate.flatten(1).sigmoid() if gate.numel() else out, "self_attn.o_proj")

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Heads' queries, keys and values, which are products with low-rank rows."""

        def low(rows: Tensor, name: str) -> Tensor:
            weight = self.weights[f"{self.form.prefix}self_attn.{name}_a_layernorm.weight"]
            return self.product(rms_norm(rows, weight.shape, weight, 1e-6), f"self_attn.{name}_b_proj").unflatten(
                1, (self.config["num_attention_heads"], -1)
            )

        def turned(rows: Tensor) -> Tensor:
            return self.rotated(torch.cat([rows[..., ::2], rows[..., 1::2]], -1))

        rank, plain = self.config["kv_lora_rank"], self.config["qk_nope_head_dim"]
        row = self.product(x, "self_attn.kv_a_proj_with_mqa")
        both = low(row[:, :rank], "kv")
        if self.config.get("q_lora_rank"):
            q = low(self.product(x, "self_attn.q_a_proj"), "q")
        else:
            q = self.product(x, "self_attn.q_proj").unflatten(1, (both.shape[1], -1))
        shared = turned(row[:, None, rank:]).expand(-1, both.shape[1], -1)
        q, k = torch.cat([q[..., :plain], turned(q[..., plain:])], -1), torch.cat([both[..., :plain], shared], -1)
        return q, k, both[..., plain:]

    def rotated(self, x: Tensor) -> Tensor:
        rope = self.config["rope_parameters"]
        rotated = int(x.shape[2] * rope.get("partial_rotary_factor", 1.0))
        angles = torch.arange(len(x))[:, None] / rope["rope_theta"] ** (torch.arange(0, rotated, 2) / rotated)
        cos, sin = (torch.cat([each, each], 1)[:, None] for each in (angles.cos(), angles.sin()))
        first, rest = x[..., :rotated], x[..., rotated:]
        half = torch.cat([-first[..., rotated // 2 :], first[..., : rotated // 2]], 2)
        return torch.cat([first * cos + half * sin, rest], 2)


def _as_glms(name: str) -> str:
    """The name that a GLM's checkpoint would have for a tensor of Ling 3."""
    name = name.replace(".attention.", ".self_attn.").replace(".dense.", ".o_proj.")
    return name.replace("gate.expert_bias", "gate.e_score_correction_bias")


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[T, H, D] each -> [T, H * D]."""
    scores = torch.einsum("thd,shd->hts", q, k) / q.shape[2] ** 0.5
    scores += torch.full(scores.shape[1:], -torch.inf).triu(1)
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1)


@pytest.mark.few(3)
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_drafts_have_the_logits_of_the_formula(folders: Callable[[str], Path], name: str, streams: bool) -> None:
    """Of the first draft after any number of verified tokens, and of drafts after drafts. Where experts stream, there
    are fewer slots than a token has experts."""
    folder, tokens = folders(name), random_tokens(30, seed=4)
    reference = Reference(folder)
    with engine(folder, offload=frozenset(("weights",)) if streams else frozenset()) as made:
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


def head_logits(folder: Path) -> Tensor:
    """Of the head after some drafts of which two were rejected."""
    tokens = random_tokens(30, seed=4)
    with engine(folder) as made:
        target, level = made.worker.levels["target"], made.worker.levels["draft"]
        assert isinstance(level, NextTokenLevel)
        made.worker.prefill(tokens[:17], lambda count: None)
        forward(target, [*tokens[17:20], 1, 2], 1)
        for each in (target, level):
            each.truncate(20)
        return forward(level, tokens[level.length : 21], 1)[0, :TOKENIZER_SIZE].clone()


def test_a_wrappers_head_is_the_one_of_its_text(tmp_path: Path) -> None:
    """Of GLM-4.5V's form, where it is a layer of the body."""
    plain = with_head(save_tiny("glm4_moe", tmp_path / "plain", tokenizer=True, **SHAPES, use_qk_norm=False))
    shutil.copytree(plain, folder := tmp_path / "wrapped")
    tensors = load_file(plain / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((plain / "config.json").read_text()) | {"model_type": "glm4v_moe_text"}
    (folder / "config.json").write_text(json.dumps({"model_type": "glm4v_moe", "text_config": text}))
    assert read_config(folder).next_token is not None
    assert torch.equal(head_logits(folder), head_logits(plain))


def stacked(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """With one tensor for each matrix of all experts in the layers whose names begin so."""
    apart = {name: each for name, each in tensors.items() if name.startswith(prefix) and ".experts." in name}
    found = {name: each for name, each in tensors.items() if name not in apart}
    for layer in dict.fromkeys(name.partition(".experts.")[0] for name in apart):

        def every(part: str, layer: str = layer) -> Tensor:
            count = sum(f"{part}_proj" in name for name in apart if name.startswith(f"{layer}."))
            return torch.stack([apart[f"{layer}.experts.{number}.{part}_proj.weight"] for number in range(count)])

        found[f"{layer}.experts.gate_up_proj"] = torch.cat([every("gate"), every("up")], 1)
        found[f"{layer}.experts.down_proj"] = every("down")
    return found


@pytest.mark.few(3)
@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("which", ["its own", "the model's", "both"])
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_may_be_in_one_tensor_of_a_layer(
    folders: Callable[[str], Path], tmp_path: Path, name: str, which: str, files: int
) -> None:
    """The head's, the layers', or both: quantised folders have layers by expert and their head as it was."""
    folder, form = tmp_path / "stacked", FORMS[name]
    shutil.copytree(folders(name), folder)
    tensors = load_file(folder / "model.safetensors")
    head = {part: each for part, each in tensors.items() if part.startswith((form.prefix, "mtp."))}
    rest = {part: each for part, each in tensors.items() if part not in head}
    head = head if which == "the model's" else stacked(head, "")
    rest = rest if which == "its own" else stacked(rest, "")
    (folder / "model.safetensors").unlink()
    save_parts(folder, [head | rest] if files == 1 else [head, rest])
    assert torch.equal(head_logits(folder), head_logits(folders(name)))


def save_parts(folder: Path, parts: list[dict[str, Tensor]]) -> None:
    """The tensors in one file or in several."""
    if len(parts) == 1:
        save_file(parts[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    for number, tensors in enumerate(parts):
        save_file(tensors, folder / f"{number}.safetensors", metadata={"format": "pt"})
    index = {name: f"{number}.safetensors" for number, tensors in enumerate(parts) for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.mark.few(2)
@pytest.mark.parametrize("is_left", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_a_heads_matrices_are_stored_as_quantization_config_says(tmp_path: Path, name: str, is_left: bool) -> None:
    """Among those that are left as plain numbers or not. What joins a row is always plain."""
    wide_experts = () if name == "qwen3_5" else ("moe", "shared_expert") if name.startswith("qwen3") else ("moe",)
    sizes = {f"{part}_intermediate_size": 128 for part in wide_experts}
    folder = with_head(save_tiny(name, tmp_path / "plain", tokenizer=True, **shapes_of(name), **sizes))
    config = read_config(folder)
    head = head_of(config)
    assert head is not None
    every = matrices(config) | ({} if is_left else matrices(head))
    tensors, stored = load_file(folder / "model.safetensors"), dict[str, Tensor]()
    for part in every.keys() - {config.names.embeddings, config.names.head}:
        numbers, scales = in_blocks(tensors[part], 128).values()
        tensors[part] = numbers.float() * spread(scales, 128, numbers)
        stored |= {part: numbers, part.replace(".weight", ".weight_scale_inv"): scales}
    shutil.copytree(folder, quantised := tmp_path / "fp8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors | stored, quantised / "model.safetensors", metadata={"format": "pt"})
    left = ["lm_head", *([FORMS[name].prefix.removesuffix(".")] if is_left else [])]
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": left}
    fields = json.loads((folder / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps(fields | {"quantization_config": fp8}))
    found = read_config(quantised).next_token
    assert found is not None
    kinds = {each.partition("/")[0] for each in filter(None, found.encodings.every)}  # some rows have fewer numbers
    assert (kinds == {"FP8_F32"}) is not is_left
    torch.testing.assert_close(head_logits(quantised), head_logits(folder), rtol=0, atol=2e-4)


def ring_of(window: int, slack: int = 7) -> LastHidden:
    memory = Memory(torch.device("cpu"))
    return LastHidden(memory, hidden_size=4, dtype=torch.float32, sinks=4, window=window, slack=slack)


@pytest.mark.parametrize("window", [1, 5, 23])
@pytest.mark.parametrize("length", [0, 3, 9, 40, 50])
def test_hidden_rows_are_copied_between_rings_of_any_sizes(window: int, length: int) -> None:
    """A chat's engine for a longer context may draft otherwise, and has another ring then."""
    rows = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
    source, copied = ring_of(5), ring_of(window)
    for start in range(0, 50, 7):
        source.write(start, rows[start : start + 7])
    copied.copy_from(source, length)
    assert copied.length == length
    first = max(source.oldest, length - 2 * (window + 7))
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


PROMPT = random_tokens(150, seed=7)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MIXTURES)
def test_a_heads_experts_are_in_slots_where_the_targets_are(folders: Callable[[str], Path], name: str) -> None:
    """In slots of its own, and its hits, misses and bytes are counted."""
    best()
    with engine(folders(name), replace(SIZES, budget=0), offload=frozenset(("weights",))) as made:
        say(made, PROMPT)
        target, head = (made.worker.models.decoders[role].weights.streamed_experts for role in ("target", "draft"))
        [own] = head
        assert own not in target
        assert len(own.bank.places) == made.plan.placement.expert_slots == 2
        assert level_stats(made, "draft").link_bytes >= own.stats.fetched_bytes > 0  # streamed layers cross meanwhile
        assert made.worker.link_stats.experts == sum((each.stats for each in (*target, own)), start=ExpertStats())
    with engine(folders(name), replace(SIZES, budget=0)) as made:
        assert not made.worker.models.decoders["draft"].weights.streamed_experts
        assert not made.worker.models.decoders["draft"].streams


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "options",
    [
        {"gamma": 7},
        {"gamma": 0},
        {"gamma": 7, "draft_gamma": 3, "kv_bits": 4, "weight_bits": 16, "offload": frozenset(("kv", "weights"))},
        {"gamma": 7, "draft_gamma": 3, "kv_bits": 16, "weight_bits": 4},
        {"gamma": 7, "offload": frozenset(("weights",))},
    ],
)
@pytest.mark.parametrize("name", FORMS)
def test_planned_bytes_are_allocated_bytes_within_two_percent(
    folders: Callable[[str], Path], name: str, options: dict[str, object]
) -> None:
    """Of states, their checkpoints, the head, its experts and the hidden rows that it reads, too."""
    if options.get("weight_bits") == 4 and name in MIXTURES:
        pytest.skip("there is no copy of experts in fewer bits")
    if options.get("kv_bits") == 4 and name == "qwen4_exp":
        pytest.skip("there is no copy of a cache that an index chooses from")
    best()
    folder = folders(name)
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


def test_drafts_after_a_pass_whose_rows_all_stay_overwrite_no_row_that_counts() -> None:
    """A ring of a long draft took rows of rejected ones for the model's."""
    gamma, rows, window, sinks = 64, 16, 240, 16
    plan = SimpleNamespace(
        composition=SimpleNamespace(gamma=gamma, draft_gamma=4, sinks=sinks, window=window, draft=True),
        placement=SimpleNamespace(rows=rows),
        request=SimpleNamespace(dtype="fp32"),
    )
    head = SimpleNamespace(config=SimpleNamespace(reads_hidden=True, assistant=None, row_size=1))
    hidden = last_hidden(plan, head, Memory(torch.device("cpu")))  # type: ignore[arg-type]
    assert hidden is not None
    numbered = torch.arange(1.0, 4000.0)[:, None]
    hidden.write(0, numbered[:2500])
    length = 2500
    for _ in range(4):
        hidden.write(length, numbered[length : length + gamma + 1])
        length += gamma + 1
        hidden.write_drafted(length, -numbered[length : length + gamma + 4])
        hidden.truncate(length)
    stop = hidden.oldest + window
    kept = hidden.reachable(stop - rows, stop)
    hidden.truncate(kept)
    assert torch.equal(hidden.read(stop - window, kept), numbered[stop - window : kept])
