"""The table of starters: GGUF files on the hub that a first user is offered, for machines from 8 GB of memory on.

Shapes are from each model's config.json, bytes from the hub's listing; none is gated. A file is planned from its line
alone (offload/hub/offers.py). tests/test_starters.py counts each file's bytes from its shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from offload.config.config_json import config_of
from offload.config.gguf_forms import in_form
from offload.config.model import ModelConfig

_ALL: dict[str, object] = {"dtype": "bfloat16", "rms_norm_eps": 1e-6}


@dataclass(frozen=True, kw_only=True)
class Starter:
    """A GGUF file of a repository, in `form` (offload/config/gguf_forms.py, where `others` is explained). fields: those
    of the model's config.json that a plan depends on."""

    name: str
    repository: str
    file: str
    num_bytes: int
    form: str
    fields: Mapping[str, object] = field(repr=False)
    others: str = ""

    @property
    def model(self) -> str:
        return f"{self.repository}/{self.file}"

    @property
    def pull(self) -> tuple[str, ...]:
        return (self.repository, "--file", self.file)

    @property
    def draft(self) -> None:
        return None

    @cached_property
    def config(self) -> ModelConfig:
        """The model, with its matrices as the file stores them."""
        config = config_of({**_ALL, **self.fields}, name=self.name)
        names = replace(config.names, experts=config.names.experts.stacked)
        return in_form(replace(config, names=names), self.form, others=self.others)


_GPT_OSS: dict[str, object] = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_experts_per_tok": 4,
    "sliding_window": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
}  # fmt: skip
_LLAMA: dict[str, object] = {
    "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
_QWEN3: dict[str, object] = {
    "model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960,
}  # fmt: skip
_QWEN35: dict[str, object] = {
    "model_type": "qwen3_5_text", "vocab_size": 248320, "head_dim": 256, "num_key_value_heads": 4,
    "max_position_embeddings": 262144, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip

STARTERS = (  # most parameters first
    Starter(
        name="gpt-oss 120B",
        repository="ggml-org/gpt-oss-120b-GGUF",
        file="gpt-oss-120b-MXFP4.gguf",
        num_bytes=63_387_346_208,
        form="MXFP4",
        fields=_GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
    ),
    Starter(
        name="Llama 3.3 70B",
        repository="unsloth/Llama-3.3-70B-Instruct-GGUF",
        file="Llama-3.3-70B-Instruct-Q4_K_M.gguf",
        num_bytes=42_520_398_432,
        form="Q4_K_M",
        fields=_LLAMA | {
            "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        },
    ),
    Starter(
        name="Qwen3.6 35B-A3B",
        repository="unsloth/Qwen3.6-35B-A3B-GGUF",
        file="Qwen3.6-35B-A3B-UD-Q4_K_M.gguf",
        num_bytes=22_134_528_992,
        form="Q4_K_M",
        others="Q8_0",
        fields=_QWEN35 | {
            "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
            "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
    Starter(
        name="Qwen3.6 27B",
        repository="unsloth/Qwen3.6-27B-GGUF",
        file="Qwen3.6-27B-Q4_K_M.gguf",
        num_bytes=16_817_244_384,
        form="Q4_K_M",
        fields=_QWEN35 | {
            "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
            "linear_num_value_heads": 48,
        },
    ),
    Starter(
        name="Gemma 4 26B-A4B",
        repository="ggml-org/gemma-4-26B-A4B-it-GGUF",
        file="gemma-4-26B-A4B-it-Q4_K_M.gguf",
        num_bytes=16_796_015_136,
        form="Q4_K_M",
        fields={
            "model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 2816, "intermediate_size": 2112,
            "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
            "global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True, "sliding_window": 1024,
            "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
            "moe_intermediate_size": 704, "tie_word_embeddings": True, "max_position_embeddings": 262144,
        },
    ),
    Starter(
        name="Mistral Small 3.2 24B",
        repository="unsloth/Mistral-Small-3.2-24B-Instruct-2506-GGUF",
        file="Mistral-Small-3.2-24B-Instruct-2506-Q4_K_M.gguf",
        num_bytes=14_333_922_848,
        form="Q4_K_M",
        fields=_LLAMA | {
            "model_type": "mistral", "vocab_size": 131072, "hidden_size": 5120, "intermediate_size": 32768,
            "num_hidden_layers": 40, "num_attention_heads": 32, "head_dim": 128,
        },
    ),
    Starter(
        name="gpt-oss 20B",
        repository="ggml-org/gpt-oss-20b-GGUF",
        file="gpt-oss-20b-MXFP4.gguf",
        num_bytes=12_109_566_624,
        form="MXFP4",
        fields=_GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    ),
    Starter(
        name="Qwen3 14B",
        repository="Qwen/Qwen3-14B-GGUF",
        file="Qwen3-14B-Q4_K_M.gguf",
        num_bytes=9_001_752_960,
        form="Q4_K_M",
        fields=_QWEN3 | {
            "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40,
        },
    ),
    Starter(
        name="Gemma 3 12B",
        repository="ggml-org/gemma-3-12b-it-GGUF",
        file="gemma-3-12b-it-Q4_K_M.gguf",
        num_bytes=7_300_574_976,
        form="Q4_K_M",
        fields={
            "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 3840, "intermediate_size": 15360,
            "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
            "query_pre_attn_scalar": 256, "sliding_window": 1024, "max_position_embeddings": 131072,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    Starter(
        name="Qwen3.5 9B",
        repository="unsloth/Qwen3.5-9B-GGUF",
        file="Qwen3.5-9B-Q4_K_M.gguf",
        num_bytes=5_680_522_464,
        form="Q4_K_M",
        fields=_QWEN35 | {
            "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16,
        },
    ),
    Starter(
        name="Qwen3 8B",
        repository="Qwen/Qwen3-8B-GGUF",
        file="Qwen3-8B-Q4_K_M.gguf",
        num_bytes=5_027_783_488,
        form="Q4_K_M",
        fields=_QWEN3 | {
            "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        },
    ),
    Starter(
        name="Qwen3.5 4B",
        repository="unsloth/Qwen3.5-4B-GGUF",
        file="Qwen3.5-4B-Q4_K_M.gguf",
        num_bytes=2_740_937_888,
        form="Q4_K_M",
        fields=_QWEN35 | {
            "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
    ),
    Starter(
        name="Qwen3 1.7B",
        repository="Qwen/Qwen3-1.7B-GGUF",
        file="Qwen3-1.7B-Q8_0.gguf",
        num_bytes=1_834_426_016,
        form="Q8_0",
        fields=_QWEN3 | {
            "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
    ),
    Starter(
        name="Qwen3 0.6B",
        repository="Qwen/Qwen3-0.6B-GGUF",
        file="Qwen3-0.6B-Q8_0.gguf",
        num_bytes=639_446_688,
        form="Q8_0",
        fields=_QWEN3 | {
            "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
    ),
)  # fmt: skip
