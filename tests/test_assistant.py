"""Gemma 4's assistants: drafts without a cache, whose logits are those of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kit.assistants import keeping_keys, random_assistant, save_assistant
from kit.contract import CONTEXT, DRAFTED, PLAIN, fields_of, say
from kit.families import TINY, random_tiny, save_tiny
from kit.models import CPU, Sizes, kernels_of, load, random_tokens, scorings_of, target_cache
from kit.quantised import engine_of, level_stats
from offload.config.reading import read_config
from offload.errors import ModelError, UsageError
from offload.kv.last_hidden import LastHidden
from offload.kv.mixed import MixedCache
from offload.model.assistant import AssistantDecoder, AssistantLevel, TargetKeys
from offload.model.level import Level
from offload.model.passes import forward
from offload.plan.planner import Options
from offload.plan.request import Request
from offload.transfer.memory import Memory
from offload.weights.assistant import load_assistant
from offload.weights.checkpoint import Checkpoint, check_model
from test_parity import assert_same_logits

SIZES = Sizes(capacity=60, prefill_block=7)
TARGETS = ("gemma4", "gemma4, inputs of layers", "gemma4, sparse")
ON_CPU = torch.device("cpu")


def _levels(target: Path, assistant: Path) -> tuple[Level, AssistantLevel]:
    decoder, memory = load(target), Memory(ON_CPU)
    config = read_config(assistant)
    with Checkpoint.open(assistant) as checkpoint:
        check_model(checkpoint, config)
        own = load_assistant(checkpoint, config, memory, dtype=torch.float32, on_bytes=lambda _: None)
    draft = AssistantDecoder(config, own, decoder, kernels_of(decoder))
    cache = target_cache(decoder, SIZES)
    assert isinstance(cache, MixedCache)
    assert cache.windows is not None
    size = decoder.config.hidden_size
    hidden = LastHidden(memory, hidden_size=size, dtype=torch.float32, sinks=0, window=1, slack=16)
    keys = TargetKeys(config, cache.growing, cache.windows, scorings_of(draft, SIZES.capacity))  # type: ignore[arg-type]
    full = Level("target", decoder, cache, vocab_size=decoder.config.vocab_size, block=SIZES.block, hidden=hidden)
    width = decoder.config.vocab_size
    return full, AssistantLevel("draft", draft, cache.growing, keys, hidden, vocab_size=width)  # type: ignore[arg-type]


@torch.inference_mode()
def _theirs(target: str, tokens: list[int], drafted: list[int], *, clusters: bool) -> list[Tensor]:
    """transformers' logits after the last of `tokens`, which the target has not run, and after each drafted one."""
    draft = random_assistant(target, clusters=clusters)
    with keeping_keys():
        model = random_tiny(target)
    ran = model(
        torch.tensor([tokens[:-1]]), output_hidden_states=True, return_shared_kv_states=True,
        logits_to_keep=torch.arange(len(tokens) - 1),
    )  # fmt: skip
    window, held = draft.config.text_config.sliding_window, dict(ran.shared_kv_states)
    near = tuple(each[:, :, -window:] for each in held["sliding_attention"])
    hidden, found = ran.hidden_states[-1][:, -1:], list[Tensor]()
    for token in (tokens[-1], *drafted):
        embedded = model.get_input_embeddings()(torch.tensor([[token]]))
        out = draft(
            inputs_embeds=torch.cat([embedded, hidden], -1), position_ids=torch.tensor([[len(tokens) - 1]]),
            shared_kv_states=held | {"sliding_attention": near},
        )  # fmt: skip
        found.append(out.logits[0])
        hidden = out.last_hidden_state
    return found


@pytest.mark.parametrize("clusters", [False, True])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.few(4)
def test_logits_of_a_rounds_drafts_are_those_of_transformers(tmp_path: Path, target: str, clusters: bool) -> None:
    """Also after rows of the target that were rejected, and beyond a window."""
    folders = save_tiny(target, tmp_path / "target"), save_assistant(target, tmp_path / "draft", clusters=clusters)
    tokens, drafted = random_tokens(34), [5, 71]
    full, draft = _levels(*folders)
    for length in (8, 33):
        start = full.length
        if start:
            forward(full, [0, 1, 2, 3], 1)
            full.truncate(start)
        forward(full, tokens[start:length], 1)
        draft.truncate(length)
        assert draft.length == length
        ours = [forward(draft, [token], 1) for token in (tokens[length], *drafted)]
        theirs = _theirs(target, tokens[: length + 1], drafted, clusters=clusters)
        assert_same_logits(torch.cat(ours), torch.cat(theirs))
        assert full.length == length
        draft.truncate(length)


@pytest.mark.parametrize("target", TARGETS[:2])
def test_with_an_assistant_the_target_says_what_it_says_alone(tmp_path: Path, target: str) -> None:
    fields = fields_of(target)
    folder = save_tiny(target, tmp_path / "target", tokenizer=True, **fields)
    pair = folder, save_assistant(target, tmp_path / "draft", tokenizer=True, clusters=True, **fields)
    with engine_of((folder, folder), PLAIN, prompt_tokens=CONTEXT) as engine:
        alone = say(engine)
    for sizes in (replace(DRAFTED, budget=0, draft_gamma=0), DRAFTED):
        with engine_of(pair, replace(sizes, draft_gamma=max(sizes.draft_gamma, 1)), prompt_tokens=CONTEXT) as engine:
            assert say(engine) == alone
            assert level_stats(engine, "draft").rows > 4


def test_an_assistant_is_for_its_own_target_alone(tmp_path: Path) -> None:
    save_assistant("gemma4", tmp_path)
    draft, target, other = (
        read_config(tmp_path),
        read_config(save_tiny("gemma4", tmp_path / "target")),
        "gemma4, sparse",
    )
    others = read_config(save_tiny(other, tmp_path / "other", hidden_size=64))

    def plan(*models: object, options: Options) -> None:
        Request(*models, options, CPU).plan(num_prompt_tokens=100, max_tokens=20)  # type: ignore[arg-type]

    plan(target, draft, options=Options())
    for models, options, words in (
        ((others, draft), Options(), "for another target: it reads hidden rows of 32 numbers"),
        ((draft, None), Options(), "gemma4_assistant is no model by itself"),
        ((target, draft), Options(offload=frozenset({"kv"}), gamma=3), "reads the target's keys on the device"),
    ):
        with pytest.raises(UsageError) as caught:
            plan(*models, options=options)
        assert words in str(caught.value)


def test_an_order_of_tokens_has_each_once(tmp_path: Path) -> None:
    model = random_assistant("gemma4", clusters=True)
    model.masked_embedding.token_ordering[0] = int(model.masked_embedding.token_ordering[1])
    model.save_pretrained(tmp_path)
    with Checkpoint.open(tmp_path) as checkpoint, pytest.raises(ModelError, match="is no order of all 96 tokens"):
        load_assistant(checkpoint, read_config(tmp_path), Memory(ON_CPU), dtype=torch.float32, on_bytes=lambda _: None)
    assert TINY["gemma4"].family == "gemma4_text"
