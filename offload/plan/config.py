"""The frozen `ModelConfig` of a model, read from config.json, and the byte and FLOP formulas that follow from it.

Only numbers are read. Remote code that a config names (`auto_map`) is never run. A field that changes the arithmetic
and that this program does not implement is refused by name. Fields that change nothing here are ignored, among them
`pretraining_tp`, which only says how the authors sliced their matrix products.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from offload.errors import ModelError
from offload.plan.fields import Fields, is_neutral, read_json
from offload.plan.rope_scaling import RopeScaling, read_rope

__all__ = ["DTYPES", "FAMILIES", "ModelConfig", "RopeScaling"]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
DTYPES = ("float32", "bfloat16", "float16")
ADAPTER_FILE = "adapter_config.json"

# Fields that change the arithmetic, with the values that leave it alone. Absent and null always do.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1.0,),
    "rotary_pct": (1.0,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "scale_emb": (1.0,),
    "num_local_experts": (0,),
    "num_experts": (0,),
    "n_routed_experts": (0,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "lm_head_bias": (False,),
    "clip_qkv": (),
    "attention_chunk_size": (),
    "query_pre_attn_scalar": (),
    "dual_chunk_attention_config": (),
    "pruned_heads": ({}, []),
}
# The same for fields that nobody has listed yet: a name like this with a value that says anything is refused.
_SUSPECT = re.compile(r"softcap|multiplier|expert|moe|quant|alibi|rotary|sliding|sparse|qk_|(^|_)(m?rope|scal)")
_IS_FACTOR = re.compile(r"multiplier|scal")  # 1 may leave the arithmetic alone, 0 does not
_SAYS_NOTHING: tuple[object, ...] = (False, 0, "", [], {})
# Judged where they are read.
_READ = {"sliding_window", "use_sliding_window", "rope_theta", "rope_scaling", "rope_parameters"}
# What transformers takes where a config says nothing.
_MAX_POSITIONS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
_NUM_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_WINDOW = {"mistral": 4096, "qwen2": 4096, "qwen3": 4096}
_FIRST_WINDOW_LAYER = 28
_LAYER_TYPES = ("full_attention", "sliding_attention")
_OTHER_DTYPES = {"float": "float32", "half": "float16"}  # torch's other names for these


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a Llama-family decoder. `from_dict` and `from_folder` validate; the constructor does not.

    `qkv_bias`, `o_bias`, `mlp_bias`: which linear operators add a bias (`o` is the attention output). `qk_norm`: RMS
    norm over D of every query and key head. `dtype`: what the weights are meant to be computed in.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    rope: RopeScaling = field(default_factory=RopeScaling)
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelConfig:
        """Read `config.json`, and the further eos ids of `generation_config.json` where there is one. ModelError, also
        where the folder is an adapter's or holds one: its weights would change every token."""
        folder = Path(path)
        if (folder / ADAPTER_FILE).is_file():
            raise ModelError(
                f"{folder} holds {ADAPTER_FILE}, and adapters are not applied; merge it into its model (peft: "
                "merge_and_unload, then save_pretrained) and give the new folder, or remove it"
            )
        config = cls.from_dict(read_json(folder / "config.json"), name=str(folder / "config.json"))
        generation = folder / "generation_config.json"
        if not generation.is_file():
            return config
        more = Fields(read_json(generation), str(generation)).token_ids("eos_token_id", config.vocab_size)
        return replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + more)))

    @classmethod
    def from_dict(cls, data: Mapping[str, object], *, name: str = "") -> ModelConfig:
        """The config that transformers (4 or 5) wrote as `data`. Messages of ModelError begin with `name`.

        Fields mean what they mean to transformers, and those that it does not read in this family mean nothing. Absent:
        rope_theta 10000, hidden_act silu, no biases, no tying, rms_norm_eps 1e-6, head_dim = hidden_size / heads, in
        qwen3 128, KV heads 8 in mistral, 32 in qwen, else as many as heads; float32 without a dtype. Token ids that are
        absent stay unknown. The other sizes must be there.
        """
        return _read_config(Fields(data, name or "config"))

    @property
    def context_limit(self) -> int:
        """Positions that the model is good for. Configs often keep `max_position_embeddings` at the unscaled length."""
        base = self.rope.original_max_positions if self.rope.kind == "yarn" else self.max_positions
        factor = self.rope.factor if self.rope.kind in ("yarn", "linear", "dynamic") else 1.0
        return max(self.max_positions, int((base or self.max_positions) * factor))

    def layer_products(self) -> tuple[tuple[int, int, bool], ...]:
        """(outputs, inputs, has a bias) of a layer's products as they run: q/k/v and gate/up are one each."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return (
            (q_size + 2 * kv_size, self.hidden_size, self.qkv_bias),
            (self.hidden_size, q_size, self.o_bias),
            (2 * self.intermediate_size, self.hidden_size, self.mlp_bias),
            (self.hidden_size, self.intermediate_size, self.mlp_bias),
        )

    def layer_matrix_elements(self) -> int:
        """Elements of one layer's seven matrices; every row costs two FLOPs for each."""
        return sum(outputs * inputs for outputs, inputs, _ in self.layer_products())

    def layer_parameters(self) -> int:
        """Parameters of one layer: matrices, biases and norms."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        biases = self.qkv_bias * (q_size + 2 * kv_size) + self.o_bias * self.hidden_size
        biases += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        norms = 2 * self.hidden_size + self.qk_norm * 2 * self.head_dim
        return self.layer_matrix_elements() + biases + norms

    def num_parameters(self) -> int:
        """Parameters of the whole model; tied embeddings count once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return embeddings + self.num_layers * self.layer_parameters() + self.hidden_size

    def weight_bytes(self, dtype_bytes: int) -> int:
        """Bytes of all weights at `dtype_bytes` per element."""
        return self.num_parameters() * dtype_bytes

    def layer_weight_bytes(self, dtype_bytes: int) -> int:
        """Bytes of one layer's weights at `dtype_bytes` per element."""
        return self.layer_parameters() * dtype_bytes

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values that one token adds, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes

    def prefill_flops(self, num_tokens: int) -> int:
        """FLOPs (a multiply-add is two) of a causal forward over `num_tokens` rows with logits of the last row only.

        Row t attends t keys: 2 H D FLOPs each for the score and for the value. Norms, rotary and softmax are left out.
        """
        attended = num_tokens * (num_tokens + 1) // 2
        layer = 2 * self.layer_matrix_elements() * num_tokens + 4 * self.num_heads * self.head_dim * attended
        return self.num_layers * layer + 2 * self.vocab_size * self.hidden_size * (num_tokens > 0)


def _read_config(source: Fields) -> ModelConfig:
    family = source.choice("model_type", FAMILIES)
    _refuse_unsupported(source)
    hidden_size, vocab_size = source.integer("hidden_size", 1 << 20), source.integer("vocab_size", 1 << 24)
    max_positions = source.integer("max_position_embeddings", 1 << 30, default=_MAX_POSITIONS[family])
    num_heads, num_kv_heads, head_dim = _read_heads(source, family, hidden_size)
    qkv_bias, mlp_bias = _read_biases(source, family)
    rope_theta, rope = read_rope(source, max_positions=max_positions, head_dim=head_dim)
    config = ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=source.integer("intermediate_size", 1 << 22),
        num_layers=source.integer("num_hidden_layers", 1 << 12),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        rms_norm_eps=source.number("rms_norm_eps", default=1e-6, most=1.0),
        rope_theta=rope_theta,
        rope=rope,
        tie_embeddings=source.flag("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        o_bias=qkv_bias and family != "qwen2",
        mlp_bias=mlp_bias,
        qk_norm=family == "qwen3",
        bos_token_id=source.token_id("bos_token_id", vocab_size),
        eos_token_ids=source.token_ids("eos_token_id", vocab_size),
        dtype=_read_dtype(source),
    )
    _refuse_sliding_window(source, config)
    return config


def _read_dtype(source: Fields) -> str:
    key = "torch_dtype" if source.data.get("dtype") is None else "dtype"
    name = source.choice(key, (*DTYPES, *_OTHER_DTYPES), default="float32")
    return _OTHER_DTYPES.get(name, name)


def _read_heads(source: Fields, family: str, hidden_size: int) -> tuple[int, int, int]:
    """(heads, KV heads, head_dim). head_dim times heads need not be hidden_size (Mistral-Nemo, Qwen3)."""
    num_heads = source.integer("num_attention_heads", 1 << 14)
    unnamed = num_heads if "num_key_value_heads" in source.data else _NUM_KV_HEADS.get(family, num_heads)
    num_kv_heads = source.integer("num_key_value_heads", num_heads, default=unnamed)
    if num_heads % num_kv_heads:
        source.refuse("num_key_value_heads", f"a divisor of num_attention_heads {num_heads}")
    if family == "qwen3":
        derived = None if "head_dim" in source.data else 128
    else:
        derived = None if family == "llama" and hidden_size % num_heads else hidden_size // num_heads
    if source.data.get("head_dim") is None and derived is None:
        source.refuse(
            "head_dim",
            f"given where heads ({num_heads}) do not divide hidden_size ({hidden_size}), and not null in qwen3",
        )
    head_dim = source.integer("head_dim", 1 << 12, default=derived)
    if head_dim % 2:
        source.refuse("head_dim", f"even for rotary positions, {head_dim} is odd")
    return num_heads, num_kv_heads, head_dim


def _read_biases(source: Fields, family: str) -> tuple[bool, bool]:
    """(q/k/v bias, mlp bias). qwen2 always has the former, mistral neither; only llama reads `mlp_bias`. Tensors of a
    checkpoint that say otherwise are found when it is checked."""
    qkv_bias = source.flag("attention_bias", False) if family in ("llama", "qwen3") else family == "qwen2"
    return qkv_bias, family == "llama" and source.flag("mlp_bias", False)


def _refuse_unsupported(source: Fields) -> None:
    for key, value in source.data.items():
        if key in _NEUTRAL or (key not in _READ and _SUSPECT.search(key)):
            allowed = _NEUTRAL.get(key, (False, [], {}) if _IS_FACTOR.search(key) else _SAYS_NOTHING)
            if not is_neutral(value, allowed):
                neutral = " or ".join(["absent", *map(json.dumps, allowed)])
                source.refuse(key, f"{neutral}: it changes the arithmetic, and this program does not implement it")
    architectures = source.data.get("architectures") or []
    if not isinstance(architectures, list):
        source.refuse("architectures", "a list")
    if architectures and not any("ForCausalLM" in str(name) or str(name).endswith("Model") for name in architectures):
        source.refuse("architectures", "a causal language model, ...ForCausalLM")


def _refuse_sliding_window(source: Fields, config: ModelConfig) -> None:
    """A window that no context outgrows changes nothing, nor one that no layer has.

    Qwen reads it under `use_sliding_window` alone, for the layers from `max_window_layers` on; the others always.
    """
    key, family = "sliding_window", config.family
    window = source.data.get(key, _WINDOW.get(family))
    if family in ("qwen2", "qwen3"):
        window = window if source.flag("use_sliding_window", False) else None
        first = source.data.get("max_window_layers", _FIRST_WINDOW_LAYER)
        if type(first) is not int:
            source.refuse("max_window_layers", "an integer")
        windowed = window is not None and first < config.num_layers
    else:
        windowed = window is not None
    layer_types = source.data.get("layer_types")
    if layer_types:
        if not isinstance(layer_types, list) or any(kind not in _LAYER_TYPES for kind in layer_types):
            source.refuse("layer_types", f"a list of {' and '.join(_LAYER_TYPES)}")
        if "sliding_attention" in layer_types and window is None:
            source.refuse("layer_types", f"full_attention in every layer where there is no {key}")
        windowed = "sliding_attention" in layer_types if family in ("qwen2", "qwen3") else windowed
    if windowed and (type(window) is not int or window < config.context_limit):
        source.refuse(
            key, f"null, or at least the context of {config.context_limit} tokens, as layers attend within it"
        )
