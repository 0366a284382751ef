"""Qwen3.8-Flash-Next in small, in 8 bits on a CPU, beside llama.cpp: seconds of a prompt and of a token, in turns.

usage: python benchmarks/flash.py [--length 1024] [--tokens 48] [--turns 3] [--layers 8] [--file FILE]
                                  [--peers-env DIR]

The model is made up: hidden size 1,024, three layers with a state before each that attends, four residual streams, an
n-gram table, 64 experts of which a token uses 8, an index of blocks of 4 tokens whose rows choose 2,048. Matrices and
experts are in Q8_0. Both programs decode greedily, without drafts, from the same file and prompts, in turns;
llama.cpp runs without flash attention unless --flash. --file: the model, made if it is missing and kept. A token's time
is the median of those after the first.
"""

from __future__ import annotations

import offload  # noqa: F401  # isort: skip  # before torch, which reads its threads' wait policy once

import argparse
import math
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from llama_cpp import token_name
from peer import needed_wheel_python, open_llama_cpp
from program import Setting
from report import about, emit, say

from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine, load_tokenizer, plan_request
from offload.engine.request import GenerationRequest
from offload.plan.planner import Options

ARCH, VOCABULARY, HIDDEN, HEADS, KV_HEADS, DIM = "qwen4exp", 32000, 1024, 8, 2, 256
KEY_HEADS, VALUE_HEADS, STATE = 8, 24, 128
EXPERTS, USED, INNER = 64, 8, 512
STREAMS, RANK = 4, 128
BUDGET, RATIO, INDEX_HEADS, INDEX_DIM = 2048, 4, 4, 128
GRAMS = [4001, 4003, 4007, 4013, 4019, 4021, 4027, 4049, 4051, 4057, 4073, 4079, 4091, 4093, 4099, 4111]  # rows of each
GRAM_DIM = 64
MULTIPLIERS = [32033771619147, 158025455559655, 116428443759837]
GREEDY = SamplingParams(temperature=0.0)
Moments = list[float]  # seconds from the start to each token


def write_model(file: Path, num_layers: int) -> None:
    """Write the model: matrices in Q8_0, routers, convolutions and norms in fp32."""
    random, writer = np.random.default_rng(0), gguf.GGUFWriter(file, ARCH)
    _metadata(writer, num_layers)

    def matrix(name: str, *shape: int) -> None:
        blocks = random.integers(0, 256, (math.prod(shape) // 32, 34), dtype=np.uint8)
        scales = random.normal(0, 0.0135 / shape[-1] ** 0.5, len(blocks)).astype(np.float16)
        blocks[:, :2] = scales[:, None].view(np.uint8)
        writer.add_tensor(f"{name}.weight", blocks.reshape(*shape[:-1], -1), raw_dtype=Kind.Q8_0)

    def numbers(name: str, *shape: int, mean: float = 0.0, spread: float = 0.0) -> None:
        writer.add_tensor(name, (mean + random.normal(0, spread, shape)).astype(np.float32))

    def norm(name: str, size: int) -> None:
        numbers(f"{name}.weight", size, mean=1.0)

    def mean_of_streams(name: str, *, inject: bool = True) -> None:
        wide = STREAMS * HIDDEN
        norm(f"{name}_norm", wide)
        matrix(f"{name}_down", RANK, wide)
        matrix(f"{name}_up", wide, RANK)
        if inject:
            matrix(f"{name}_inject", STREAMS, wide)

    matrix("token_embd", VOCABULARY, HIDDEN)
    matrix("output", VOCABULARY, HIDDEN)
    matrix("per_layer_token_embd", -(-sum(GRAMS) // 8) * 8, GRAM_DIM)
    mean_of_streams("output_hc", inject=False)
    for layer in range(num_layers):
        blk, keys, values = f"blk.{layer}.", KEY_HEADS * STATE, VALUE_HEADS * STATE
        if layer % 4 == 3:
            for part, outputs in (("q", 2 * HEADS * DIM), ("k", KV_HEADS * DIM), ("v", KV_HEADS * DIM)):
                matrix(f"{blk}attn_{part}", outputs, HIDDEN)
            matrix(f"{blk}attn_output", HIDDEN, HEADS * DIM)
            matrix(f"{blk}indexer.q_proj", INDEX_HEADS * INDEX_DIM, HIDDEN)
            matrix(f"{blk}indexer.k_proj", INDEX_DIM, HIDDEN)
            for part, size in (("attn_", DIM), ("indexer.", INDEX_DIM)):
                norm(f"{blk}{part}q_norm", size)
                norm(f"{blk}{part}k_norm", size)
        else:
            matrix(f"{blk}attn_qkv", 2 * keys + values, HIDDEN)
            matrix(f"{blk}attn_gate", values, HIDDEN)
            matrix(f"{blk}ssm_out", HIDDEN, values)
            matrix(f"{blk}ssm_alpha", VALUE_HEADS, HIDDEN)
            matrix(f"{blk}ssm_beta", VALUE_HEADS, HIDDEN)
            numbers(f"{blk}ssm_a", VALUE_HEADS, mean=-0.4)
            numbers(f"{blk}ssm_dt.bias", VALUE_HEADS, spread=0.3)
            numbers(f"{blk}ssm_conv1d.weight", 2 * keys + values, 4, spread=0.5)
            norm(f"{blk}ssm_norm", STATE)
        mean_of_streams(f"{blk}hc_attn")
        mean_of_streams(f"{blk}hc_ffn")
        numbers(f"{blk}ffn_gate_inp.weight", EXPERTS, HIDDEN, spread=0.1)
        numbers(f"{blk}ffn_gate_inp_shexp.weight", HIDDEN, spread=0.03)
        for part, outputs, inputs in (("gate", INNER, HIDDEN), ("up", INNER, HIDDEN), ("down", HIDDEN, INNER)):
            matrix(f"{blk}ffn_{part}_exps", EXPERTS, outputs, inputs)
            matrix(f"{blk}ffn_{part}_shexp", outputs, inputs)
    wide = STREAMS * HIDDEN
    matrix("blk.1.ple_key", wide, len(GRAMS) * GRAM_DIM)
    matrix("blk.1.ple_value", HIDDEN, len(GRAMS) * GRAM_DIM)
    numbers("blk.1.ple_conv1d.weight", wide, 4, spread=0.5)
    for part in ("key", "query", "conv"):
        norm(f"blk.1.ple_norm_{part}", wide)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _metadata(writer: gguf.GGUFWriter, num_layers: int) -> None:
    attends = [layer % 4 == 3 for layer in range(num_layers)]
    counts: dict[str, Any] = {
        "block_count": num_layers, "context_length": 1 << 18, "embedding_length": HIDDEN,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": DIM,
        "attention.value_length": DIM, "expert_count": EXPERTS, "expert_used_count": USED,
        "expert_feed_forward_length": INNER, "expert_shared_feed_forward_length": INNER,
        "hyper_connection.count": STREAMS, "hyper_connection.low_rank": RANK,
        "attention.indexer.head_count": INDEX_HEADS, "attention.indexer.key_length": INDEX_DIM,
        "attention.indexer.top_k": BUDGET, "ssm.conv_kernel": 4, "ssm.state_size": STATE,
        "ssm.group_count": KEY_HEADS, "ssm.time_step_rank": VALUE_HEADS, "ssm.inner_size": VALUE_HEADS * STATE,
        "full_attention_interval": 4, "rope.dimension_count": DIM // 4, "ple.ngram_size": 3,
        "ple.heads_per_ngram": len(GRAMS) // 2, "ple.conv_kernel": 4, "ple.eos_token_id": VOCABULARY - 1,
        "ple.image_token_id": VOCABULARY - 2, "embedding_length_per_layer_input": GRAM_DIM,
    }  # fmt: skip
    for key, value in counts.items():
        writer.add_uint32(f"{ARCH}.{key}", value)
    writer.add_float32(f"{ARCH}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{ARCH}.rope.freq_base", 1e7)
    writer.add_array(f"{ARCH}.attention.compress_ratios", [RATIO * each for each in attends])
    writer.add_array(f"{ARCH}.attention.recurrent_layers", [not each for each in attends])
    writer.add_array(f"{ARCH}.rope.dimension_sections", [11, 11, 10, 0])
    writer.add_array(f"{ARCH}.ple.layers", [1])
    offsets = [sum(GRAMS[:at]) for at in range(len(GRAMS))]
    for key, found in (("layer_multipliers", MULTIPLIERS), ("head_offsets", offsets), ("head_vocab_sizes", GRAMS)):
        kinds = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT64
        writer.add_key_value(f"{ARCH}.ple.{key}", found, *kinds)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token_name(token) for token in range(VOCABULARY)])
    writer.add_token_types([int(gguf.TokenType.NORMAL)] * VOCABULARY)
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(VOCABULARY - 1)


def of_engine(engine: Engine, prompt: list[int], tokens: int) -> tuple[list[int], Moments]:
    """The text of this program, and when each token was there."""
    said, moments, start = list[int](), list[float](), perf_counter()
    for step in engine.generate(GenerationRequest(prompt, GREEDY, max_tokens=tokens, end_tokens=(), reuse=False)):
        said += step.tokens
        moments += [perf_counter() - start] * len(step.tokens)
    return said, moments


def each_of(moments: Moments) -> float:
    """Milliseconds of the middle token after the first."""
    return 1000 * median(after - before for before, after in pairwise(moments))


def in_turns(file: Path, python: str, setting: Setting, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A run of each program for each turn, on the turn's own prompt. same: tokens that both wrote in the same place."""
    random, runs = np.random.default_rng(1), list[dict[str, Any]]()
    options = Options(speculation=False, dtype="bf16", device="cpu")
    plan = plan_request(file, None, options, num_prompt_tokens=args.length, max_tokens=args.tokens)
    with (
        Engine.load(plan, file, None, load_tokenizer(file, None)) as engine,
        open_llama_cpp(python, file, setting, context=args.length + args.tokens + 8) as peer,
    ):
        for turn in range(args.turns):
            prompt = [int(each) for each in random.integers(1, VOCABULARY - 2, args.length)]
            ours, own = of_engine(engine, prompt, args.tokens)
            theirs, other = peer.generate(prompt, GREEDY, max_tokens=args.tokens, end_tokens=())
            same = sum(mine == yours for mine, yours in zip(ours, theirs, strict=True))
            for name, moments in (("triforce", own), ("llama.cpp", other)):
                runs.append({"name": name, "prompt": moments[0], "token": each_of(moments), "same": same})
                say(f"{turn + 1} of {args.turns}: {runs[-1]}")
    return runs


def middle_of(runs: list[dict[str, Any]], name: str) -> tuple[float, float]:
    """The medians of a program's runs: seconds of the prompt, ms of a token."""
    own = [run for run in runs if run["name"] == name]
    return median(run["prompt"] for run in own), median(run["token"] for run in own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8, help="a multiple of 4")
    parser.add_argument("--flash", action="store_true")
    parser.add_argument("--file", type=Path)
    parser.add_argument("--peers-env", default="")
    args = parser.parse_args()
    python = needed_wheel_python(args.peers_env)
    setting = {
        "wait_policy": "default", "flash_attention": "on" if args.flash else "off", "cache": "f16",
        "threads": torch.get_num_threads(), "ubatch": 512,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        file = args.file or Path(folder) / "flash.gguf"
        if not file.exists():
            write_model(file, args.layers)
            say(f"{file.stat().st_size / 1e9:.2f} GB written")
        runs = in_turns(file, python, setting, args)
    middle = {name: middle_of(runs, name) for name in ("triforce", "llama.cpp")}
    rows = list[list[str]]()
    for name, own in middle.items():
        beside = [f"{mine / yours:.2f}" for mine, yours in zip(own, middle["llama.cpp"], strict=True)]
        rows.append([name, f"{own[0]:.2f}", f"{own[1]:.2f}", ", ".join(beside)])
    title = f"Qwen3.8-Flash-Next in small, {args.length} tokens of prompt, beside llama.cpp"
    emit(["", "prompt, s", "ms/token", "of llama.cpp's"], rows, about(title, 0, setting=setting), runs)


if __name__ == "__main__":
    main()
