"""ModelConfig: reads configs that transformers writes, computes published sizes, refuses other models by name."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from kit.examples import at_most
from offload.config.config_json import config_of
from offload.config.reading import read_config
from offload.config.rope import Rope
from offload.errors import ModelError

LLAMA_7B: dict[str, object] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 4096,
    "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "hidden_act": "silu", "torch_dtype": "float16",
    "bos_token_id": 1, "eos_token_id": 2, "pretraining_tp": 2, "rope_scaling": None, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_13B = LLAMA_7B | {
    "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40,
    "num_key_value_heads": 40,
}  # fmt: skip
LLAMA_31_8B = LLAMA_7B | {
    "vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rope_theta": 500000.0, "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009],
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
}  # fmt: skip
QWEN25_7B = LLAMA_7B | {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 152064, "hidden_size": 3584,
    "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "max_position_embeddings": 32768, "rope_theta": 1000000.0, "sliding_window": 131072, "use_sliding_window": False,
    "max_window_layers": 28, "bos_token_id": 151643, "eos_token_id": 151645, "torch_dtype": "bfloat16",
}  # fmt: skip
MISTRAL_7B = LLAMA_7B | {
    "model_type": "mistral", "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 32768,
    "sliding_window": None,
}  # fmt: skip
QWEN3 = QWEN25_7B | {"model_type": "qwen3", "head_dim": 128, "hidden_size": 1024, "num_attention_heads": 16}
YARN_LLAMA_2 = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "finetuned": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = LLAMA_31_8B["rope_scaling"]


WINDOW: dict[str, object] = {"use_sliding_window": True, "sliding_window": 4096}


def refusal(data: dict[str, object]) -> str:
    with pytest.raises(ModelError) as caught:
        config_of(data, name="config.json")
    return str(caught.value)


@pytest.mark.parametrize(
    ("data", "num_parameters", "weight_gb", "kv_bytes"),
    [
        (LLAMA_7B, 6_738_415_616, 13.5, 524_288),
        (LLAMA_13B, 13_015_864_320, 26.0, 819_200),
        (LLAMA_31_8B, 8_030_261_248, 16.1, 131_072),
        (QWEN25_7B, 7_615_616_512, 15.2, 57_344),
        (MISTRAL_7B, 7_241_732_096, 14.5, 131_072),
    ],
    ids=["llama2-7b", "llama2-13b", "llama3.1-8b", "qwen2.5-7b", "mistral-7b"],
)
def test_sizes_are_the_published_ones(data, num_parameters: int, weight_gb: float, kv_bytes: int) -> None:
    config = config_of(data)
    assert config.num_parameters() == num_parameters
    assert config.weight_bytes(2) / 1e9 == pytest.approx(weight_gb, abs=0.05)
    assert config.kv_bytes_per_token(2) == kv_bytes
    outside_layers = 2 * config.vocab_size * config.hidden_size + config.hidden_size
    assert config.layer_weight_bytes(2) * config.num_layers == 2 * (num_parameters - outside_layers)


def test_tied_embeddings_count_once() -> None:
    tied, untied = (config_of(LLAMA_7B | {"tie_word_embeddings": tied}) for tied in (True, False))
    assert untied.num_parameters() - tied.num_parameters() == 32000 * 4096


def test_prefill_flops_are_two_per_weight_and_row_plus_causal_attention() -> None:
    config = config_of(LLAMA_7B)
    matrices = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    head = 2 * 32000 * 4096
    assert config.prefill_flops(0) == 0
    assert config.prefill_flops(1) == 2 * matrices + 32 * 4 * 4096 + head
    assert config.prefill_flops(5) == 10 * matrices + 32 * 4 * 4096 * (1 + 2 + 3 + 4 + 5) + head


def test_yarn_llama_2_reads_as_numbers_and_its_remote_code_is_never_run(tmp_path: Path) -> None:
    data = LLAMA_7B | {
        "max_position_embeddings": 131072,
        "rope_scaling": YARN_LLAMA_2,
        "auto_map": {"AutoConfig": "configuration_llama.LlamaConfig"},
    }
    (tmp_path / "configuration_llama.py").write_text("raise SystemExit('remote code was run')")
    (tmp_path / "config.json").write_text(json.dumps(data))
    config = read_config(tmp_path)
    assert config.rope == Rope("yarn", factor=32.0, original_max_positions=4096)
    assert (config.rope.theta, config.max_positions, config.context_limit) == (10000.0, 131072, 131072)


@pytest.mark.parametrize(
    ("scaling", "context_limit"),
    [({}, 2048), (YARN, 4096), ({"type": "linear", "factor": 4}, 8192), ({"type": "dynamic", "factor": 2.0}, 4096),
     ({**LLAMA3, "original_max_position_embeddings": 256}, 2048), (YARN | {"factor": None}, 2048)],
    ids=["default", "yarn", "linear", "dynamic", "llama3", "yarn-implied"],
)  # fmt: skip
def test_old_and_new_rope_forms_read_alike(scaling: dict[str, object], context_limit: int) -> None:
    base = LLAMA_7B | {"max_position_embeddings": 2048}
    old = config_of(base | {"rope_theta": 5000.0, "rope_scaling": scaling or None})
    new = config_of(base | {"rope_parameters": {"rope_theta": 5000.0, **scaling}})
    assert old == new
    assert old.rope.theta == 5000.0
    assert old.context_limit == context_limit


@pytest.mark.parametrize(
    ("reference", "flags"),
    [
        (LlamaConfig(), (False, False, False, False)),
        (LlamaConfig(attention_bias=True, mlp_bias=True), (True, True, True, False)),
        (MistralConfig(sliding_window=None), (False, False, False, False)),
        (Qwen2Config(), (True, False, False, False)),
        (Qwen3Config(), (False, False, False, True)),
        (Qwen3Config(attention_bias=True), (True, True, False, True)),
    ],
)
def test_each_family_has_its_biases_and_norms(tmp_path: Path, reference, flags: tuple[bool, ...]) -> None:
    reference.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    attention, inner = config.block.attention, config.block.feed_forward
    assert (attention.bias, attention.out_bias, inner.bias, attention.qk_norm is not None) == flags
    assert config.family == reference.model_type
    assert config.num_kv_heads == reference.num_key_value_heads
    assert config.max_positions == reference.max_position_embeddings


def test_head_dim_need_not_be_hidden_size_over_heads() -> None:
    config = config_of(MISTRAL_7B | {"hidden_size": 5120, "head_dim": 128})  # Mistral-Nemo
    assert config.layer_matrix_elements() == 5120 * (2 * 32 * 128 + 2 * 8 * 128 + 3 * 14336)


def test_an_absent_mistral_window_means_what_transformers_takes_it_to_be() -> None:
    without = {key: value for key, value in MISTRAL_7B.items() if key != "sliding_window"}
    assert MistralConfig().sliding_window == 4096
    assert config_of(without).window == 4096
    assert not config_of(without | {"max_position_embeddings": 4096}).windowed


def test_a_window_is_one_only_if_a_context_outgrows_it() -> None:
    data = MISTRAL_7B | {"max_position_embeddings": 4096, "sliding_window": 4096}
    assert config_of(data).context_limit == 4096
    assert not config_of(data).windowed
    assert config_of(data | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}).window == 4096
    assert config_of(data | {"sliding_window": 4095}).windowed == tuple(range(32))


def test_layers_have_the_windows_that_transformers_gives_them() -> None:
    last = config_of(QWEN25_7B | WINDOW | {"max_window_layers": 27})
    assert (last.windowed, last.window) == ((27,), 4096)
    named = config_of(QWEN3 | WINDOW | {"layer_types": ["sliding_attention", *["full_attention"] * 27]})
    assert (named.windowed, named.growing) == ((0,), tuple(range(1, 28)))
    longer = config_of(QWEN3 | WINDOW | {"layer_types": [*["full_attention"] * 28, "sliding_attention"]})
    assert not longer.windowed


@pytest.mark.parametrize("window", [0, -1, 4096.0, True, "4096"])
def test_a_window_is_a_number_of_tokens(window: object) -> None:
    assert "sliding_window is " in refusal(MISTRAL_7B | {"sliding_window": window})


def test_eos_ids_of_both_files_are_merged_in_order(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B | {"eos_token_id": [7, 2]}))
    assert read_config(tmp_path).eos_token_ids == (7, 2)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    assert read_config(tmp_path).eos_token_ids == (7, 2, 5)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 32000}))
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id is 32000"):
        read_config(tmp_path)


def test_suppressed_tokens_are_those_of_the_generation_config(tmp_path: Path) -> None:
    """They were drawn."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B))
    for value, found in ((None, ()), ([7, 2, 7], (7, 2)), ([], ())):
        (tmp_path / "generation_config.json").write_text(json.dumps({"suppress_tokens": value}))
        assert read_config(tmp_path).suppressed == found
    (tmp_path / "generation_config.json").write_text(json.dumps({"suppress_tokens": [32000]}))
    with pytest.raises(ModelError, match=r"generation_config\.json: suppress_tokens is \[32000\]"):
        read_config(tmp_path)


def test_absent_token_ids_stay_unknown() -> None:
    config = config_of(LLAMA_7B | {"eos_token_id": None, "bos_token_id": None})
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())


@pytest.mark.parametrize(("key", "value"), [("dtype", "bfloat16"), ("torch_dtype", "bfloat16"), (None, "float32")])
def test_dtype_is_read_under_both_names(key: str | None, value: str) -> None:
    data = LLAMA_7B | {"torch_dtype": None} | ({key: value} if key else {})
    assert config_of(data).dtype == value


UNSUPPORTED = [
    ("hidden_act", "gelu"), ("layer_types", ["full_attention", "sliding_attention"]),
    ("partial_rotary_factor", 0.5), ("quantization_config", "4 bits"), ("attn_logit_softcapping", 50.0),
    ("final_logit_softcapping", 30.0), ("logit_scale", 0.0625), ("embedding_multiplier", 12.0),
    ("residual_multiplier", 0.2), ("logits_scaling", 8.0), ("attention_multiplier", 1.0), ("num_local_experts", 8),
    ("num_experts_per_tok", 2), ("scale_attn_by_inverse_layer_idx", True), ("scale_attn_weights", False),
    ("model_type", "mixtral"), ("model_type", "mamba"), ("architectures", ["LlamaForSequenceClassification"]),
    ("torch_dtype", "float64"), ("sliding_window", 1024), ("alibi", True), ("query_pre_attn_scalar", 224),
    ("use_qk_norm", True), ("an_unheard_of_multiplier", 1.5), ("dual_chunk_attention_config", {"chunk_size": 1}),
    ("head_dim", 127), ("num_key_value_heads", 5), ("num_attention_heads", 33), ("bos_token_id", [1, 2]),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), UNSUPPORTED, ids=[f"{key}-{value}" for key, value in UNSUPPORTED])
def test_what_changes_the_arithmetic_is_refused_by_name_and_value(key: str, value: object) -> None:
    message = refusal(LLAMA_7B | {"num_key_value_heads": None} | {key: value})
    assert message.startswith("config.json: ")
    named = "head_dim" if key == "num_attention_heads" else key  # 33 heads do not divide 4096
    assert f"{named} is " in message
    assert (json.dumps(value) if isinstance(value, (int, float)) else "")[:8] in message


@pytest.mark.parametrize(
    ("key", "value"),
    [("attn_logit_softcapping", None), ("logit_scale", 1), ("embedding_multiplier", 1.0), ("num_local_experts", 0),
     ("partial_rotary_factor", 1), ("layer_types", ["full_attention"] * 32), ("pretraining_tp", 4),
     ("pruned_heads", {}), ("use_sliding_window", False), ("rope_interleaved", False), ("some_property", "europe"),
     ("use_cache", True), ("hidden_act", "swish"), ("num_experts_per_tok", 0), ("moe_intermediate_size", 0),
     ("final_logit_softcapping", 0.0), ("use_sliding_window", True), ("max_window_layers", 1), ("pruned_heads", []),
     ("architectures", ["LlamaForCausalLMWithValueHead"]), ("architectures", ["LlamaModel"]), ("torch_dtype", "half"),
     ("eos_token_id", [2]), ("num_key_value_heads", None), ("head_dim", 128), ("sliding_window", 4096)],
)  # fmt: skip
def test_what_leaves_the_arithmetic_alone_is_read_past(key: str, value: object) -> None:
    assert config_of(LLAMA_7B | {key: value}) == config_of(LLAMA_7B)


@pytest.mark.parametrize("value", [True, "1", [1], 0])
def test_a_neutral_number_of_another_type_is_not_neutral(value: object) -> None:
    assert "logit_scale is" in refusal(LLAMA_7B | {"logit_scale": value})


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        (QWEN25_7B, {"use_sliding_window": True, "max_window_layers": "28"}, 'max_window_layers is "28"'),
        (QWEN25_7B, {"layer_types": ["sliding_attention"] * 28}, "layer_types is"),
        (QWEN3, {**WINDOW, "layer_types": ["sliding_attention"]}, "one for each of 28 layers"),
        (QWEN3, {"layer_types": [*["full_attention"] * 27, "sliding_attention"]}, "layer_types is"),
        (QWEN3, {"head_dim": None}, "head_dim is null"),
        (LLAMA_7B, {"layer_types": ["linear_attention"]}, "layer_types is"),
        (LLAMA_7B, {"num_attention_heads": 33, "num_key_value_heads": 33}, "head_dim is missing"),
    ],
)  # fmt: skip
def test_what_a_family_reads_it_refuses_by_name(base, change: dict[str, object], named: str) -> None:
    config_of(base)
    assert named in refusal(base | change)


@pytest.mark.parametrize(
    ("base", "change"),
    [
        (QWEN25_7B, {"attention_bias": False}), (MISTRAL_7B, {"attention_bias": True}),
        (MISTRAL_7B, {"mlp_bias": True}),
        (MISTRAL_7B, {"use_sliding_window": False}), (QWEN25_7B, {**WINDOW, "max_window_layers": 28}),
        (QWEN25_7B, {"use_sliding_window": True, "sliding_window": 32768, "max_window_layers": 0}),
        (QWEN25_7B, {**WINDOW, "max_window_layers": 0, "layer_types": ["full_attention"] * 28}),
        (QWEN25_7B, {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}),
        (QWEN3, {**WINDOW, "max_window_layers": 28}), (QWEN25_7B, {"eos_token_id": -1, "bos_token_id": -1}),
    ],
)  # fmt: skip
def test_what_a_family_does_not_read_or_no_layer_has_changes_nothing(base, change: dict[str, object]) -> None:
    config, changed = config_of(base), config_of(base | change)
    ids = {"eos_token_ids": (), "bos_token_id": None} if "eos_token_id" in change else {}
    assert changed == replace(config, **ids)


@pytest.mark.parametrize(
    ("base", "reference"),
    [(LLAMA_7B, LlamaConfig()), (MISTRAL_7B, MistralConfig()), (QWEN25_7B, Qwen2Config()), (QWEN3, Qwen3Config())],
    ids=["llama", "mistral", "qwen2", "qwen3"],
)  # fmt: skip
def test_absent_fields_mean_what_transformers_takes_them_to_be(base, reference) -> None:
    absent = ("max_position_embeddings", "rms_norm_eps", "num_key_value_heads", "rope_theta")
    absent += ("head_dim",) if base is QWEN3 else ()
    sizes = {"num_attention_heads": 32, "hidden_size": 4096, "num_key_value_heads": 32, "sliding_window": None}
    config = config_of({key: value for key, value in (base | sizes).items() if key not in absent})
    assert config.max_positions == reference.max_position_embeddings
    assert config.norm.eps == reference.rms_norm_eps
    assert config.num_kv_heads == reference.num_key_value_heads
    assert config.rope.theta == reference.rope_parameters["rope_theta"]
    assert config.head_dim == reference.head_dim if base is QWEN3 else 128


ROPE_REFUSALS = [
    ({"rope_type": "longrope", "factor": 4.0}, 'rope_type is "longrope"'),
    ({"type": "su"}, 'type is "su"'),
    ({"type": "linear", "rope_type": "dynamic", "factor": 2.0}, 'type is "linear"'),
    ({"rope_type": "linear"}, "factor is missing"),
    ({"rope_type": "linear", "factor": 0.5}, "factor is 0.5"),
    ({"rope_type": "linear", "factor": "2"}, 'factor is "2"'),
    ({"rope_type": "dynamic", "factor": True}, "factor is true"),
    (YARN | {"factor": 0.5}, "factor is 0.5"),
    (YARN | {"beta_fast": 1, "beta_slow": 2}, "beta_slow is 2"),
    (YARN | {"truncate": "no"}, 'truncate is "no"'),
    (YARN | {"attention_factor": -1.0}, "attention_factor is -1.0"),
    ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor is 1.0"),
    ({**LLAMA3, "low_freq_factor": None}, "low_freq_factor is null"),
    ({"rope_type": "default", "mrope_section": [16, 24, 24]}, "mrope_section is [16, 24, 24]"),
    ({"rope_type": "default", "partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25"),
    ({"full_attention": {"rope_type": "default"}}, "full_attention is"),
    ({"rope_theta": 2.0}, "rope_theta is 10000.0"),
    ({"rope_theta": -1.0}, "rope_theta is -1.0"),
    ([], "rope_scaling is []"),
    ("yarn", 'rope_scaling is "yarn"'),
]


@pytest.mark.parametrize(("scaling", "named"), ROPE_REFUSALS)
def test_rope_settings_are_refused_by_name_and_value(scaling: object, named: str) -> None:
    assert named in refusal(LLAMA_7B | {"rope_theta": 10000.0, "rope_scaling": scaling})


def test_settings_that_a_formula_cannot_take_are_refused() -> None:
    """YaRN divides by the logarithm of theta, dynamic scaling by head_dim - 2."""
    assert "rope_theta is 1.0" in refusal(LLAMA_7B | {"rope_theta": 1.0, "rope_scaling": YARN})
    two = {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    assert "dynamic with head_dim 2" in refusal(LLAMA_7B | two)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({**YARN, "mscale": 0, "mscale_all_dim": 1.0}, YARN), ({**YARN, "mscale": 1.0, "mscale_all_dim": 0.0}, YARN),
        ({**YARN, "beta_fast": 0, "beta_slow": None}, YARN), ({**YARN, "unheard_of": None}, YARN),
        ({"type": "yarn", "factor": 4}, {**YARN, "original_max_position_embeddings": 4096}),
        ({**YARN, "truncate": None}, {**YARN, "truncate": False}), ({"rope_type": "default", "factor": 4.0}, {}),
    ],
)  # fmt: skip
def test_one_scaling_may_be_written_in_several_ways(written: dict[str, object], meant: dict[str, object]) -> None:
    one, other = (config_of(LLAMA_7B | {"rope_scaling": rope}) for rope in (written, meant))
    assert one == other
    both = {"rope_scaling": written, "rope_parameters": {**meant, "rope_theta": 10000.0}, "rope_theta": 10000}
    assert config_of(LLAMA_7B | both) == other


def test_two_rope_forms_or_lengths_must_agree() -> None:
    both = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"type": "linear", "factor": 4.0}}
    assert "rope_scaling is" in refusal(LLAMA_7B | both)
    outside = {"rope_scaling": YARN, "original_max_position_embeddings": 999}
    assert "original_max_position_embeddings is 999" in refusal(LLAMA_7B | outside)


REQUIRED = ["model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "max_position_embeddings", "rms_norm_eps"]  # fmt: skip


@pytest.mark.parametrize("key", REQUIRED[:6])
def test_a_missing_key_is_named(key: str) -> None:
    data = {name: value for name, value in LLAMA_7B.items() if name != key}
    assert f"{key} is missing" in refusal(data)


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("value", [0, -1, 10**30, "8", 2.5, True, [], {}, float("nan")], ids=str)
def test_a_number_out_of_range_or_of_the_wrong_type_is_named_with_its_value(key: str, value: object) -> None:
    if key == "rms_norm_eps" and value is True:
        value = False
    message = refusal(LLAMA_7B | {key: value})
    assert f"{key} is {value if isinstance(value, float) else json.dumps(value)}" in message
    assert "must be" in message


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"3", b"\xff\xfe", b'{"vocab_size": NaN}', b"[" * 200_000,
     b'{"eos_token_id": ' + b"9" * 5000 + b"}", b'{"eos_token_id": 2}' + b" " * (1 << 20), b"{}"],
    ids=["empty", "cut", "list", "null", "number", "bytes", "nan", "deep", "digits", "large", "no-keys"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B))
    (tmp_path / name).write_bytes(content)
    if (name, content) == ("generation_config.json", b"{}"):
        assert read_config(tmp_path).eos_token_ids == (2,)
        return
    with pytest.raises(ModelError, match=name):
        read_config(tmp_path)


def test_a_missing_folder_and_a_file_instead_of_one_say_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no folder .*nowhere; give the path"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="file is a file; give the folder"):
        read_config(tmp_path / "file")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = sorted({*LLAMA_31_8B, *QWEN25_7B, "head_dim", "layer_types", "rope_parameters", "attention_bias", "dtype"})


@at_most(150)
@example(changes={"rope_scaling": {"type": "yarn", "factor": 1e300, "original_max_position_embeddings": 1}})
@given(changes=st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=2))
def test_any_json_gives_a_model_error_or_a_config_whose_formulas_work(changes: dict[str, object]) -> None:
    for base in (LLAMA_31_8B, QWEN25_7B, MISTRAL_7B):
        try:
            config = config_of(base | changes)
        except ModelError:
            continue
        assert config.num_parameters() > 0
        assert config.context_limit >= config.max_positions
        assert config.prefill_flops(config.max_positions) > 0


def test_the_planner_side_imports_no_torch() -> None:
    code = "import sys, offload.config.reading; sys.exit('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
