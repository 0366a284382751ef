"""llama.cpp beside us, in benchmarks/: the GGUF file it reads, the process it is, and, where its wheel is there, its
text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from unicodedata import normalize

import numpy as np
import psutil
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import quantize
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch import Tensor

from kit.fake_peers import fake_environment
from kit.families import save_tiny
from kit.gguf_models import write_gguf as write_converted
from kit.heads import with_head
from kit.models import (
    DYNAMIC_ROPE,
    GREEDY,
    TOKENIZER_SIZE,
    Sizes,
    random_model,
    random_tokens,
    save,
    tiny_engine,
    tiny_plan,
)
from offload.engine.request import GenerationRequest
from offload.errors import DoesNotFit, ModelError, TriforceError, UsageError
from offload.speed.rates import FOLDER_VARIABLE
from offload.text import gguf_tokenizer
from offload.text.gguf_cuts import CUTS

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))  # last: one of them is called as one here

from gguf_file import write_gguf
from llama_cpp import token_name
from peer import Peer, llama_cpp_of, model_files, open_llama_cpp, python_of, wheel_python, without_openmp
from program import Program, Setting

YARN: dict[str, object] = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0,
    "attention_factor": 1.3,
}  # fmt: skip
LLAMA3: dict[str, object] = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LINEAR: dict[str, object] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
CASES = [
    ("llama-gqa", {}), ("llama-tied", {}), ("llama-biased", {}), ("mistral", {}), ("qwen2", {}), ("qwen3-tied", {}),
    ("llama-gqa", {"rope_parameters": YARN}), ("llama-gqa", {"rope_parameters": LLAMA3}),
    ("qwen2", {"rope_parameters": LINEAR}),
]  # fmt: skip
SETTING = {"wait_policy": "default", "flash_attention": "off", "cache": "f16", "threads": 1, "ubatch": 2048}
STATES: dict[str, dict[str, object]] = {
    "6 value heads of 2 key heads": {"linear_num_value_heads": 6},
    "12 of 4, eight layers": {"linear_num_key_heads": 4, "linear_num_value_heads": 12, "num_hidden_layers": 8},
    "as many, tied": {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "tie_word_embeddings": True},
}
WIDE: dict[str, object] = {
    "vocab_size": TOKENIZER_SIZE, "eos_token_id": TOKENIZER_SIZE - 1, "hidden_size": 64, "head_dim": 32,
}  # fmt: skip
SECTIONS: dict[str, object] = {"rope_type": "default", "rope_theta": 500.0}
MIXED: dict[str, object] = {**WIDE, "moe_intermediate_size": 32}
# Sections that cover all pairs: interleaved ones of others llama.cpp takes for those of a fourth position, which is 0.
COVERED: dict[str, object] = {"rope_parameters": {**SECTIONS, "mrope_section": [6, 5, 5], "mrope_interleaved": True}}
HALF = {**SECTIONS, "partial_rotary_factor": 0.5}
SEEING: dict[str, dict[str, object]] = {
    "qwen3_vl": {**WIDE, **COVERED},
    "qwen3_vl_moe": {**MIXED, **COVERED},
    "qwen2_vl": {**WIDE, "head_dim": 16, "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}},
    "glm4v": {**WIDE, "head_dim": 16, "rope_parameters": {**HALF, "mrope_section": [2, 1, 1]}},
    "glm4v_moe": {**MIXED, "rope_parameters": {**HALF, "mrope_section": [4, 2, 2]}},
}
NEXT: dict[str, object] = {
    **WIDE, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
FLASH: dict[str, object] = {
    **WIDE, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "moe_intermediate_size": 32, "hc_lowrank": 32,
    "indexer_budget": 16,
}  # fmt: skip
GRAMS: dict[str, dict[str, object]] = {  # an end of text is in all prompts from 60 tokens on
    "qwen4_exp": FLASH,
    "qwen4_exp, n-grams": {**FLASH, "eos_token_id": random_tokens(60, vocabulary=256)[40]},
}
FEW: dict[str, object] = {**WIDE, "intermediate_size": 32}
MIXTURES: dict[str, dict[str, object]] = {
    "minimax_m2": FEW,
    "ernie4_5_moe": {**MIXED, "intermediate_size": 128},  # for each KV head as much as the network beside experts has
    "hunyuan_v1_moe": FEW,
    "exaone_moe": MIXED,
    "solar_open": MIXED,
    "olmoe": {**FEW, "head_dim": 16, "num_key_value_heads": 4},
    "qwen2_moe": {**MIXED, "head_dim": 16, "shared_expert_intermediate_size": 32},
    "afmoe": MIXED,
    "laguna": {**MIXED, "shared_expert_intermediate_size": 32, "moe_router_logit_softcapping": 0.0},
    "cohere2_moe": {**FEW, "prefix_dense_intermediate_size": 64},
}
TOKENIZED = """
import json, os, sys, urllib.request, xllamacpp
asked = json.load(sys.stdin)
params = xllamacpp.CommonParams()
params.model.path, params.n_gpu_layers, params.n_ctx, params.verbosity, params.warmup = asked["model"], 0, 64, 1, False
server = xllamacpp.Server(params)
def ids(text):
    body = json.dumps({"content": text, "add_special": False}).encode()
    request = urllib.request.Request(f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))["tokens"]
print(json.dumps([ids(text) for text in asked["texts"]]), flush=True)
os._exit(0)  # its server does not end
"""
UNCASED, DIGITS, NUMBER = "\u0301\u0915\u093f\u094d\u3042\u4e2d\ud55c\u0e01", "7\u0661\u00bd", "x12345."
LETTERS = (*f"aZ\u00e9{UNCASED}{DIGITS} \t\r\n'sS.,!/_\U0001f600\u200d", NUMBER, "'ll")
# Where llama.cpp cuts otherwise than the models' own tokenizer.json: letters left out.
UNLIKE: dict[str, tuple[str, ...]] = {
    "afmoe": (*DIGITS, *"\ud55c\u0e01\u200d"),  # digits after spaces and formats, scripts side by side
    "cohere2moe": (*UNCASED, *DIGITS, *"ZS"),  # digits after spaces and before letters, cases
    "deepseek-llm": (*DIGITS, NUMBER),  # digits are one each
    "kimi-k2": (*"ZS\u0301\u093f\u094d",),  # capitals after small letters, and marks
    "laguna": ("\r",),  # lines that end in two characters
    "minimax-m2": (*UNCASED,),
    "tekken": (*UNCASED,),
}
LOW: dict[str, object] = {
    "vocab_size": TOKENIZER_SIZE, "eos_token_id": TOKENIZER_SIZE - 1, "hidden_size": 64, "moe_intermediate_size": 32,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
}  # fmt: skip
LATENT: dict[str, dict[str, object]] = {
    **dict.fromkeys(("glm4_moe_lite", "deepseek_v2", "deepseek_v3"), LOW),
    # llama.cpp knows its ramp's ends and where queries begin to grow, at 8,192.
    "mistral4": {
        **LOW, "qk_nope_head_dim": 64, "max_position_embeddings": 2048,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 256,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
            "partial_rotary_factor": 1 / 3,
        },
    },
}  # fmt: skip
WITHOUT_RANK = {key: value for key, value in LOW.items() if key != "q_lora_rank"}
BY_CHANNEL: dict[str, dict[str, object]] = {
    "kimi_linear": {**WITHOUT_RANK, "linear_head_dim": 32, "linear_num_heads": 4},
    "bailing_hybrid": {**WITHOUT_RANK, "head_dim": 32},
    "bailing_hybrid, bounded otherwise": {**WITHOUT_RANK, "head_dim": 64},
}
SHARING: dict[str, object] = {  # the last two layers with caches of their own are of both kinds, as llama.cpp wants
    "num_hidden_layers": 6, "num_kv_shared_layers": 3, "tie_word_embeddings": True,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
}  # fmt: skip
IDS: dict[str, object] = {"vocab_size": TOKENIZER_SIZE, "eos_token_id": TOKENIZER_SIZE - 1}
GEMMA4: dict[str, dict[str, object]] = {
    "gemma4": IDS,
    "gemma4, sparse": IDS,
    "gemma4, shared caches": {**IDS, **SHARING},
    "gemma4, inputs of layers": {**IDS, **SHARING, "vocab_size_per_layer_input": TOKENIZER_SIZE},
}
GRANITE: dict[str, object] = {key: value for key, value in WIDE.items() if key != "head_dim"}
MAMBA: dict[str, dict[str, object]] = {
    "nemotron_h": {
        **MIXED,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "moe_shared_expert_intermediate_size": 32,
        "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "moe"],
    },
    "nemotron_h, dense": {**WIDE, "mamba_num_heads": 8, "mamba_head_dim": 16, "use_bias": False, "use_conv_bias": True},
    "granitemoehybrid": {**GRANITE, "mamba_n_heads": 8, "mamba_d_head": 16, "shared_intermediate_size": 32},
    "falcon_h1": {**WIDE, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128},
    "granitemoehybrid, dense": {
        **GRANITE,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
    },
}
REAL = "TRIFORCE_TEST_LLAMA_CPP"  # the folder of an environment that has xllamacpp


@pytest.fixture
def environment() -> str:
    """The folder that REAL names; a test is skipped without one."""
    found = os.environ.get(REAL)
    return found or pytest.skip(f"{REAL} names no environment that has xllamacpp")


def model_folder(folder: Path, family: str = "llama-gqa", **fields: object) -> Path:
    return save(random_model(family, **fields), folder / "model", tokenizer=True)


def first_of(program: Program) -> Setting:
    return {part: values[0] for part, values in program.choices.items()}


def written(folder: Path, *, dtype: str) -> GGUFReader:
    write_gguf(folder, folder / "model.gguf", dtype=dtype)
    return GGUFReader(folder / "model.gguf")


def values(reader: GGUFReader) -> dict[str, object]:
    return {name: field.contents() for name, field in reader.fields.items()}


def tensors(reader: GGUFReader) -> dict[str, Tensor]:
    """fp32 and bf16 as fp32."""
    found = {}
    for tensor in reader.tensors:
        data = np.array(tensor.data)
        if tensor.tensor_type.name == "BF16":
            data = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        found[tensor.name] = torch.from_numpy(data)
    return found


class TestFile:
    def test_it_says_what_the_config_says(self, tmp_path):
        folder = model_folder(tmp_path, eos_token_id=5, bos_token_id=4, rope_parameters=YARN)
        found = values(written(folder, dtype="bf16"))
        said = {name.removeprefix("llama."): value for name, value in found.items()}
        assert said["general.architecture"] == "llama"
        shape = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count")
        assert [said[name] for name in shape] == [2, 32, 48, 4]
        assert [said[f"attention.{name}"] for name in ("head_count_kv", "key_length", "value_length")] == [2, 8, 8]
        assert said["attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
        assert (said["rope.freq_base"], said["rope.dimension_count"]) == (10000.0, 8)
        assert said["rope.scaling.type"] == "yarn"
        assert (said["rope.scaling.factor"], said["rope.scaling.original_context_length"]) == (4.0, 64)
        tokens = said["tokenizer.ggml.tokens"]
        assert (len(tokens), tokens[0], tokens[95]) == (96, "t0", "t95")
        assert (said["tokenizer.ggml.eos_token_id"], said["tokenizer.ggml.bos_token_id"]) == (5, 4)

    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    def test_weights_are_the_models_matrices_in_its_dtype_and_vectors_in_fp32(self, tmp_path, dtype):
        folder = model_folder(tmp_path, "qwen3")
        reader = written(folder, dtype=dtype)
        state, found = random_model("qwen3").state_dict(), tensors(reader)
        assert len(found) == len(state)
        wide = {tensor.name for tensor in reader.tensors if tensor.tensor_type.name == "F32"}
        assert (wide == found.keys()) if dtype == "fp32" else all("norm" in name for name in wide)
        places = {
            "token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm",
            "blk.1.attn_q": "model.layers.1.self_attn.q_proj", "blk.0.attn_k_norm": "model.layers.0.self_attn.k_norm",
            "blk.0.attn_output": "model.layers.0.self_attn.o_proj", "blk.1.ffn_down": "model.layers.1.mlp.down_proj",
            "blk.1.ffn_norm": "model.layers.1.post_attention_layernorm",
        }  # fmt: skip
        for name, source in places.items():
            weight = state[f"{source}.weight"]
            rounded = weight if weight.dim() == 1 or dtype == "fp32" else weight.bfloat16().float()
            assert torch.equal(found[f"{name}.weight"], rounded), name

    def test_4_bits_are_ggmls(self, tmp_path):
        """Of a folder's numbers; embeddings and head have 8 bits."""
        fields = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
        reader = written(model_folder(tmp_path, "qwen3", **fields), dtype="q4_0")
        state = random_model("qwen3", **fields).state_dict()
        kinds = {tensor.name: tensor.tensor_type for tensor in reader.tensors}
        assert kinds["blk.0.attn_norm.weight"] == GGMLQuantizationType.F32
        sources = {
            "token_embd": "model.embed_tokens",
            "output": "lm_head",
            "blk.1.ffn_down": "model.layers.1.mlp.down_proj",
        }
        for name, source in sources.items():
            kind = GGMLQuantizationType.Q4_0 if name.startswith("blk") else GGMLQuantizationType.Q8_0
            [found] = [tensor.data for tensor in reader.tensors if tensor.name == f"{name}.weight"]
            assert kinds[f"{name}.weight"] == kind
            assert np.array_equal(found, quantize(state[f"{source}.weight"].numpy(), kind)), name

    def test_4_bits_of_other_shapes_are_refused(self, tmp_path):
        with pytest.raises(ModelError, match=r"rows of 48 numbers; ggml's 4 bits come in blocks of 32"):
            written(model_folder(tmp_path), dtype="q4_0")

    def test_a_gguf_file_is_copied_byte_for_byte_with_ids_for_its_vocabulary(self, tmp_path):
        fields = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
        first = model_folder(tmp_path, "qwen3", **fields)
        write_gguf(first, tmp_path / "first.gguf", dtype="q4_0", names=[f"word {token}" for token in range(96)])
        write_gguf(tmp_path / "first.gguf", tmp_path / "second.gguf", dtype="bf16")
        one, other = GGUFReader(tmp_path / "first.gguf"), GGUFReader(tmp_path / "second.gguf")
        for mine, theirs in zip(one.tensors, other.tensors, strict=True):
            assert (mine.name, mine.tensor_type) == (theirs.name, theirs.tensor_type)
            assert np.array_equal(mine.data, theirs.data)
        assert (values(one)["tokenizer.ggml.tokens"][5], values(other)["tokenizer.ggml.tokens"][5]) == ("word 5", "t5")

    def test_a_llamas_pairs_become_neighbours(self, tmp_path):
        """The rows of q and k, and of their biases: i and i + D/2 of a head become 2i and 2i + 1."""
        folder = model_folder(tmp_path, "llama-biased")
        state, found = random_model("llama-biased").state_dict(), tensors(written(folder, dtype="fp32"))
        for ours, theirs, num_heads in (("q_proj", "attn_q", 4), ("k_proj", "attn_k", 2)):
            for kind in ("weight", "bias"):
                source, moved = state[f"model.layers.0.self_attn.{ours}.{kind}"], found[f"blk.0.{theirs}.{kind}"]
                for head in range(num_heads):
                    for pair in range(4):
                        assert torch.equal(moved[8 * head + 2 * pair], source[8 * head + pair])
                        assert torch.equal(moved[8 * head + 2 * pair + 1], source[8 * head + pair + 4])
        assert torch.equal(found["blk.0.attn_v.weight"], state["model.layers.0.self_attn.v_proj.weight"])

    def test_llama3_scaling_is_a_tensor_of_divisors(self, tmp_path):
        folder = model_folder(tmp_path, rope_parameters=LLAMA3)
        divisors = tensors(written(folder, dtype="fp32"))["rope_freqs.weight"]
        assert divisors.tolist() == pytest.approx([1.0, divisors[1].item(), 8.0, 8.0], rel=1e-5)
        assert 1.0 < divisors[1] <= 8.0

    def test_a_rotation_that_llama_cpp_does_not_have_is_refused(self, tmp_path):
        folder = model_folder(tmp_path, rope_parameters=DYNAMIC_ROPE)
        with pytest.raises(ModelError, match="no rope_type dynamic"):
            written(folder, dtype="fp32")

    def test_a_full_disk_is_seen_before_it_is_written(self, tmp_path, monkeypatch):
        folder = model_folder(tmp_path)
        monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
        with pytest.raises(DoesNotFit, match=r"model\.gguf needs"):
            written(folder, dtype="fp32")

    def test_files_are_gone_afterwards(self, tmp_path, monkeypatch):
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
        with model_files() as write:
            assert write(model_folder(tmp_path), "fp32").stat().st_size > 10_000
        assert not list((tmp_path / "cache").iterdir())


class TestProcess:
    @pytest.fixture
    def fake(self, tmp_path: Path) -> Iterator[Peer]:
        python = str(fake_environment(tmp_path / "env") / "bin" / "python")
        with open_llama_cpp(python, tmp_path / "model.gguf", SETTING | {"threads": 3}, context=100) as fake:
            yield fake

    def test_it_is_told_its_options_and_answers_with_tokens_and_seconds(self, fake, tmp_path):
        """What the library prints is no answer."""
        assert fake.about == {
            "model": str(tmp_path / "model.gguf"), "context": 100, "slots": 1, "threads": 3,
            "prompt_threads": torch.get_num_threads(), "cache": "f16", "flash": False, "ubatch": 2048, "draft": None,
            "lookup": None, "rows": None, "wait_policy": None,
        }  # fmt: skip
        for prompt in ([1, 2], [3]):
            tokens, seconds = fake.generate(prompt, GREEDY, max_tokens=3, end_tokens=())
            assert tokens == [3, 4, 5]
            assert seconds == [0.5, 0.75, 1.0]
        assert 1e6 < fake.peak_bytes < 1e9

    def test_several_prompts_are_continued_side_by_side(self, fake):
        assert fake.generate_all([[1, 2], [5]], GREEDY, max_tokens=2, end_tokens=()) == ([[3, 4], [5, 6]], 0.75)

    def test_its_last_words_are_the_error(self, fake):
        with pytest.raises(TriforceError, match=r"llama\.cpp ended with exit code 1: ValueError: an empty prompt"):
            fake.generate([], GREEDY, max_tokens=3, end_tokens=())

    def test_it_ends_with_whoever_asked(self, tmp_path):
        python = str(fake_environment(tmp_path / "env") / "bin" / "python")
        before = set(psutil.Process().children())
        with open_llama_cpp(python, tmp_path, SETTING, context=100):
            assert set(psutil.Process().children()) - before
        assert not set(psutil.Process().children()) - before

    def test_one_that_does_not_start_says_why(self, tmp_path):
        python = str(fake_environment(tmp_path / "env") / "bin" / "python")
        with pytest.raises(TriforceError, match="no room for lookups"):
            open_llama_cpp(python, tmp_path, SETTING, context=100, lookup="mod")

    def test_how_its_threads_wait_is_its_setting_and_nothing_of_ours(self, tmp_path, monkeypatch):
        """What OpenMP reads is chosen for this program, and may slow another one."""
        monkeypatch.setenv("OMP_WAIT_POLICY", "1")
        assert without_openmp({"OMP_X": "1", "GOMP_X": "1", "KMP_X": "1", "PATH": "/bin"}) == {"PATH": "/bin"}
        python = str(fake_environment(tmp_path / "env") / "bin" / "python")
        for policy, found in (("default", None), ("passive", "passive")):
            with open_llama_cpp(python, tmp_path, SETTING | {"wait_policy": policy}, context=100) as fake:
                assert fake.about["wait_policy"] == found


class TestWheel:
    def test_it_is_not_run_beside_threads_that_wait_awake_for_ever(self, monkeypatch, tmp_path):
        fake_environment(tmp_path / "env")
        monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
        with pytest.raises(UsageError, match=r"OMP_WAIT_POLICY is ACTIVE.*unset it"):
            python_of(tmp_path / "env")

    def test_a_folder_that_is_no_environment_is_named(self, tmp_path):
        assert str(tmp_path) in str(wheel_python(str(tmp_path)))

    def test_none_is_none(self):
        assert isinstance(wheel_python("none"), TriforceError)

    @pytest.mark.parametrize(("family", "fields"), CASES)
    def test_llama_cpp_writes_what_we_write(self, environment, tmp_path, monkeypatch, family, fields):
        """fp32 throughout, so that only the arithmetic is compared."""
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
        model = model_folder(tmp_path, family, vocab_size=TOKENIZER_SIZE, eos_token_id=TOKENIZER_SIZE - 1, **fields)
        prompt = random_tokens(150, vocabulary=256)
        plan = tiny_plan(model, None, replace(Sizes(), capacity=200), num_prompt_tokens=150, max_tokens=20)
        with tiny_engine(plan, model) as engine:
            ours = [
                token
                for step in engine.generate(GenerationRequest(prompt, GREEDY, max_tokens=20))
                for token in step.tokens
            ]
        python = python_of(Path(environment))
        with llama_cpp_of(python, model, dtype="fp32") as program, program.start(first_of(program), 200) as llama_cpp:
            for _ in range(2):
                theirs, seconds = llama_cpp.generate(prompt, GREEDY, max_tokens=20, end_tokens=[TOKENIZER_SIZE - 1])
                assert theirs == ours
                assert seconds == sorted(seconds)

    @pytest.mark.parametrize("name", STATES)
    @pytest.mark.parametrize("length", [3, 150])
    def test_llama_cpp_writes_what_we_write_of_a_file_with_states(self, environment, tmp_path, name, length):
        """Keys and values of one size, as it wants them."""
        rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2]}
        fields = {
            "vocab_size": TOKENIZER_SIZE, "eos_token_id": TOKENIZER_SIZE - 1, "hidden_size": 64, "head_dim": 32,
            "linear_key_head_dim": 32, "linear_value_head_dim": 32, "rope_parameters": rope, **STATES[name],
        }  # fmt: skip
        assert_same_text(environment, save_tiny("qwen3_5", tmp_path / "model", tokenizer=True, **fields), length)

    @pytest.mark.parametrize("name", SEEING)
    def test_llama_cpp_writes_what_we_write_of_texts_of_a_model_that_sees_pictures(self, environment, tmp_path, name):
        folder = save_tiny(name, tmp_path / "model", tokenizer=True, **SEEING[name])
        assert_same_text(environment, folder, 150)

    @pytest.mark.parametrize("length", [3, 150])
    @pytest.mark.parametrize("name", MIXTURES)
    def test_llama_cpp_writes_what_we_write_of_a_mixture(self, environment, tmp_path, name, length):
        folder = save_tiny(name, tmp_path / "model", tokenizer=True, **MIXTURES[name])
        assert_same_text(environment, folder, length)

    @pytest.mark.parametrize("pre", sorted({make: name for name, make in CUTS.items()}.values()))  # one of each kind
    def test_llama_cpp_has_the_ids_that_we_have(self, environment, tmp_path, pre):
        """Of 200 texts, with merges across all kinds of characters, which tell cuts apart."""
        random, letters = Random(pre), [each for each in LETTERS if each not in UNLIKE.get(pre, ())]
        texts = [normalize("NFC", "".join(random.choices(letters, k=random.randint(1, 30)))) for _ in range(200)]
        trained = merged_across(texts)
        folder = save(random_model("llama-gqa", vocab_size=len(trained.get_vocab()) + 2), tmp_path / "model")
        file, change = tmp_path / "model.gguf", partial(add_vocabulary, trained, pre)
        write_converted(folder, file, tokenizer="", change=change)
        _, pipeline = gguf_tokenizer.load(file)
        asked = subprocess.run(
            [python_of(Path(environment)), "-c", TOKENIZED], input=json.dumps({"model": str(file), "texts": texts}),
            text=True, stdout=subprocess.PIPE, check=True,
        )  # fmt: skip
        theirs = json.loads(asked.stdout.splitlines()[-1])
        for text, ids in zip(texts, theirs, strict=True):
            assert (text, pipeline.encode(text, add_special_tokens=False).ids) == (text, ids)

    @pytest.mark.parametrize("joins_states", [False, True])
    @pytest.mark.parametrize("length", [3, 150])
    def test_llama_cpp_writes_what_we_write_of_qwen3_next(self, environment, tmp_path, length, joins_states):
        folder = save_tiny("qwen3_next", tmp_path / "model", tokenizer=True, **NEXT)
        assert_same_text(environment, folder, length, joins_states=joins_states)

    @pytest.mark.parametrize("name", GRAMS)
    @pytest.mark.parametrize("length", [1, 3, 60, 61, 62, 63, 150])
    def test_llama_cpp_writes_what_we_write_of_qwen3_8_flash_next(self, environment, tmp_path, length, name):
        """Beyond the budget of its indexer, at all lengths of the last block."""
        folder = save_tiny(name, tmp_path / "model", tokenizer=True, **GRAMS[name])
        assert_same_text(environment, with_head(folder), length)

    @pytest.mark.parametrize("name", GEMMA4)
    @pytest.mark.parametrize("length", [1, 3, 150])
    def test_llama_cpp_writes_what_we_write_of_gemma4(self, environment, tmp_path, length, name):
        """E2B and E4B among them: caches of other layers, and inputs of layers from a table."""
        assert_same_text(environment, save_tiny(name, tmp_path / "model", tokenizer=True, **GEMMA4[name]), length)

    @pytest.mark.parametrize("name", ["lfm2", "lfm2_moe"])
    @pytest.mark.parametrize("length", [1, 3, 150])
    def test_llama_cpp_writes_what_we_write_of_short_convolutions(self, environment, tmp_path, length, name):
        """Heads that are as wide as rows together, as it wants them."""
        fields = {"vocab_size": TOKENIZER_SIZE, "eos_token_id": TOKENIZER_SIZE - 1, "hidden_size": 64, "head_dim": 16}
        assert_same_text(environment, save_tiny(name, tmp_path / "model", tokenizer=True, **fields), length)

    @pytest.mark.parametrize("name", LATENT)
    @pytest.mark.parametrize("length", [3, 150])
    def test_llama_cpp_writes_what_we_write_of_latent_attention(self, environment, tmp_path, length, name):
        assert_same_text(environment, save_tiny(name, tmp_path / "model", tokenizer=True, **LATENT[name]), length)

    @pytest.mark.parametrize("name", BY_CHANNEL)
    @pytest.mark.parametrize("length", [1, 3, 150])
    def test_llama_cpp_writes_what_we_write_of_states_that_decay_by_channel(self, environment, tmp_path, length, name):
        """In layers between some of latent attention."""
        folder = save_tiny(name, tmp_path / "model", tokenizer=True, **BY_CHANNEL[name])
        assert_same_text(environment, folder, length)

    @pytest.mark.parametrize("name", MAMBA)
    @pytest.mark.parametrize("length", [3, 150])
    def test_llama_cpp_writes_what_we_write_of_mamba_2(self, environment, tmp_path, length, name):
        assert_same_text(environment, save_tiny(name, tmp_path / "model", tokenizer=True, **MAMBA[name]), length)


def assert_same_text(environment: str, folder: Path, length: int, **form: bool) -> None:
    """Of a folder's GGUF file, 40 tokens in fp32 after a prompt of this length. form: of `write_gguf`."""
    file = folder.with_suffix(".gguf")
    write_converted(folder, file, tokenizer="", change=with_ids, **form)
    prompt = random_tokens(length, vocabulary=256)
    plan = tiny_plan(file, None, replace(Sizes(), capacity=200), num_prompt_tokens=length, max_tokens=40)
    with tiny_engine(plan, file) as engine:
        steps = engine.generate(GenerationRequest(prompt, GREEDY, max_tokens=40))
        ours = [token for step in steps for token in step.tokens]
    python = python_of(Path(environment))
    with open_llama_cpp(python, file, SETTING | {"cache": "f32"}, context=200) as llama_cpp:
        theirs, _ = llama_cpp.generate(prompt, GREEDY, max_tokens=40, end_tokens=[TOKENIZER_SIZE - 1])
    assert theirs == ours


def merged_across(texts: Sequence[str]) -> RawTokenizer:
    """A byte-level tokenizer whose merges are of these texts, uncut."""
    found = RawTokenizer(BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    found.train_from_iterator(texts, BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False))
    return found


def add_vocabulary(trained: RawTokenizer, pre: str, writer: GGUFWriter) -> None:
    vocabulary = trained.get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*sorted(vocabulary, key=vocabulary.__getitem__), "<s>", "</s>"])
    writer.add_token_types([1] * len(vocabulary) + [3, 3])
    writer.add_token_merges([" ".join(merge) for merge in json.loads(trained.to_str())["model"]["merges"]])
    writer.add_bos_token_id(len(vocabulary))
    writer.add_eos_token_id(len(vocabulary) + 1)


def with_ids(writer: GGUFWriter) -> None:
    """Ids for a vocabulary, as benchmarks have them."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token_name(token) for token in range(TOKENIZER_SIZE)])
    writer.add_token_types([1] * TOKENIZER_SIZE)
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(TOKENIZER_SIZE - 1)
