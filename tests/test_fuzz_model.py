"""Ten thousand model folders that are damaged or made to do damage: refused as models are, or read; nothing else.

More memory than the files' own size and 32 bytes for each byte of JSON is never taken, whatever a header claims.
"""

from __future__ import annotations

import json
import os
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file

from kit.fuzzing import damaged_bytes, damaged_json, damaged_safetensors, growth_under, outcomes, put
from kit.models import TOKENIZER_SIZE, byte_tokenizer, load, random_model, save
from offload.config.reading import MAX_HEADER_BYTES, MAX_INDEX_BYTES, read_config
from offload.errors import ModelError
from offload.strict_json import MAX_JSON_BYTES
from offload.weights.checkpoint import Checkpoint
from offload.weights.safetensors_folder import INDEX_FILE

NUM_CONFIGS, NUM_GENERATION_CONFIGS, NUM_FILES, NUM_INDEXES, NUM_RUNS = 3000, 500, 3500, 1000, 500
FEW_BYTES = 32 << 20  # for all cases of a test together, of models of 90 KB
MEMORY_PER_BYTE = 32


def both_happen(counts: Counter[str]) -> None:
    """Cases that are all refused, or all read, would try little."""
    assert min(counts["works"], counts["refused"]) > 0.05 * counts.total(), counts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer."""
    return save(random_model(vocab_size=TOKENIZER_SIZE), tmp_path_factory.mktemp("whole"), tokenizer=True)


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    """A copy of the model, to be damaged."""
    return copied(model, tmp_path)


Generate = Callable[..., tuple[int, str]]


@pytest.fixture
def generate(tmp_path_factory: pytest.TempPathFactory, triforce: Callable[..., tuple[int, str, str]]) -> Generate:
    """generate(target, draft, *args) -> (exit code, standard error) of a run in this process."""
    prompt = tmp_path_factory.mktemp("prompt") / "prompt.txt"
    prompt.write_text("zig zag")

    def generate(model: Path, draft: Path | None = None, *args: str) -> tuple[int, str]:
        models = ("--model", str(model), "--draft", "none" if draft is None else str(draft))
        fixed = ("--prompt-file", str(prompt), "--max-tokens", "2", "--quiet")
        code, _, err = triforce("generate", *models, *fixed, *args)
        return code, err

    return generate


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def copied(model: Path, folder: Path) -> Path:
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_configs(folder: Path, num_cases: Callable[[int], int]) -> None:
    path = folder / "config.json"
    document = json.loads(path.read_text())

    def read() -> None:
        config = read_config(folder)
        assert config.num_parameters() > 0
        assert config.context_limit >= config.max_positions
        assert config.prefill_flops(config.max_positions) > 0

    with growth_under(FEW_BYTES):
        both_happen(outcomes(num_cases(NUM_CONFIGS), lambda random: put(path, damaged_json(document, random)), read))


def test_generation_configs(folder: Path, num_cases: Callable[[int], int]) -> None:
    path, document = folder / "generation_config.json", {"eos_token_id": [1, 2], "temperature": 0.6}
    with growth_under(FEW_BYTES):
        both_happen(
            outcomes(
                num_cases(NUM_GENERATION_CONFIGS),
                lambda random: put(path, damaged_json(document, random)),
                lambda: read_config(folder),
            )
        )


def test_safetensors_files(folder: Path, num_cases: Callable[[int], int]) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    with growth_under(FEW_BYTES):
        both_happen(
            outcomes(
                num_cases(NUM_FILES), lambda random: put(path, damaged_safetensors(whole, random)), lambda: load(folder)
            )
        )


def test_indexes_and_their_shards(model: Path, tmp_path: Path, num_cases: Callable[[int], int]) -> None:
    random_model().save_pretrained(tmp_path, max_shard_size="40KB")
    index = tmp_path / INDEX_FILE
    document = json.loads(index.read_text())
    shards = {path: path.read_bytes() for path in tmp_path.glob("model-*.safetensors")}
    assert len(shards) > 2

    def damage(random: Random) -> None:
        for path, data in shards.items():
            put(path, data)
        put(index, damaged_json(document, random) if random.random() < 0.7 else json.dumps(document).encode())
        path = random.choice(sorted(shards))
        match random.randrange(4):
            case 0:
                put(path, damaged_safetensors(shards[path], random))
            case 1:
                put(path, shards[random.choice(sorted(shards))])
            case 2 if random.random() < 0.5:
                path.unlink()

    with growth_under(FEW_BYTES):
        both_happen(outcomes(num_cases(NUM_INDEXES), damage, lambda: load(tmp_path)))


def test_whole_runs(whole: Path, tmp_path: Path, generate: Generate, num_cases: Callable[[int], int]) -> None:
    """From the command line to the first tokens, with any file of the target or of the draft damaged."""
    files = {path.name: path.read_bytes() for path in copied(whole, tmp_path).iterdir()}
    codes: Counter[int] = Counter()
    with growth_under(2 * FEW_BYTES):  # the first runs fill caches of their own
        for number in range(num_cases(NUM_RUNS)):
            random = Random(number)
            name = random.choice(sorted(files))
            put(tmp_path / name, _damaged(name, files[name], random))
            models = (tmp_path,) if number % 2 else (whole, tmp_path)
            code, err = generate(*models)
            codes[code] += 1
            # 3: what a config claims is honestly too large, for the machine or for the context
            assert code in (0, 3, 4), f"case {number}, {name}: {err}"
            assert "Traceback" not in err
            assert "unexpected" not in err.partition("error: ")[2][:12]
            put(tmp_path / name, files[name])
    assert min(codes[0], codes[4]) > 0.05 * codes.total(), codes


def _damaged(name: str, data: bytes, random: Random) -> bytes:
    if name.endswith(".safetensors"):
        return damaged_safetensors(data, random)
    if name.endswith(".json"):
        return damaged_json(json.loads(data), random)
    return damaged_bytes(data, random)


# Memory


def listed(item: str, num_bytes: int) -> str:
    """`item`, in which # is a number, over and over, with commas: at most so many bytes."""
    return ",".join(item.replace("#", str(number)) for number in range(num_bytes // (len(item) + 7)))


def as_file(text: str) -> bytes:
    """A safetensors file with this header and no tensors."""
    return struct.pack("<Q", len(text)) + text.encode()


DENSE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "tensors": (
        "model.safetensors",
        lambda: as_file("{" + listed('"#":{"dtype":"BOOL","shape":[0],"data_offsets":[0,0]}', MAX_HEADER_BYTES) + "}"),
    ),
    "brackets": ("model.safetensors", lambda: as_file("[" * MAX_HEADER_BYTES)),
    "metadata": (
        "model.safetensors",
        lambda: as_file('{"__metadata__":{' + listed('"#":""', MAX_HEADER_BYTES // 2) + "}}"),
    ),
    "shards": (INDEX_FILE, lambda: ('{"weight_map":{' + listed('"#":""', MAX_INDEX_BYTES // 2) + "}}").encode()),
    "objects": (INDEX_FILE, lambda: ('{"weight_map":[' + listed("{}", MAX_INDEX_BYTES // 2) + "]}").encode()),
    "deep": (INDEX_FILE, lambda: b"[" * MAX_INDEX_BYTES),
    "config-objects": ("config.json", lambda: ('{"a":[' + listed("{}", MAX_JSON_BYTES) + "]}").encode()),
    "config-keys": ("config.json", lambda: ("{" + listed('"#":[]', MAX_JSON_BYTES) + "}").encode()),
}
DEEP = ("tensors", "shards")  # keys as dense are in "metadata", and other indices in "objects" and "deep"


@pytest.mark.parametrize(
    ("name", "content"),
    [pytest.param(*dense, marks=[pytest.mark.deep] * (what in DEEP), id=what) for what, dense in DENSE.items()],
)
def test_the_densest_json_takes_the_stated_memory_at_most(
    tmp_path: Path, name: str, content: Callable[[], bytes]
) -> None:
    data = content()
    (tmp_path / name).write_bytes(data)
    read = read_config if name == "config.json" else Checkpoint.open
    with growth_under(MEMORY_PER_BYTE * len(data) + FEW_BYTES // 4), suppress(ModelError):
        read(tmp_path)


# Folders


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("what", ["folder", "nothing", "itself", "endless", "pipe"])
def test_what_is_no_file_is_refused(whole: Path, tmp_path: Path, name: str, what: str, generate: Generate) -> None:
    """A link to a device without an end, or a pipe that nobody writes to, is not waited for."""
    path = copied(whole, tmp_path) / name
    path.unlink()
    match what:
        case "folder":
            path.mkdir()
        case "nothing":
            path.symlink_to(tmp_path / "nowhere")
        case "itself":
            path.symlink_to(path)
        case "endless":
            path.symlink_to("/dev/zero")
        case "pipe":
            os.mkfifo(path)
    code, err = generate(tmp_path)
    assert code == 4
    assert name in err


def test_an_adapter_is_refused_in_the_target_and_in_the_draft(whole: Path, tmp_path: Path, generate: Generate) -> None:
    """transformers would apply it, and say something else than the model without it."""
    (copied(whole, tmp_path) / "adapter_config.json").write_text("{}")
    for models in ((tmp_path,), (whole, tmp_path)):
        code, err = generate(*models)
        assert code == 4
        assert "adapters are not applied; merge it" in err


def test_remote_code_is_never_run(whole: Path, tmp_path: Path, generate: Generate) -> None:
    folder, ran = copied(whole, made(tmp_path / "model")), tmp_path / "ran"
    for module in ("configuration_own", "modeling_own", "tokenization_own"):
        (folder / f"{module}.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    auto_map = {
        "AutoConfig": "configuration_own.Own",
        "AutoModelForCausalLM": "modeling_own.Own",
        "AutoTokenizer": ["tokenization_own.Own", "tokenization_own.Own"],
    }
    for name in ("config.json", "tokenizer_config.json"):
        add(folder / name, auto_map=auto_map)
    assert generate(folder) == (0, "")  # tokenizer.json says all, and the numbers of config.json are a model's
    add(folder / "tokenizer_config.json", tokenizer_class="Own")
    assert generate(folder) == (0, "")
    (folder / "tokenizer.json").unlink()
    assert generate(folder)[0] == 4
    assert not ran.exists()


def add(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_weights_that_are_no_numbers_are_refused_when_they_compute(
    whole: Path, tmp_path: Path, temperature: str, generate: Generate
) -> None:
    """It was an error of the run: that logits overflowed."""
    path = copied(whole, tmp_path) / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, path)
    code, err = generate(tmp_path, None, "--temperature", temperature)
    assert code == 4
    assert "the weights are damaged" in err


def test_a_tokenizer_of_more_tokens_than_the_model_knows_is_refused(tmp_path: Path, generate: Generate) -> None:
    """It read embeddings that are not there."""
    code, err = generate(save(random_model(vocab_size=60), tmp_path, tokenizer=True))
    assert code == 4
    assert "the tokenizer gives token" in err


def test_what_a_file_says_neither_moves_the_cursor_nor_fills_the_screen(folder: Path, generate: Generate) -> None:
    byte_tokenizer().save_pretrained(folder)
    names = [f"\x1b[2J\r\u202e{'x' * 10_000}{number}" for number in range(3)]
    save_file({name: torch.ones(1) for name in names}, folder / "model.safetensors")
    code, err = generate(folder)
    assert code == 4
    assert r"\u001b[2J\r\u202exxx" in err
    assert err.removesuffix("\n").isprintable()
    assert len(err) < 6000


def test_a_damaged_config_is_told_as_such_whatever_the_tokenizer(
    whole: Path, tmp_path: Path, generate: Generate
) -> None:
    """Some tokenizers read it too, and it was they that were said to be unusable."""
    add(copied(whole, tmp_path) / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    (tmp_path / "config.json").write_text("{")
    code, err = generate(tmp_path)
    assert code == 4
    assert "config.json cannot be read as JSON" in err


def test_ten_thousand_cases() -> None:
    from test_fuzz_tokenizer import NUM_AUTO, NUM_PLAIN

    assert NUM_CONFIGS + NUM_GENERATION_CONFIGS + NUM_FILES + NUM_INDEXES + NUM_RUNS + NUM_PLAIN + NUM_AUTO >= 10_000
