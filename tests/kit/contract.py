"""Tiny models under one contract (test_contract.py): how each is made, the modes that it is decoded in, and what it
says by itself. No tests in here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from kit import heads
from kit.families import GEMMA4_ROPES, TINY, Tiny, save_tiny
from kit.gguf_models import write_gguf
from kit.models import GREEDY, SMALL, TOKENIZER_SIZE, Sizes, random_model, random_tokens, save
from kit.quantised import DRAFTED as IN_SHORT_BLOCKS
from kit.quantised import engine_of, saved
from kit.stored_models import FORMS, GGUF, RELEASED, by_expert, store, twin
from offload.config.model import ModelConfig
from offload.config.reading import read_config
from offload.engine.engine import Engine
from offload.engine.request import GenerationRequest
from offload.formats.layout import takes_codes

Pair = tuple[Path, Path]  # target and draft
Mode = tuple[Sizes, frozenset[str]]  # sizes of the levels, and what is streamed
Kind = str | Callable[[str], str]  # of a GGUF file's tensors, or of each by its name

PROMPT, NUM_NEW, CONTEXT = random_tokens(150, seed=7), 26, 400
DRAFTED = replace(IN_SHORT_BLOCKS, prefill_block=48, expert_rows=96)
PLAIN = replace(DRAFTED, gamma=0, draft_gamma=0)
MODES: dict[str, Mode] = {
    "draft and retrieval": (DRAFTED, frozenset()),
    "draft and retrieval, all streamed": (DRAFTED, frozenset(("kv", "weights"))),
    "cache in 4 bits": (replace(DRAFTED, budget=0, kv_bits=4, draft_gamma=0), frozenset(("kv",))),
    "weights in 4 bits": (replace(DRAFTED, budget=0, weight_bits=4, draft_gamma=0), frozenset(("weights",))),
    "both in few bits": (replace(DRAFTED, budget=0, weight_bits=6, kv_bits=4), frozenset(("kv", "weights"))),
    "lookups": (replace(DRAFTED, budget=0, draft_gamma=0, lookup=True), frozenset(("weights",))),
}


@dataclass(frozen=True)
class Model:
    """A tiny model. make: writes it and its draft into a folder. twin: writes another checkpoint of the numbers in
    `target` into a folder; None: there is none."""

    make: Callable[[Path], Pair]
    twin: Callable[[Path, Path], Path] | None = None


# Families, as folders of plain numbers. Matrices and heads are whole groups of codes; Phi's heads are as many as divide
# its rows.
SHAPES: dict[str, object] = {
    "vocab_size": 264, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 8,
    "head_dim": 16, "max_position_embeddings": 1024,
}  # fmt: skip
LONG_FACTORS = {"short_factor": [1.0 + i / 8 for i in range(6)], "long_factor": [1.5 + i for i in range(6)]}
OTHERS = (
    *("nemotron_h, dense", "nemotron_h, latents", "granitemoehybrid, dense", "deepseek_v3, dense"),
    *("hunyuan", "phi3, short", "phi3, long", "cohere, normed"),
    *("gemma4", "gemma4, one layout", "gemma4, shared caches", "gemma4, inputs of layers", "gemma4, sparse"),
    "gemma4_unified",
    *("mistral, a window", "qwen2, windows", "exaone4, windows", "gemma3", "starcoder2, a window"),
    "laguna, of full width",
)


def _larger(tiny: Tiny) -> dict[str, object]:
    """Fields of a family's own that grow with the model."""
    grown: dict[str, object] = {}
    if "sliding_window" in tiny.fields and tiny.fields["sliding_window"] is not None:
        grown["sliding_window"] = 45
    if "linear_num_value_heads" in tiny.fields:
        grown |= {"linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    if "mamba_num_heads" in tiny.fields:
        grown |= {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2}
    if "mamba_n_heads" in tiny.fields:
        grown |= {"mamba_n_heads": 16, "mamba_d_state": 16, "mamba_n_groups": 2}
    if "kv_lora_rank" in tiny.fields:
        grown |= {
            "num_key_value_heads": 8, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
        }  # fmt: skip
        grown |= {"q_lora_rank": 64} if isinstance(tiny.fields["q_lora_rank"], int) else {}
    if "mamba_d_ssm" in tiny.fields:
        grown["mamba_d_ssm"] = 256
    if "global_head_dim" in tiny.fields:
        grown["global_head_dim"] = 16 if tiny.fields["global_head_dim"] == SMALL["head_dim"] else 32
    if tiny.fields.get("hidden_size_per_layer_input"):
        grown |= {"hidden_size_per_layer_input": 128, "vocab_size_per_layer_input": SHAPES["vocab_size"]}
    rope = tiny.fields.get("rope_parameters")
    if isinstance(rope, dict) and "short_factor" in rope:
        grown["rope_parameters"] = rope | LONG_FACTORS
    for key, given in tiny.fields.items():
        if isinstance(given, dict) and "mrope_section" in given:  # half as many as a head's numbers that rotate
            grown[key] = given | {"mrope_section": [2 * size for size in given["mrope_section"]]}
    return grown


GROWN = {name: _larger(tiny) for name, tiny in TINY.items() if name == tiny.family or tiny.wrapped or name in OTHERS}


def fields_of(name: str) -> dict[str, Any]:
    """The fields of a family's model here."""
    return {key: value for key, value in SHAPES.items() if TINY[name].fields.get(key) is not ...} | GROWN[name]


def _family(name: str, root: Path) -> Pair:
    """States are no draft's."""
    target = save_tiny(name, root / "target", tokenizer=True, **fields_of(name))
    draft = "olmo2" if read_config(target).stateful else name
    fields = SHAPES if draft != name else fields_of(name)
    return target, save_tiny(draft, root / "draft", tokenizer=True, noise=0.02, **fields)


def _headed(name: str, root: Path) -> Pair:
    """The model's next-token head is its draft."""
    target = heads.with_head(save_tiny(name, root / "target", tokenizer=True, **heads.shapes_of(name)))
    return target, target


# Quantised checkpoints.


def _plain_twin(target: Path, root: Path) -> Path:
    return twin(target, root / "twin", torch.float32)


def _stored(form: str, root: Path) -> Pair:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64} if form in GGUF else {}
    target, draft = (store(folder, form) for folder in saved(root, **sizes))
    return target, draft


MIXTURE = {**SHAPES, "hidden_size": 256, "head_dim": 64}


def _stored_mixture(form: str, root: Path) -> Pair:
    fields = {**MIXTURE, "moe_intermediate_size": 512 if form in GGUF else 128}
    made = (
        store(save_tiny("qwen3_moe", root / name, tokenizer=True, noise=noise, **fields), form)
        for name, noise in (("target", 0.0), ("draft", 0.02))
    )
    return next(made), next(made)


def _mixture_twin(target: Path, root: Path) -> Path:
    return by_expert(_plain_twin(target, root))


# GGUF files of families with states, experts and windows. Matrices are whole blocks of 256 inputs, half of them too; of
# Gemma 4 without experts blocks of 32.
WIDE: dict[str, object] = {
    "vocab_size": TOKENIZER_SIZE, "hidden_size": 256, "intermediate_size": 512, "head_dim": 128,
    "max_position_embeddings": 1024,
}  # fmt: skip
STATES = {
    "head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 12, "linear_key_head_dim": 32,
    "linear_value_head_dim": 128,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 512}
NARROW = {
    **WIDE, "hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "rope_parameters": GEMMA4_ROPES,
    "tie_word_embeddings": False,
}  # fmt: skip
LOW = {key: value for key, value in WIDE.items() if key != "head_dim"} | {
    "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64,
}  # fmt: skip
FILES: dict[str, dict[str, object]] = {
    "qwen3_5": {**WIDE, **STATES},
    "gpt_oss": WIDE,
    "qwen3_5_moe": {
        **WIDE, **EXPERTS, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
        "linear_value_head_dim": 128, "shared_expert_intermediate_size": 512,
    },
    "qwen3_next": {
        **WIDE, **EXPERTS, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
        "linear_value_head_dim": 128, "shared_expert_intermediate_size": 512,
    },
    "qwen4_exp, n-grams": {
        **WIDE, **EXPERTS, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 32,
        "linear_value_head_dim": 128, "shared_expert_intermediate_size": 512, "hc_lowrank": 64,
        "indexer_head_dim": 64, "indexer_budget": 16, "ple_embed_dim": 256,
    },
    "glm4_moe": {**WIDE, **EXPERTS},
    "nemotron_h": {
        **WIDE, **EXPERTS, "mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 32,
        "moe_shared_expert_intermediate_size": 512,
    },
    "granitemoehybrid": {
        **{key: value for key, value in WIDE.items() if key != "head_dim"}, "mamba_n_heads": 8, "mamba_d_head": 64,
        "mamba_n_groups": 2, "shared_intermediate_size": 512,
    },
    "minimax_m2": WIDE,
    "glm4_moe_lite": {**LOW, **EXPERTS, "q_lora_rank": 64},
    "kimi_linear": {
        **LOW, **EXPERTS, "q_lora_rank": None, "linear_head_dim": 32, "linear_num_heads": 4,
    },
    "bailing_hybrid": {**LOW, **EXPERTS, "head_dim": 64},
    "ernie4_5_moe": {**WIDE, **EXPERTS},
    "exaone_moe": {**WIDE, **EXPERTS, "sliding_window": 45},
    "lfm2": {**WIDE, "hidden_size": 512, "block_multiple_of": 512},
    "lfm2_moe": {**WIDE, **EXPERTS},
    "afmoe": {**WIDE, **EXPERTS, "sliding_window": 45},
    "laguna": {
        **WIDE, **EXPERTS, "sliding_window": 45, "shared_expert_intermediate_size": 512,
        "moe_router_logit_softcapping": 0.0,
    },
    "cohere2_moe": {**WIDE, "sliding_window": 45, "prefix_dense_intermediate_size": 512},
    "gemma4, sparse": {**WIDE, **EXPERTS, "head_dim": 64, "global_head_dim": 128, "rope_parameters": GEMMA4_ROPES},
    "gemma4": {**NARROW, "global_head_dim": 64, "num_global_key_value_heads": 2},
    "gemma4, inputs of layers": {
        **NARROW, "global_head_dim": 64, "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": TOKENIZER_SIZE,
    },
    "gemma4_unified": {**NARROW, "global_head_dim": 64},
}  # fmt: skip
MIXED = {"out_proj": "Q6_K", "v_proj": "Q5_K", "in_proj_qkv": "Q4_K", "in_proj_z": "F16"}
FLASH = "qwen4_exp, n-grams"
FLASH_PARTS = ("hyper_connection", "indexer", "ple_embedding", "key_proj")
KINDS: dict[str, Kind] = {
    **{kind: kind for kind in ("F32", "F16", "Q8_0", "Q4_0")},
    "Q4_K and others": lambda name: next((kind for part, kind in MIXED.items() if part in name), "Q8_0"),
    "Q4_K experts": lambda name: (
        "Q8_0" if "experts" not in name else "Q6_K" if "down_proj" in name or ".w2." in name else "Q4_K"
    ),
    "IQ4_NL and others": lambda name: (
        "Q4_0" if "experts" in name else "IQ4_NL" if any(part in name for part in FLASH_PARTS) else "Q8_0"
    ),
    "MXFP4 experts": lambda name: "MXFP4" if ".experts." in name else "Q8_0",
}
KINDS_OF = {
    "qwen3_5": ("F32", "Q8_0", "Q4_K and others"),
    "gpt_oss": ("Q8_0", "Q4_K experts", "MXFP4 experts"),
    "qwen3_5_moe": ("Q8_0", "Q4_K experts"),
    "qwen3_next": ("Q8_0", "Q4_K experts"),
    "qwen4_exp, n-grams": ("F32", "Q8_0", "Q4_K experts", "IQ4_NL and others"),
    "glm4_moe": ("Q8_0", "Q4_K experts"),
    **dict.fromkeys(("minimax_m2", "lfm2_moe", "afmoe"), ("Q8_0",)),
    "nemotron_h": ("Q8_0", "Q4_K experts"),
    "granitemoehybrid": ("Q4_K experts",),
    "glm4_moe_lite": ("Q8_0", "Q4_K experts"),
    "kimi_linear": ("F32", "Q8_0", "Q4_K experts"),
    "bailing_hybrid": ("Q8_0", "Q4_K experts"),
    **dict.fromkeys(("ernie4_5_moe", "exaone_moe", "laguna", "cohere2_moe"), ("Q4_K experts",)),
    "lfm2": ("F32", "Q8_0", "Q4_K and others"),
    **dict.fromkeys(("gemma4, sparse", "gemma4", "gemma4_unified"), ("F16", "Q8_0", "Q4_0")),
    "gemma4, inputs of layers": ("F16", "Q4_0"),
}


def _file(name: str, kind: str, root: Path) -> Pair:
    """The model drafts for itself, but a model with states for none."""
    folder = save_tiny(name, root / "folder", tokenizer=True, **FILES[name])
    write_gguf(folder, file := root / "target.gguf", kind=KINDS[kind])
    return file, _other_draft(root) if read_config(file).stateful else file


def _other_draft(root: Path) -> Path:
    draft = random_model("qwen2", vocab_size=TOKENIZER_SIZE, max_position_embeddings=1024)
    return save(draft, root / "draft", tokenizer=True)


def _stored_states(name: str, form: str, root: Path) -> Pair:
    """A quantised folder: of Qwen3-Next, in which rows of each key head are together, or of layers of one part."""
    folder = save_tiny(name, root / "target", tokenizer=True, **FILES[name])
    return store(folder, form), _other_draft(root)


def _released(form: str, root: Path) -> Pair:
    """Qwen3.8-Flash-Next as it is published; its next-token head is its draft."""
    folder = save_tiny(FLASH, root / "target", tokenizer=True, **FILES[FLASH])
    target = store(heads.with_head(folder), form)
    return target, target


def _file_twin(name: str, kind: str, target: Path, root: Path) -> Path:
    """A file of the same numbers in F32."""
    root.mkdir(parents=True, exist_ok=True)
    numbers = write_gguf(target.parent / "folder", root / "same.gguf", kind=KINDS[kind])
    write_gguf(target.parent / "folder", root / "twin.gguf", numbers=numbers)
    return root / "twin.gguf"


QUANTISED = ("qwen3_next", "nemotron_h", "kimi_linear", "bailing_hybrid")
MODELS: Mapping[str, Model] = {
    **{name: Model(partial(_family, name)) for name in GROWN},
    **{f"{name} with its head": Model(partial(_headed, name)) for name in heads.FORMS},
    **{f"qwen2 in {form}": Model(partial(_stored, form), _plain_twin) for form in (*FORMS, *GGUF)},
    **{f"qwen3_moe in {form}": Model(partial(_stored_mixture, form), _mixture_twin) for form in (*FORMS, *GGUF)},
    **{f"{name} in int4": Model(partial(_stored_states, name, "int4"), _plain_twin) for name in QUANTISED},
    **{f"{FLASH} in {form}": Model(partial(_released, form), _plain_twin) for form in RELEASED},
    **{
        f"{name} in a file, {kind}": Model(partial(_file, name, kind), partial(_file_twin, name, kind))
        for name, kinds in KINDS_OF.items()
        for kind in kinds
    },
}


def possible(config: ModelConfig, mode: Mode) -> Mode:
    """The mode, without what needs a layer that grows where there is none: chunks, a cache in few bits or streamed; and
    without chunks and few bits where rows choose what they attend to."""
    sizes, offload = mode
    if config.indexer is not None:
        return replace(sizes, budget=0, kv_bits=16, lookup=True), offload
    if config.growing:
        return mode
    few = sizes.weight_bits < 16 or sizes.kv_bits < 16
    return replace(sizes, budget=0, kv_bits=16, weight_bits=6 if few else 16, lookup=not few), offload - {"kv"}


def refusal(config: ModelConfig, sizes: Sizes) -> str:
    """The reason, as the message has it, why a mode is refused; "" where it is not."""
    if sizes.weight_bits == 16:
        return ""
    if config.stored_in:
        return "the model's own weights are quantised"
    if config.experts is not None:
        return "layers have experts"
    return "" if takes_codes(config.all_products) else "are not whole groups"


def say(engine: Engine, prompt: Sequence[int] = PROMPT, *, num_tokens: int = NUM_NEW, reuse: bool = False) -> list[int]:
    steps = engine.generate(GenerationRequest(list(prompt), GREEDY, max_tokens=num_tokens, reuse=reuse))
    return [token for step in steps for token in step.tokens]


@cache
def alone(pair: Pair, dtype: str = "bf16") -> list[int]:
    """What the target says by itself."""
    with engine_of(pair, PLAIN, prompt_tokens=CONTEXT, dtype=dtype) as engine:
        return say(engine)
