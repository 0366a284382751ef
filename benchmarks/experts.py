"""A mixture of experts in 4 bits on a CPU, beside llama.cpp: seconds of a prompt and of a token, in turns.

usage: python benchmarks/experts.py [--layers 16] [--length 1024] [--tokens 48] [--turns 3] [--experts 64] [--used 4]
                                    [--stored Q4_0] [--host-memory GB] [--file FILE] [--peers-env DIR]

The model is made up, of 64 experts of which a token uses 4, and stored in Q4_0, or as Q4_K_M files are: half of the
layers' values and last matrices of experts in Q6_K. Rows choose experts at random, more evenly than those of a text.
Both programs decode greedily, without drafts, from the same file and prompt; llama.cpp has the better of its two
attentions. --host-memory: of this program's experts, as its option; llama.cpp maps the file, and has what the system
leaves it: run both where memory is limited. --file: the model, made if it is missing and kept. "read" is the rate at
which this program reads the weights that a token needs.
"""

from __future__ import annotations

import offload  # noqa: F401  # isort: skip  # before torch, which reads its threads' wait policy once

import argparse
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from llama_cpp import token_name
from peer import needed_wheel_python, open_llama_cpp
from report import about, emit, say

from offload.config.reading import read_config
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine, load_tokenizer, plan_request
from offload.engine.request import GenerationRequest
from offload.plan.planner import Options
from offload.speed.routing import layers_read_bytes

SIZES = {"vocab": 32000, "hidden": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128}
SCALES = {Kind.Q4_0: (0, 0.3), Kind.Q4_K: (0, 0.01), Kind.Q6_K: (208, 0.001)}  # where the block's is, and its size
INNER = 768
GREEDY = SamplingParams(temperature=0.0)
COLUMNS = ("", "prompt, s", "ms/token", "of llama.cpp's")
Run = Callable[[], tuple[float, float]]  # seconds to the first token, and of each further one


def write_model(file: Path, num_layers: int, experts: int, used: int, stored: str) -> None:
    """Write the model, matrices in Q4_0 or as Q4_K_M files have them, routers and norms in fp32."""
    plain, wider = (Kind.Q4_0, Kind.Q4_0) if stored == "Q4_0" else (Kind.Q4_K, Kind.Q6_K)
    random, writer = np.random.default_rng(0), gguf.GGUFWriter(file, "qwen3moe")
    hidden, wide, kv = SIZES["hidden"], SIZES["heads"] * SIZES["head_dim"], SIZES["kv_heads"] * SIZES["head_dim"]
    for add, value in (
        (writer.add_block_count, num_layers), (writer.add_context_length, 32768), (writer.add_embedding_length, hidden),
        (writer.add_feed_forward_length, INNER), (writer.add_head_count, SIZES["heads"]),
        (writer.add_head_count_kv, SIZES["kv_heads"]), (writer.add_key_length, SIZES["head_dim"]),
        (writer.add_value_length, SIZES["head_dim"]), (writer.add_layer_norm_rms_eps, 1e-6),
        (writer.add_rope_freq_base, 1e6), (writer.add_expert_count, experts),
        (writer.add_expert_used_count, used), (writer.add_expert_feed_forward_length, INNER),
        (writer.add_tokenizer_model, "gpt2"), (writer.add_tokenizer_pre, "gpt-2"),
        (writer.add_token_list, [token_name(token) for token in range(SIZES["vocab"])]),
        (writer.add_token_types, [1] * SIZES["vocab"]), (writer.add_token_merges, ["t 0"]),
        (writer.add_bos_token_id, 0), (writer.add_eos_token_id, SIZES["vocab"] - 1),
    ):  # fmt: skip
        add(value)  # type: ignore[operator]

    def matrix(name: str, *shape: int, kind: Kind = plain) -> None:
        (numbers, num_bytes), (at, spread) = gguf.GGML_QUANT_SIZES[kind], SCALES[kind]
        count = math.prod(shape) // numbers
        blocks = random.integers(0, 256, (count, num_bytes), dtype=np.uint8)
        scales = random.normal(0, spread / shape[-1] ** 0.5, count).astype(np.float16)
        blocks[:, at : at + 2] = scales[:, None].view(np.uint8)
        if kind == Kind.Q4_K:  # what is taken off a group makes its mean 0 if it is 7.5 times the scale
            blocks[:, 2:4] = (scales * np.float16(7.5))[:, None].view(np.uint8)
        writer.add_tensor(name, blocks.reshape(*shape[:-1], -1), raw_dtype=kind)

    def numbers(name: str, *shape: int, spread: float = 0.0) -> None:
        centre = 0.0 if spread else 1.0
        writer.add_tensor(name, (centre + random.normal(0, spread, shape)).astype(np.float32))

    matrix("token_embd.weight", SIZES["vocab"], hidden)
    matrix("output.weight", SIZES["vocab"], hidden, kind=wider)
    numbers("output_norm.weight", hidden)
    for layer in range(num_layers):
        blk = f"blk.{layer}."
        for norm, size in (
            ("attn", hidden),
            ("ffn", hidden),
            ("attn_q", SIZES["head_dim"]),
            ("attn_k", SIZES["head_dim"]),
        ):
            numbers(f"{blk}{norm}_norm.weight", size)
        for part, outputs, inputs in (
            ("q", wide, hidden),
            ("k", kv, hidden),
            ("v", kv, hidden),
            ("output", hidden, wide),
        ):
            matrix(f"{blk}attn_{part}.weight", outputs, inputs, kind=wider if part == "v" and layer % 2 else plain)
        numbers(f"{blk}ffn_gate_inp.weight", experts, hidden, spread=0.1)
        for part, outputs, inputs in (("gate", INNER, hidden), ("up", INNER, hidden), ("down", hidden, INNER)):
            kind = wider if part == "down" and layer % 2 else plain
            matrix(f"{blk}ffn_{part}_exps.weight", experts, outputs, inputs, kind=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def of_engine(engine: Engine, prompt: list[int], tokens: int) -> Run:
    def run() -> tuple[float, float]:
        for _ in engine.generate(GenerationRequest(prompt, GREEDY, max_tokens=tokens, reuse=False)):
            pass
        assert engine.stats.milliseconds_per_token is not None
        return engine.stats.first_token_seconds, engine.stats.milliseconds_per_token / 1000

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--used", type=int, default=4)
    parser.add_argument("--stored", choices=("Q4_0", "Q4_K_M"), default="Q4_0")
    parser.add_argument("--host-memory", type=float)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--peers-env", default="")
    args = parser.parse_args()
    python = needed_wheel_python(args.peers_env)
    random = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        file = args.file or Path(folder) / "experts.gguf"
        if not file.exists():
            write_model(file, args.layers, args.experts, args.used, args.stored)
            say(f"{file.stat().st_size / 1e9:.2f} GB written")
        options = Options(speculation=False, dtype="bf16", host_memory=args.host_memory)
        plan = plan_request(file, None, options, num_prompt_tokens=args.length, max_tokens=args.tokens)
        taken: dict[str, list[tuple[float, float]]] = {"triforce": [], "llama.cpp": []}
        config = read_config(file)
        with Engine.load(plan, file, None, load_tokenizer(file, None)) as engine:
            for turn in range(args.turns):
                prompt = [int(each) for each in random.integers(1, SIZES["vocab"] - 1, args.length)]
                taken["triforce"].append(of_engine(engine, prompt, args.tokens)())
                say(f"{turn + 1} of {args.turns}: {taken['triforce'][-1]}")
        for flash in ("on", "off"):
            setting = {"wait_policy": "default", "flash_attention": flash, "cache": "f16", "threads": 2, "ubatch": 512}
            with open_llama_cpp(python, file, setting, context=args.length + args.tokens + 8) as peer:
                for _ in range(args.turns):
                    prompt = [int(each) for each in random.integers(1, SIZES["vocab"] - 1, args.length)]
                    said, seconds = peer.generate(prompt, GREEDY, max_tokens=args.tokens, end_tokens=())
                    each = (seconds[-1] - seconds[0]) / (len(said) - 1)
                    taken["llama.cpp"].append((seconds[0], each))
                    say(f"llama.cpp, flash attention {flash}: {taken['llama.cpp'][-1]}")
    needed = layers_read_bytes(config, 2, 1) + config.head.nbytes(2)
    ours, theirs = taken["triforce"], taken["llama.cpp"]
    best = [min(theirs[: args.turns], key=lambda run: run[1]), min(theirs[args.turns :], key=lambda run: run[1])]
    own = (median(run[0] for run in ours), median(run[1] for run in ours))
    other = min(best, key=lambda run: run[1])
    rows = [
        ("triforce", f"{own[0]:.2f}", f"{1000 * own[1]:.1f}", f"{own[0] / other[0]:.2f}, {own[1] / other[1]:.2f}"),
        ("llama.cpp", f"{other[0]:.2f}", f"{1000 * other[1]:.1f}", ""),
    ]
    read = needed / own[1] / 1e9
    shared = about("a mixture of experts in 4 bits, plain, beside llama.cpp", 0, bytes_of_a_token=needed, read=read)
    emit(COLUMNS, rows, shared, [{"name": name, "runs": runs} for name, runs in taken.items()])


if __name__ == "__main__":
    main()
