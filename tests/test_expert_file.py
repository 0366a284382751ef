"""Experts that are read from their model's file: bytes as the checkpoint gives them, text as the resident model writes
it, errors in place of torn experts, and plans that say what it costs."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kit import asked
from kit.contract import CONTEXT, DRAFTED, MODELS, PLAIN, PROMPT, Pair, alone, possible, say
from kit.models import Sizes, changed, tiny_engine, tiny_plan
from kit.processor import best
from offload.config.model import ModelConfig
from offload.config.reading import read_config
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine, load_tokenizer, plan_request
from offload.engine.request import GenerationRequest
from offload.errors import DoesNotFit, ModelError
from offload.machine import machine_name
from offload.plan.options import Options
from offload.plan.planner import Plan
from offload.plan.request import Request
from offload.plan.shards import ALONE, Shard
from offload.speed.hardware import DISK_READ, Hardware
from offload.speed.rates import FOLDER_VARIABLE, disk_of, load_disk_rate, save_disk_rate
from offload.transfer import direct_file
from offload.transfer.direct_file import ALIGNMENT, DirectFile, FileState
from offload.transfer.disk import Disk, Reader
from offload.weights.checkpoint import Checkpoint, check_model
from offload.weights.expert_file import ExpertFile, LayerExperts, ModelFiles
from offload.weights.experts import layout_of
from offload.worker import disk_timer, models
from test_cpu_experts import MIXTURE, linked

WEIGHTS = frozenset({"weights"})
FLASH = [name for name in MODELS if "n-grams in FP8" in name or "n-grams in NVFP4" in name]
MIXTURES = [
    name
    for name in MODELS
    if ("moe" in name and "dense" not in name) or name.startswith("gpt_oss") or "sparse" in name or name == "nemotron_h"
] + FLASH
CONVERTED = ["gpt_oss", "qwen3_moe in int4", "qwen3_moe in fp8", "qwen3_moe in MXFP4, NVFP4 and others", *FLASH]
DIRECT = ["qwen3_moe", "gemma4, sparse", "nemotron_h", "glm4_moe in a file, Q4_K experts", "olmoe"]


def engine_of(
    pair: Pair, sizes: Sizes, places: int, *, offload: frozenset[str] = frozenset(), ranks: int = 1,
    dtype: str = "bf16", sequences: int = 1, **changes: object,
) -> Engine:  # fmt: skip
    """An engine with so many places for experts of each layer."""
    best()
    draft = pair[1] if sizes.draft_gamma else None
    plan = tiny_plan(
        pair[0], draft, sizes, num_prompt_tokens=CONTEXT, max_tokens=60, dtype=dtype, offload=offload,
        num_sequences=sequences,
    )  # fmt: skip
    return tiny_engine(changed(plan, expert_places=places, num_devices=ranks, **changes), pair[0], draft)


class TestTheFile:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        path = tmp_path / "file"
        path.write_bytes(random.Random(3).randbytes(5 * ALIGNMENT + 77))
        return path

    def check(self, path: Path) -> None:
        content, order = path.read_bytes(), random.Random(1)
        with closing(DirectFile(path)) as file, closing(Disk()) as disk:
            for _ in range(40):
                start, row = order.randrange(len(content)), order.randint(1, 900)
                count = (len(content) - start) // row
                rows = bytearray()

                def read(reader: Reader) -> int:
                    for first, some in reader.rows(file, start, count, row):  # noqa: B023
                        assert first * row == len(rows)  # noqa: B023
                        rows.extend(some.numpy().tobytes())  # noqa: B023
                    return 0

                disk.begin(read).wait()
                assert rows == content[start : start + count * row]

    def test_gives_any_rows(self, path: Path) -> None:
        self.check(path)

    def test_is_read_past_the_page_cache_or_drops_what_it_read(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A file system without direct reads says so when a file is opened, or when it is read."""
        dropped, opened, read = list[int](), os.open, os.preadv
        direct = getattr(os, "O_DIRECT", 0)
        monkeypatch.setattr(os, "posix_fadvise", lambda fd, start, count, advice: dropped.append(advice))

        def refusing(name: Path, flags: int, *others: Any, **more: Any) -> int:
            if flags & direct:
                raise OSError(errno.EINVAL, "Invalid argument")
            return opened(name, flags, *others, **more)

        monkeypatch.setattr(os, "open", refusing)
        self.check(path)
        assert set(dropped) == {os.POSIX_FADV_DONTNEED}
        monkeypatch.setattr(os, "open", opened)
        plain = set[int]()

        def later(fd: int, buffers: Any, offset: int) -> int:
            if not plain and len(buffers[0]) == ALIGNMENT:
                plain.add(fd)
                raise OSError(errno.EINVAL, "Invalid argument")
            return read(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", later)
        self.check(path)

    def test_may_give_less_than_was_asked_for(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        read, order = os.preadv, random.Random(4)

        def short(fd: int, buffers: Any, offset: int) -> int:
            most = order.choice((ALIGNMENT, ALIGNMENT + 512, 3 * ALIGNMENT))
            return read(fd, [buffers[0][:most]], offset)

        monkeypatch.setattr(os, "preadv", short)
        self.check(path)

    def test_that_was_replaced_since_it_was_described_is_refused(self, path: Path) -> None:
        state = FileState.of(path)
        other = path.with_name("other")
        other.write_bytes(path.read_bytes())
        other.rename(path)
        with pytest.raises(ModelError, match="is no longer the file that was opened"):
            DirectFile(path, state)

    def test_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="none cannot be read"):
            DirectFile(tmp_path / "none")


@contextmanager
def files_of(
    folder: Path, shard: Shard = ALONE, dtype: torch.dtype = torch.bfloat16
) -> Iterator[tuple[ModelConfig, Callable[[int], LayerExperts], ModelFiles]]:
    """The config, the experts of a layer, and the files that they are read from."""
    config = read_config(folder)
    with Checkpoint.open(folder) as checkpoint, closing(Disk()) as disk:
        check_model(checkpoint, config)
        own = shard.config(config)

        def layer(index: int) -> LayerExperts:
            return LayerExperts(checkpoint, config, layout_of(own.layer(index), dtype), index, shard, dtype)

        yield config, layer, ModelFiles(checkpoint, disk)


@pytest.mark.few(8)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shard", [ALONE, Shard(0, 2), Shard(1, 2)], ids=lambda shard: f"rank {shard.rank}")
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_those_of_the_checkpoint(
    pairs: Callable[[str], Pair], name: str, shard: Shard, dtype: torch.dtype
) -> None:
    with files_of(pairs(name)[0], shard, dtype) as (config, layer, files):
        assert config.experts is not None
        for index, block in enumerate(config.blocks):
            if block.experts is None:
                continue
            experts = layer(index)
            expected, found = torch.zeros(2, block.experts.count, experts.layout.num_bytes, dtype=torch.uint8)
            experts.read_all(expected)
            file = ExpertFile(experts, files)
            for _ in range(2):  # the second time by their checksums
                events = [file.begin(number, place) for number, place in enumerate(found)]
                for event in events:
                    event.wait()
                assert torch.equal(found, expected)
            if dtype == torch.bfloat16 and shard == ALONE:
                assert file.is_direct == (name not in CONVERTED) or name not in (*CONVERTED, *DIRECT)


@pytest.mark.few(8)
@pytest.mark.parametrize("offload", [frozenset[str](), WEIGHTS], ids=["CPU", "slots"])
@pytest.mark.parametrize("places", [2, 3, 7])
@pytest.mark.parametrize("name", MIXTURES)
def test_text_is_the_resident_models(
    pairs: Callable[[str], Pair], name: str, places: int, offload: frozenset[str]
) -> None:
    pair = pairs(name)
    with engine_of(pair, PLAIN, places, offload=offload) as made:
        assert say(made) == alone(pair)
        before, stats = made.stats.prefill_link.disk, made.stats.decode_link
        experts = made.worker.target.config.experts
        assert experts is not None
        assert (before.reads + stats.disk.reads > 0) == (places < experts.count)
        assert (stats.bytes_to_device > 0) == bool(offload)


LOOKUPS = replace(DRAFTED, budget=0, draft_gamma=0, lookup=True)


@pytest.mark.few(4)
@pytest.mark.parametrize("offload", [frozenset[str](), WEIGHTS], ids=["CPU", "slots"])
@pytest.mark.parametrize("sizes", [DRAFTED, LOOKUPS], ids=["draft and retrieval", "lookups"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss in a file, Q4_K experts", "glm4_moe with its head"])
def test_text_is_the_same_whatever_proposes(
    pairs: Callable[[str], Pair], name: str, sizes: Sizes, offload: frozenset[str]
) -> None:
    """A next-token head's experts have as many places."""
    pair = pairs(name)
    sizes, offload = possible(read_config(pair[0]), (sizes, offload))
    with engine_of(pair, sizes, 3, offload=offload) as made:
        assert say(made) == alone(pair)


@pytest.mark.usefixtures("forked_here")
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe in int4"])
def test_ranks_read_their_shards(pairs: Callable[[str], Pair], name: str) -> None:
    pair = pairs(name)
    with engine_of(pair, PLAIN, 3, ranks=2, dtype="fp32") as made:
        assert say(made) == alone(pair, "fp32")


def test_sequences_of_a_batch_say_what_each_says_alone(pairs: Callable[[str], Pair]) -> None:
    with engine_of(pairs("qwen3_moe"), LOOKUPS, 4, offload=WEIGHTS, sequences=3) as made:
        asked.check(made, asked.some(4, seed=2, most=150, output=20))


@pytest.mark.parametrize("by_cpu", [1, 99])
def test_the_cpu_runs_experts_in_their_places(pairs: Callable[[str], Pair], by_cpu: int) -> None:
    pair = pairs("qwen3_moe")
    with engine_of(pair, PLAIN, 3, offload=WEIGHTS, cpu_experts=by_cpu) as made:
        assert say(made) == alone(pair)
        assert made.stats.decode_link.disk.reads > 0


def test_an_engine_with_places_is_made_for_one_plan(pairs: Callable[[str], Pair]) -> None:
    """A larger cache would take the room of experts, which keep their places."""
    with engine_of(pairs("qwen3_moe"), PLAIN, 3) as made, pytest.raises(ValueError, match="one plan"):
        made.worker.replanned(changed(made.plan, expert_places=0))


def test_a_seed_gives_the_same_text(pairs: Callable[[str], Pair]) -> None:
    pair, texts = pairs("qwen3_moe"), list[list[int]]()
    for places in (0, 2, 5):
        with engine_of(pair, LOOKUPS, places, offload=WEIGHTS) as made:
            request = GenerationRequest(PROMPT, SamplingParams(temperature=1.0, seed=5), max_tokens=24)
            texts.append([token for step in made.generate(request) for token in step.tokens])
    assert texts[0] == texts[1] == texts[2]


Harm = Callable[[Path], None]


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _touch(path: Path) -> None:
    os.utime(path, (1, 1))


def _change_in_secret(path: Path) -> None:
    """Other bytes, and the old time."""
    status = path.stat()
    content = bytearray(path.read_bytes())
    half = len(content) // 2
    content[half:] = bytes(each ^ 1 for each in content[half:])
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


HARMS = [
    (_cut, "it ends at byte|is no longer the file"),
    (_touch, "is no longer the file that was opened"),
    (_change_in_secret, "has other bytes than when it was read first"),
]


@pytest.fixture
def own_pair(tmp_path: Path) -> Callable[[str], Pair]:
    """A model whose files may be changed."""
    return lambda name: MODELS[name].make(tmp_path)


def weights_file(target: Path) -> Path:
    return target if target.is_file() else target / "model.safetensors"


@pytest.mark.parametrize(("harm", "words"), HARMS, ids=lambda each: getattr(each, "__name__", ""))
@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe in a file, Q4_K experts"])
def test_a_file_that_changes_ends_the_text_with_an_error(
    own_pair: Callable[[str], Pair], name: str, harm: Harm, words: str
) -> None:
    pair = own_pair(name)
    with engine_of(pair, PLAIN, 2) as made:
        say(made)
        steps = made.generate(
            GenerationRequest(PROMPT[:40], SamplingParams(temperature=0.0), max_tokens=24, reuse=False)
        )
        harm(weights_file(pair[0]))
        with pytest.raises(ModelError, match=words):
            list(steps)


def test_a_file_that_another_one_replaces_is_read_on(own_pair: Callable[[str], Pair]) -> None:
    """The open one is the old one."""
    pair = own_pair("qwen3_moe")
    with engine_of(pair, PLAIN, 2) as made:
        expected, path = say(made), weights_file(pair[0])
        other = path.with_name("other")
        other.write_bytes(b"nothing")
        other.rename(path)
        assert say(made) == expected


def test_a_disk_that_fails_for_a_while_gives_an_error_and_then_the_text(
    pairs: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, read = pairs("qwen3_moe"), os.preadv

    def broken(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with engine_of(pair, PLAIN, 2, offload=WEIGHTS) as made:
        assert say(made) == alone(pair)
        monkeypatch.setattr(direct_file.os, "preadv", broken)
        for _ in range(3):
            with pytest.raises(
                ModelError, match=r"bytes \d+ to \d+ cannot be read \(Input/output error\); if the disk"
            ):
                say(made)
        monkeypatch.setattr(direct_file.os, "preadv", read)
        assert say(made) == alone(pair)


def test_a_disk_that_fails_leaves_the_text_before_it(
    pairs: Callable[[str], Pair], triforce: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    best()
    monkeypatch.setattr("triforce_cli.documents.prompt.stdin_is_terminal", lambda: True)
    folder = pairs("qwen3_moe")[0]
    words = ["generate", "--model", str(folder), "--draft", "none", "--device", "cpu", "--dtype", "bf16"]
    words += ["--max-tokens", "24", "--temperature", "0", "--no-speculation", "--prompt", "Experts are many, a token:"]
    code, whole, said = triforce(*words)
    assert code == 0, said
    plain = plan_request(folder, None, Options(device="cpu", dtype="bf16"), num_prompt_tokens=47, max_tokens=24)
    room = (total(plain) - plain.placement.device_bytes["target experts"] * 0.6) / 1e9
    read, calls = os.preadv, list[int]()

    def counted(fd: int, buffers: Any, offset: int) -> int:
        calls.append(offset)
        if most is not None and len(calls) > most:
            raise OSError(errno.EIO, "Input/output error")
        return read(fd, buffers, offset)

    most: int | None = None
    monkeypatch.setattr(direct_file.os, "preadv", counted)
    code, found, noted = triforce(*words, "--host-memory", f"{room:.6f}")
    assert (code, found) == (0, whole)
    assert "experts of each layer have room in memory" in noted
    most = len(calls) - 4
    calls.clear()
    code, found, noted = triforce(*words, "--host-memory", f"{room:.6f}")
    assert code == ModelError.exit_code == 4
    assert whole.startswith(found.rstrip("\n"))
    assert found.strip()
    assert "model.safetensors: bytes" in noted
    assert "cannot be read (Input/output error); if the disk is well, download the file again" in noted


def test_a_checksum_that_nobody_compares_is_missed(
    own_pair: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim above can fail."""
    monkeypatch.setattr("offload.weights.expert_file.zlib.crc32", lambda data: 0)
    pair = own_pair("qwen3_moe")
    with engine_of(pair, PLAIN, 2) as made:
        expected = say(made)
        _change_in_secret(weights_file(pair[0]))
        assert say(made) != expected


def test_a_paced_disk_takes_its_time(pairs: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """Or no schedule could be tried on a fast one."""
    monkeypatch.setattr(models, "Disk", partial(Disk, 2e8))
    with engine_of(pairs("qwen3_moe"), PLAIN, 2) as made:
        say(made)
        disk = made.stats.decode_link.disk
        assert disk.seconds >= 0.9 * disk.num_bytes / 2e8


# Plans.

GPU = linked(25.0)
ALL = 30e9  # bytes of MIXTURE's experts, about


def planned(hardware: Hardware, **options: Any) -> Plan:
    return Request(MIXTURE, None, Options(**options), hardware).plan(num_prompt_tokens=2000, max_tokens=100)


def on_cpu(gigabytes: float, **changes: Any) -> Hardware:
    free = int(gigabytes * 1e9)
    return Hardware("cpu", "CPU", free, free, True, **changes)


def total(plan: Plan) -> int:
    placement = plan.placement
    return placement.total_host_bytes + (placement.total_device_bytes if plan.request.device == "cpu" else 0)


class TestThePlan:
    @pytest.mark.parametrize(
        "of", [lambda free: replace(GPU, host_free_bytes=int(free * 1e9)), on_cpu], ids=["GPU", "CPU"]
    )
    def test_reads_the_fewer_experts_the_more_memory_there_is(self, of: Callable[[float], Hardware]) -> None:
        found = [planned(of(free)) for free in (9, 14, 20, 26, 60)]
        places = [plan.placement.expert_places for plan in found]
        assert 8 <= places[0] < places[1] < places[2] < places[3] < 128
        assert places[4] == 0
        read = [plan.predicted.read_bytes for plan in found]
        assert read == sorted(read, reverse=True)
        assert read[-2] > 0 == read[-1]
        assert all(total(plan) <= of(free).host_free_bytes for plan, free in zip(found, (9, 14, 20, 26), strict=False))

    def test_says_what_a_token_costs(self) -> None:
        hardware = replace(GPU, host_free_bytes=20 * 10**9)
        (assumed,) = [note for note in planned(hardware).notes if "model's file" in note]
        assert "of 128 experts of each layer have room in memory" in assumed
        assert "(assumed)" in assumed
        read = planned(hardware).predicted.read_bytes
        (measured,) = [note for note in planned(hardware.with_disk(1e9)).notes if "model's file" in note]
        assert f"{read / 1e6:,.0f} MB a token, {1e3 * read / 1e9:,.0f} ms at 1 GB/s (measured)" in measured
        assert not any("model's file" in note for note in planned(GPU).notes)

    def test_counts_the_disks_seconds(self) -> None:
        hardware = replace(GPU, host_free_bytes=20 * 10**9)
        slow, fast = (planned(hardware.with_disk(rate), speculation=False, cpu_experts=0) for rate in (1e9, 1e12))
        more = slow.predicted.full_pass_seconds - fast.predicted.full_pass_seconds
        assert more == pytest.approx(slow.predicted.read_bytes / 1e9, rel=0.01)
        assert slow.predicted.prefill_seconds > fast.predicted.prefill_seconds

    def test_keeps_within_the_memory_that_is_allowed(self) -> None:
        for hardware in (replace(GPU, host_free_bytes=200 * 10**9), on_cpu(200)):
            made = planned(hardware, host_memory=15.0)
            assert made.placement.expert_places > 0
            assert total(made) <= 15e9

    def test_does_not_fit_where_a_tokens_own_experts_have_no_room(self) -> None:
        with pytest.raises(DoesNotFit, match="host memory, 1 GB are free"):
            planned(replace(GPU, host_free_bytes=10**9))

    def test_is_what_an_engine_allocates(self, pairs: Callable[[str], Pair]) -> None:
        folder = pairs("qwen3_moe")[0]
        sizes = {"num_prompt_tokens": 60, "max_tokens": 24}
        request = GenerationRequest(PROMPT[:60], SamplingParams(temperature=0.0), max_tokens=24)
        texts = list[list[int]]()
        for options in ({}, {"offload": WEIGHTS}):
            plain = plan_request(folder, None, Options(device="cpu", dtype="bf16", **options), **sizes)  # type: ignore[arg-type]
            experts = plain.placement.device_bytes | plain.placement.host_bytes
            room = (total(plain) - experts["target experts"] // 2) / 1e9
            less = Options(device="cpu", dtype="bf16", host_memory=room, **options)  # type: ignore[arg-type]
            plan = plan_request(folder, None, less, **sizes)  # type: ignore[arg-type]
            assert 3 <= plan.placement.expert_places < 8
            for made in (plain, plan):
                with Engine.load(made, folder, None, load_tokenizer(folder, None)) as engine:
                    texts.append([token for step in engine.generate(request) for token in step.tokens])
                    held = engine.worker.memory.allocated()
                    tier = made.placement.host_bytes if options else made.placement.device_bytes
                    assert held["host" if options else "device"]["target experts"] == tier["target experts"]
        assert all(text == texts[0] for text in texts)


class TestTheRate:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))

    def test_is_measured_once_where_experts_may_have_no_room(
        self, pairs: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = pairs("qwen3_moe")[0]
        request = Request.of(folder, None, Options(device="cpu"), on_cpu(1e-3))
        assert request.hardware.disk_read == DISK_READ
        found = disk_timer.disk_timed(request, folder).hardware
        assert found.disk_measured
        assert load_disk_rate(machine_name(), disk_of(folder)) == found.disk_read > 1e6
        monkeypatch.setattr(disk_timer, "read_rate", pytest.fail)
        assert Request.of(folder, None, Options(device="cpu"), on_cpu(1e-3)).hardware == found
        roomy = Request.of(folder, None, Options(device="cpu"), on_cpu(50))
        assert disk_timer.disk_timed(replace(roomy, hardware=on_cpu(50)), folder).hardware == on_cpu(50)

    def test_is_of_the_largest_file_of_a_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        models, read = tmp_path / "models", list[Path]()
        assert disk_timer.time_disk(models) is None
        (models / "one").mkdir(parents=True)
        for name, count in (("one/a.safetensors", 10), ("one/b.safetensors", 3 << 20), ("c.gguf", 20), ("d", 5 << 20)):
            (models / name).write_bytes(bytes(count))
        assert (rate := disk_timer.time_disk(models)) is not None
        assert load_disk_rate(machine_name(), disk_of(models)) == rate > 1e6
        monkeypatch.setattr(disk_timer, "read_rate", lambda path: read.append(path) or 1e9)
        assert disk_timer.time_disk(models) == 1e9
        assert read == [models / "one/b.safetensors"]

    def test_that_is_damaged_is_none(self, tmp_path: Path) -> None:
        for rate in (0.0, -1.0, 1e30):
            save_disk_rate("here", "disk at /", rate)
            assert load_disk_rate("here", "disk at /") is None
        save_disk_rate("here", "disk at /", 3e9)
        assert load_disk_rate("here", "disk at /") == 3e9
        assert load_disk_rate("there", "disk at /") is None
