"""llama.cpp beside us: the GGUF file it reads, the process it is, and, where its wheel is there, its text."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import quantize
from torch import Tensor

from fake_peers import fake_environment
from models import (
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
from offload.bench import peer
from offload.bench.gguf_file import write_gguf
from offload.bench.peer import (
    ENVIRONMENT_VARIABLE,
    Peer,
    llama_cpp_of,
    llama_cpp_python,
    model_files,
    open_llama_cpp,
    without_openmp,
)  # fmt: skip
from offload.bench.program import Program
from offload.bench.reference import Reference
from offload.bench.setting import Setting
from offload.bench.trial import milliseconds_after_first
from offload.engine.request import GenerationRequest
from offload.errors import DoesNotFit, ModelError, TriforceError, UsageError
from offload.plan.rates import FOLDER_VARIABLE

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
REAL = "TRIFORCE_TEST_LLAMA_CPP"  # the folder of an environment that has xllamacpp


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
        """Bytes as its own Python library makes them; embeddings and head have 8 bits."""
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

    def test_tokens_that_come_together_are_timed_after_the_first_moment(self):
        assert milliseconds_after_first([1.0, 1.5, 1.5, 2.0]) == pytest.approx(1000 / 3)
        assert milliseconds_after_first([1.0, 1.0, 2.0]) == pytest.approx(1000)
        assert milliseconds_after_first([1.0]) is None


class TestWheel:
    def test_it_is_not_run_beside_threads_that_wait_awake_for_ever(self, monkeypatch):
        monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
        with pytest.raises(UsageError, match=r"OMP_WAIT_POLICY is ACTIVE.*unset it"):
            llama_cpp_python()

    def test_where_it_is_absent_the_error_says_what_to_do(self, monkeypatch):
        monkeypatch.setattr(peer, "find_spec", lambda name: None)
        with pytest.raises(UsageError, match=f"pip install xllamacpp.*{ENVIRONMENT_VARIABLE}"):
            llama_cpp_python()

    def test_a_folder_that_is_no_environment_is_named(self, monkeypatch, tmp_path):
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path))
        with pytest.raises(UsageError, match=f"{ENVIRONMENT_VARIABLE} is {tmp_path}"):
            llama_cpp_python()

    @pytest.mark.parametrize(("family", "fields"), CASES)
    def test_llama_cpp_writes_what_we_write(self, tmp_path, monkeypatch, family, fields):
        """fp32 throughout, so that only the arithmetic is compared."""
        if folder := os.environ.get(REAL):
            monkeypatch.setenv(ENVIRONMENT_VARIABLE, folder)
        try:
            llama_cpp_python()
        except UsageError as error:
            pytest.skip(str(error))
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
        with llama_cpp_of(model, dtype="fp32") as program, program.start(first_of(program), 200) as llama_cpp:
            for _ in range(2):
                theirs, seconds = llama_cpp.generate(prompt, GREEDY, max_tokens=20, end_tokens=[TOKENIZER_SIZE - 1])
                assert theirs == ours
                assert seconds == sorted(seconds)


class TestTransformers:
    @pytest.mark.parametrize("speculation", ["draft", "lookup"])
    def test_with_speculation_it_writes_the_same_text_in_every_turn(self, tmp_path, speculation):
        """Bug of its: with the prompt's rows kept, speculation writes another text."""
        model = model_folder(tmp_path, vocab_size=TOKENIZER_SIZE)
        prompt = random_tokens(20, vocabulary=256) * 3
        kind = {"draft": {"draft": model}, "lookup": {"lookup": 10}}[speculation]
        plain, other = (Reference(model, dtype="fp32", device="cpu", **options) for options in ({}, kind))
        text, _ = plain.generate(prompt, GREEDY, max_tokens=12, end_tokens=())
        for _ in range(2):
            tokens, seconds = other.generate(prompt, GREEDY, max_tokens=12, end_tokens=())
            assert tokens == text
            assert len(seconds) == 12
            assert seconds == sorted(seconds)


def test_bench_measures_llama_cpp_beside_us(tmp_path, triforce, monkeypatch):
    """A llama.cpp that counts upwards, a quarter of a second a token. Bug: one process for all contexts had read the
    beginning of the second prompt with the first, so that it seemed to read it faster."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(fake_environment(tmp_path / "env")))
    fewer = {part: (value,) for part, value in SETTING.items()}
    fewer |= {"flash_attention": ("on", "off"), "cache": ("f16", "f32")}
    monkeypatch.setattr(peer, "llama_cpp_choices", lambda dtype: fewer)
    model = model_folder(tmp_path, vocab_size=TOKENIZER_SIZE)
    (tmp_path / "text.txt").write_text("A line of text. " * 20)
    args = ("bench", "--model", str(model), "--prompt-file", str(tmp_path / "text.txt"), "--device", "cpu", "--quiet")
    args = (*args, "--dtype", "bf16", "--max-tokens", "8", "--repeats", "1", "--against", "llama.cpp", "--contexts")
    code, out, err = triforce(*args, "100,200", "--json")
    assert (code, err) == (0, "")
    for context in json.loads(out)["contexts"]:
        assert context["milliseconds_per_token"]["llama.cpp"]["median"] == pytest.approx(250)
        assert context["prefill_tokens_per_second"]["llama.cpp"] == pytest.approx((context["context"] - 8) / 0.5)
        assert context["first_difference_from_plain"]["llama.cpp"] is not None
        found, tried = context["other"]["setting"], context["other"]["tried"]
        assert found == SETTING
        assert {(trial["setting"]["flash_attention"], trial["milliseconds_per_token"]) for trial in tried} == {
            ("off", 250), ("on", 750), ("off", None),
        }  # fmt: skip
        assert [trial["setting"]["cache"] for trial in tried if trial["error"]] == ["f32"]
        assert {"plain", "llama.cpp"} == context["ratios"].keys()
    code, out, _ = triforce(*args, "100")
    assert code == 0
    assert "llama.cpp, ms/token               250" in out
    assert "llama.cpp wrote other tokens (from token" in out
    said = " ".join(out.split())
    assert "At 100 tokens llama.cpp ran with wait policy default, flash attention off, cache f16" in said
    table = ["Tried after 92 tokens, ms/token and seconds to the first:", "750 0.50 flash attention on"]
    assert " ".join([*table, "250 0.50 this setting", "failed cache f32"]) in said


def test_bench_without_the_wheel_says_what_to_do(triforce, monkeypatch):
    monkeypatch.setattr(peer, "find_spec", lambda name: None)
    code, out, err = triforce("bench", "--against", "llama.cpp")
    assert (code, out) == (2, "")
    assert "pip install xllamacpp" in err
    assert ENVIRONMENT_VARIABLE in err
