"""`triforce pull`: a model's folder ends as the hub lists it, whatever happens, or an error says what to run."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch

from kit.gguf_models import write_gguf
from kit.hub import COMMIT, Hub, running
from kit.models import random_model, save
from kit.terminals import Terminal
from offload.config.reading import read_config
from offload.errors import ModelError
from offload.hub import fetch
from offload.hub.library import STAGING, Origin, entries, locate, state_of
from offload.hub.names import FOLDER_VARIABLE
from offload.hub.pickles import convert_shard
from offload.units import size
from offload.weights.checkpoint import Checkpoint, check_model
from test_cli_fake import environment, play

NAME = "owner/model"
OTHER = "d" * 40
CHUNK = 512  # bytes that are written at once


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A tiny model's files, by name."""
    return files_of(save(random_model(), tmp_path_factory.mktemp("plain"), tokenizer=True))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("sharded")
    random_model().save_pretrained(folder, max_shard_size="10kB")
    return files_of(folder)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder of models."""
    return tmp_path / "models"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    constants = huggingface_hub.constants
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "models"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
    with running() as hub, monkeypatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
        yield hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "models" / NAME


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def pulled(folder: Path) -> dict[str, bytes]:
    """All files of a pulled model except triforce.json."""
    assert {path.name for path in folder.iterdir() if path.is_dir()} == set()
    return {name: data for name, data in files_of(folder).items() if name != "triforce.json"}


def weights_and_texts(files: dict[str, bytes]) -> int:
    """Bytes of all files but config.json, which is fetched before the first message."""
    return sum(map(len, files.values())) - len(files["config.json"])


# --- what comes ---


def test_a_pull_brings_weights_config_and_tokenizer_and_no_code(hub, triforce, folder, plain, monkeypatch):
    monkeypatch.setattr("triforce_cli.screen.progress.LINE_SECONDS", 0.0)
    further = {
        "modeling.py": b"raise SystemExit",
        "pytorch_model.bin": b"x",
        "README.md": b"#",
        "onnx/model.onnx": b"o",
    }
    hub.put(NAME, {**plain, **further}, license="llama2")
    code, out, err = triforce("pull", NAME)
    assert (code, out) == (0, f"{folder}\n")
    assert pulled(folder) == plain
    assert set(hub.asked()) == set(plain)
    all_of_it, missing = size(sum(map(len, plain.values()))), size(weights_and_texts(plain))
    assert err.splitlines()[0] == f"{NAME} at main ({COMMIT[:12]}), licence llama2"
    assert err.splitlines()[1] == f"{len(plain)} files, {all_of_it}, into {folder}: {missing} to fetch"
    assert err.splitlines()[2] == f"fetch: 0% of {missing}"
    assert err.splitlines()[-1] == f"next: triforce chat --model {NAME}"
    assert "it/s" not in err  # the library's own bars
    assert Origin.read(folder) == Origin(source=NAME, commit=COMMIT, license="llama2", files=tuple(sorted(plain)))
    assert locate(NAME) == folder


def test_shards_come_with_their_index(hub, triforce, folder, sharded):
    assert sum(name.endswith(".safetensors") for name in sharded) > 2
    hub.put(NAME, sharded)
    assert triforce("pull", NAME, "--quiet")[::2] == (0, "")
    assert pulled(folder) == sharded


def test_json_says_what_was_pulled(hub, triforce, folder, plain):
    hub.put(NAME, plain, license="")
    said = json.loads(triforce("pull", NAME, "--json")[1])
    assert (said["folder"], said["commit"], said["license"]) == (str(folder), COMMIT, None)
    assert (said["bytes"], said["converted"]) == (sum(map(len, plain.values())), False)
    assert json.loads(triforce("pull", NAME, "--json")[1])["fetched_bytes"] == 0


def test_a_second_pull_fetches_what_differs_and_removes_what_is_gone(hub, triforce, folder, sharded, plain):
    """Files that a pull did not write stay."""
    hub.put(NAME, sharded)
    triforce("pull", NAME)
    (folder / "notes.txt").write_text("mine")
    (folder / "extra.safetensors").write_text("mine, too")
    hub.asked()
    newer = {**plain, "config.json": sharded["config.json"]}
    hub.put(NAME, newer, commit=OTHER)
    assert triforce("pull", NAME)[0] == 0
    mine = {"notes.txt": b"mine", "extra.safetensors": b"mine, too"}
    assert pulled(folder) == {**newer, **mine}
    unchanged = {name for name in newer if sharded.get(name) == newer[name]} - {"config.json"}
    assert unchanged
    assert set(hub.asked()) == set(newer) - unchanged
    assert Origin.read(folder).commit == OTHER


def test_a_damaged_file_is_fetched_again(hub, triforce, folder, plain):
    hub.put(NAME, plain)
    triforce("pull", NAME)
    weights = bytearray(plain["model.safetensors"])
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    hub.asked()
    assert triforce("pull", NAME)[0] == 0
    assert hub.asked() == ["config.json", "model.safetensors"]
    assert pulled(folder) == plain


def test_revision_names_a_commit_or_a_branch(hub, triforce, folder, plain, sharded):
    hub.put(NAME, sharded, commit=OTHER, revisions=("old",))
    hub.put(NAME, plain)
    for revision, files, commit in (("old", sharded, OTHER), (COMMIT, plain, COMMIT), (OTHER, sharded, OTHER)):
        assert triforce("pull", NAME, "--revision", revision)[0] == 0
        assert pulled(folder) == files
        assert Origin.read(folder).commit == commit
    code, _, err = triforce("pull", NAME, "--revision", "v9")
    assert (code, pulled(folder)) == (4, sharded)
    assert f"{NAME} has no revision 'v9'; 'triforce pull {NAME}' takes main" in err
    hub.refusals[NAME] = (500, "")
    assert (
        f"try later, 'triforce pull {NAME} --revision v9' resumes it" in triforce("pull", NAME, "--revision", "v9")[2]
    )


def test_an_alias_is_pulled_under_its_repositorys_name(hub, triforce, plain, tmp_path):
    hub.put("JackFram/llama-68m", plain)
    _, out, err = triforce("pull", "llama-68m")
    assert out == f"{tmp_path / 'models/JackFram/llama-68m'}\n"
    assert err.endswith("next: triforce chat --model llama-68m\n")


@pytest.mark.parametrize(("renamed", "called"), [("Owner/Model", "Owner/Model"), ("else/where", NAME)])
def test_a_repository_is_found_under_the_name_that_was_asked_for(hub, triforce, plain, tmp_path, renamed, called):
    """In the hub's spelling; a short name still finds a repository that was renamed."""
    hub.put(NAME, plain, renamed=renamed)
    hub.put("Owner/Model", plain)
    assert triforce("pull", NAME)[:2] == (0, f"{tmp_path / 'models' / called}\n")


# --- cuts ---


def test_a_cut_connection_is_taken_up_where_it_broke(hub, triforce, folder, plain):
    hub.put(NAME, plain)
    hub.cuts["model.safetensors"] = [3 * CHUNK + 100, 100, 2 * CHUNK]
    assert triforce("pull", NAME)[0] == 0
    assert pulled(folder) == plain
    starts = [start for name, start in hub.requests if name == "model.safetensors"]
    assert starts == [0, 3 * CHUNK, 3 * CHUNK, 5 * CHUNK]


def test_a_connection_that_is_reset_is_made_anew(hub, triforce, folder, plain):
    hub.put(NAME, plain)
    hub.abrupt = True
    hub.cuts["model.safetensors"] = [3 * CHUNK, 2 * CHUNK]
    assert triforce("pull", NAME)[0] == 0
    assert pulled(folder) == plain
    assert [start for name, start in hub.requests if name == "model.safetensors"][:3] == [0, 3 * CHUNK, 5 * CHUNK]


def break_off(hub: Hub, triforce: Callable[..., tuple[int, str, str]], name: str, come: int) -> str:
    """Pull until `come` bytes of the file have arrived, then interrupt."""
    hub.cuts[name] = [come, *[0] * 20]
    code, _, err = triforce("pull", NAME)
    assert code == 1
    hub.cuts.clear()
    return err


def test_a_pull_that_failed_goes_on_where_it_was(hub, triforce, folder, plain):
    hub.put(NAME, plain)
    err = break_off(hub, triforce, "model.safetensors", 5 * CHUNK)
    assert f"then 'triforce pull {NAME}' resumes it" in err
    assert state_of(folder) == "broken off"
    assert not (folder / "config.json").exists()
    code, _, err = triforce("generate", "--model", NAME, "--prompt", "x")
    assert (code, f"'triforce pull {NAME}' resumes it" in err) == (4, True)
    hub.requests.clear()
    _, _, err = triforce("pull", NAME)
    assert f"{size(len(plain['model.safetensors']) - 5 * CHUNK)} to fetch" in err
    assert hub.requests == [("model.safetensors", 5 * CHUNK)]
    assert pulled(folder) == plain


def test_what_came_of_another_version_is_not_mixed_in(hub, triforce, folder, plain):
    hub.put(NAME, plain)
    break_off(hub, triforce, "model.safetensors", 5 * CHUNK)
    newer = {**plain, "model.safetensors": files_of_seed(folder.parent, 1)}
    hub.put(NAME, newer, commit=OTHER)
    assert triforce("pull", NAME)[0] == 0
    assert pulled(folder) == newer


def test_nothing_of_a_version_whose_pull_broke_off_gets_into_another(hub, triforce, folder, plain):
    """Bug: pulling the installed version after an interrupted pull of a newer one installed its staged files."""
    hub.put(NAME, plain)
    triforce("pull", NAME)
    texts = {name: data + b"\n" for name, data in plain.items() if name != "model.safetensors"}
    hub.put(NAME, {**texts, "model.safetensors": files_of_seed(folder.parent, 1)}, commit=OTHER)
    break_off(hub, triforce, "model.safetensors", CHUNK)
    assert (folder / STAGING / "tokenizer.json").read_bytes() == texts["tokenizer.json"]
    assert triforce("pull", NAME, "--revision", COMMIT)[0] == 0
    assert pulled(folder) == plain


def test_nothing_of_a_converted_version_gets_into_another(hub, triforce, folder, plain, tmp_path):
    hub.put(NAME, pickled(plain, tmp_path, 2))
    triforce("pull", NAME)
    hub.put(NAME, pickled(plain, tmp_path, 2, **random_model(seed=1).state_dict()), commit=OTHER)
    break_off(hub, triforce, "pytorch_model-00002-of-00002.bin", CHUNK)
    assert (folder / STAGING / "model-00001-of-00002.safetensors").exists()
    assert triforce("pull", NAME, "--revision", COMMIT)[0] == 0
    assert same_bits(tensors_in(folder), random_model().state_dict())


def files_of_seed(folder: Path, seed: int) -> bytes:
    save(random_model(seed=seed), folder / "other")
    data = (folder / "other/model.safetensors").read_bytes()
    shutil.rmtree(folder / "other")
    return data


def test_a_hub_that_begins_anew_is_followed(hub, triforce, folder, plain):
    hub.put(NAME, plain)
    hub.ranges = False
    hub.cuts["model.safetensors"] = [3 * CHUNK]
    assert triforce("pull", NAME)[0] == 0
    assert pulled(folder) == plain
    assert triforce("pull", NAME)[0] == 0


def test_the_model_that_was_there_stays_usable_while_an_update_is_broken_off(hub, triforce, folder, plain):
    hub.put(NAME, plain)
    triforce("pull", NAME)
    hub.put(NAME, {**plain, "model.safetensors": files_of_seed(folder.parent, 1)}, commit=OTHER)
    break_off(hub, triforce, "model.safetensors", CHUNK)
    assert locate(NAME) == folder
    assert (folder / "model.safetensors").read_bytes() == plain["model.safetensors"]


def test_an_end_in_the_middle_of_moving_is_seen_and_mended(hub, triforce, folder, plain, monkeypatch):
    hub.put(NAME, plain)
    real = os.replace

    def replace(source, target):
        if Path(target).parent == folder and len(files_of(folder)) > 2:
            raise OSError(errno.EIO, "the power failed")
        return real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        assert triforce("pull", NAME)[0] == 1
    assert state_of(folder) == "broken off"
    assert triforce("pull", NAME)[0] == 0
    assert pulled(folder) == plain


def begin(**variables: str) -> None:
    """`triforce pull` in a fork of this process, which knows the stand-in's address."""
    play(["pull", NAME], environment(**variables), stand_in=False)


def test_ctrl_c_keeps_what_has_come_and_says_how_to_go_on(hub, triforce, folder, plain):
    hub.put(NAME, plain)
    hub.stalls["model.safetensors"] = len(plain["model.safetensors"]) - 100
    with subprocess.Popen(["true"], stderr=subprocess.PIPE, text=True, preexec_fn=begin) as process:
        hub.stalled.wait()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    hub.stalls.clear()
    hub.cuts.clear()
    assert process.returncode == 130
    assert err.splitlines()[-1] == f"stopped; 'triforce pull {NAME}' resumes it"
    assert state_of(folder) == "broken off"
    assert triforce("pull", NAME)[0] == 0
    assert pulled(folder) == plain


def test_at_a_terminal_there_is_one_bar_with_time_left_and_then_none(hub, folder, plain):
    """huggingface_hub shows bars of its own unless they are disabled."""
    hub.put(NAME, plain)
    hub.stalls["model.safetensors"] = len(plain["model.safetensors"]) - 100
    terminal = Terminal(["true"], env={}, columns=100, begin=lambda: begin(COLUMNS="100"))
    try:
        terminal.until(lambda: any("%" in line and line.endswith("left") for line in terminal.lines), "a whole bar")
        bars = [line for line in terminal.lines if "%" in line or "B/s" in line]
        assert len(bars) == 1
        assert bars[0].split()[0] == "fetch"
        hub.stalls.clear()
        assert terminal.finish() == 0
    finally:
        hub.stalls.clear()
        terminal.close()
    assert "B/s]" not in terminal.written  # as the library writes it
    assert "left" in terminal.written
    assert not [line for line in terminal.lines if "%" in line]
    assert f"next: triforce chat --model {NAME}" in terminal.lines
    assert pulled(folder) == plain


def test_offline_says_what_to_unset(hub, triforce, monkeypatch, plain):
    hub.put(NAME, plain)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # read from the variable at import
    code, _, err = triforce("pull", NAME)
    assert (code, hub.requests) == (4, [])
    assert f"HF_HUB_OFFLINE is set, so {NAME} cannot be pulled; unset it and run" in err


def test_two_pulls_at_once_are_one(hub, triforce, folder, plain):
    hub.put(NAME, plain)
    (folder / STAGING).mkdir(parents=True)
    with (folder / STAGING / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, _, err = triforce("pull", NAME)
    assert (code, "another process is pulling" in err, hub.requests) == (4, True, [])


# --- refusals ---


@pytest.mark.parametrize(
    ("status", "code", "exit_code", "said"),
    [
        (401, "RepoNotFound", 4, "the hub has no repository owner/model: check the spelling"),
        (404, "RepoNotFound", 4, "'hf auth login' and run 'triforce pull owner/model'"),
        (403, "GatedRepo", 4, "is gated: accept its terms at https://huggingface.co/owner/model"),
        (403, "", 4, "the hub refuses access to owner/model (status 403): log in with 'hf auth login'"),
        (404, "RevisionNotFound", 4, "has no revision 'main'"),
        (500, "", 1, "the hub answered with status 500; try later, 'triforce pull owner/model'"),
    ],
)
def test_a_refusal_of_the_hub_says_what_to_do(hub, triforce, folder, status, code, exit_code, said):
    hub.refusals[NAME] = (status, code)
    found, out, err = triforce("pull", NAME)
    assert (found, out) == (exit_code, "")
    assert said in err
    assert "Traceback" not in err
    assert not folder.parent.exists()


def test_a_gated_repository_leaves_nothing(hub, triforce, folder, plain):
    """The hub lists the files of a gated repository and refuses each of them."""
    hub.put(NAME, plain)
    hub.refusals["config.json"] = (401, "GatedRepo")
    code, _, err = triforce("pull", NAME)
    assert (code, f"{NAME} is gated: accept its terms" in err) == (4, True)
    assert not folder.parent.exists()


@pytest.mark.parametrize(("status", "code", "exit_code"), [(404, "EntryNotFound", 4), (403, "", 4), (410, "", 1)])
def test_a_refusal_of_one_file_ends_the_pull(hub, triforce, folder, plain, status, code, exit_code):
    hub.put(NAME, plain)
    hub.refusals["model.safetensors"] = (status, code)
    found, _, err = triforce("pull", NAME)
    assert (found, f"'triforce pull {NAME}'" in err) == (exit_code, True)
    assert state_of(folder) == "broken off"


def test_a_connection_that_breaks_says_so_and_how_to_go_on(hub, triforce, gguf_files):
    """The command named the whole repository, which has no config.json, in place of the file, here by its label."""
    hub.put("owner/tiny-GGUF", gguf_files)
    hub.cuts["tiny.F16.gguf"] = [CHUNK, *[0] * 60]
    code, _, err = triforce("pull", "owner/tiny-GGUF", "--file", "tiny.F16.gguf")
    again = "'triforce pull owner/tiny-GGUF:F16' resumes it"
    assert (code, err.splitlines()[-1].partition("; ")[2]) == (1, f"check the network, then {again}")
    assert err.splitlines()[-1].startswith("error: the connection broke off (")


def test_no_network_says_so(hub, triforce, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    code, _, err = triforce("pull", NAME)
    assert (code, "the hub cannot be reached ([Errno" in err) == (1, True)


@pytest.mark.parametrize("name", ["llama", "a/b/c", "../x", "a/..", "local/x", "/etc/passwd", "a/b\x1b[2J", ""])
def test_a_name_that_is_none_is_refused(hub, triforce, name):
    code, _, err = triforce("pull", name)
    assert (code, "is not a model on the hub" in err) == (2, True)
    assert "\x1b" not in err


def test_what_cannot_be_run_is_refused_before_its_weights_come(hub, triforce, folder, plain):
    config = {**json.loads(plain["config.json"]), "model_type": "mamba"}
    hub.put(NAME, {**plain, "config.json": json.dumps(config).encode()})
    code, _, err = triforce("pull", NAME)
    assert (code, hub.asked()) == (4, ["config.json"])
    assert f"{NAME} was not pulled" in err
    assert 'model_type is "mamba"' in err
    assert not folder.exists()


def test_a_description_of_the_quantisation_beside_the_config_is_fetched_with_it(hub, triforce, folder, plain):
    """Without it weights would be taken for plain ones."""
    own = {"quantization": {"quant_algo": "NVFP4_AWQ"}}
    hub.put(NAME, {**plain, "hf_quant_config.json": json.dumps(own).encode()})
    code, _, err = triforce("pull", NAME)
    assert (code, hub.asked()) == (4, ["config.json", "hf_quant_config.json"])
    assert "pre_quant_scale multiplies activations" in err


def test_a_repository_without_a_model_is_refused(hub, triforce, plain):
    hub.put(NAME, {name: data for name, data in plain.items() if name != "config.json"})
    assert "has no config.json" in triforce("pull", NAME)[2]
    hub.put("owner/gguf", {"model.gguf": b"x"})
    code, _, err = triforce("pull", "owner/gguf", "--config-only")
    assert (code, "name one of its GGUF files with --file: model.gguf" in err, hub.asked()) == (4, True, [])


# --- GGUF ---


@pytest.fixture(scope="module")
def gguf_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A model in one file and the same in several."""
    made = tmp_path_factory.mktemp("gguf")
    folder = save(random_model(vocab_size=258), made / "folder")
    write_gguf(folder, made / "tiny.F16.gguf", kind="F16")
    write_gguf(folder, made / "tiny.gguf", split=9)
    return {path.name: path.read_bytes() for path in made.glob("*.gguf")}


def test_a_gguf_file_is_pulled_and_found_by_the_repositorys_name(hub, triforce, root, gguf_files):
    hub.put("owner/tiny-GGUF", {**gguf_files, "README.md": b"-"})
    code, out, err = triforce("pull", "owner/tiny-GGUF", "--file", "tiny.F16.gguf")
    assert (code, out) == (0, f"{root / 'owner/tiny-GGUF'}\n"), err
    assert err.splitlines()[-1] == "next: triforce chat --model owner/tiny-GGUF:F16"
    assert hub.asked() == ["tiny.F16.gguf"]
    assert locate("owner/tiny-GGUF") == root / "owner/tiny-GGUF/tiny.F16.gguf"
    (entry,) = entries()
    assert (entry.name, entry.problem, entry.config.family) == ("owner/tiny-GGUF", "", "llama")
    assert triforce("pull", "owner/tiny-GGUF", "--file", "tiny.F16.gguf")[0] == 0
    assert hub.asked() == []
    first = min(gguf_files)
    code, _, err = triforce("pull", "owner/tiny-GGUF", "--file", first)
    assert (code, err.splitlines()[-1]) == (0, f"next: triforce chat --model owner/tiny-GGUF/{first}")
    assert sorted(hub.asked()) == sorted(name for name in gguf_files if name != "tiny.F16.gguf")
    with pytest.raises(ModelError, match=rf"has 2 GGUF files; give the path of one: .*{first}, .*tiny.F16.gguf"):
        locate("owner/tiny-GGUF")
    assert (listed := [entry.name for entry in entries()]) == [
        f"owner/tiny-GGUF/{first}",
        "owner/tiny-GGUF/tiny.F16.gguf",
    ]
    assert [locate(name) for name in listed] == [root / name for name in listed]


def test_a_gguf_file_that_does_not_exist_is_said_not_to(root, tmp_path):
    """It was said not to be a folder, and to be fetched from the hub by its path."""
    for name in ("models/absent.gguf", str(tmp_path / "absent.gguf")):
        with pytest.raises(ModelError, match=rf"^{name} does not exist; 'triforce models' lists"):
            locate(name)


def test_a_gguf_file_that_is_not_there_or_cannot_run_is_refused_and_nothing_is_kept(hub, triforce, root, gguf_files):
    (name, data), *_ = ((name, data) for name, data in gguf_files.items() if "F16" in name)
    hub.put("owner/other", {name: data.replace(b"llama", b"lamma"), "in/.a.gguf": data, "mmproj-F16.gguf": data})
    for file, said in (
        ("b.gguf", "has no b.gguf"),
        ("in/.a.gguf", "has no in/.a.gguf"),
        ("mmproj-F16.gguf", "has no mmproj-F16.gguf"),
        ("README.md", "has no README.md"),
    ):
        code, _, err = triforce("pull", "owner/other", "--file", file)
        assert (code, said in err, name in err, hub.asked()) == (4, True, True, [])
    code, _, err = triforce("pull", "owner/other", "--file", name)
    assert (code, "was not pulled" in err, "architecture is 'lamma'" in err) == (4, True, True)
    assert not list(root.rglob("*.gguf"))


# --- bytes that are not what the hub says ---


def altered(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize(
    ("listed", "what"),
    [
        ({}, "other bytes came"),
        ({"size": 1 << 20}, "bytes came than the hub lists"),
        ({"size": 600}, "more bytes came"),
    ],
)
def test_other_bytes_than_the_hub_lists_are_not_kept(hub, triforce, folder, plain, name, listed, what):
    said = {"lfs": {"sha256": "e" * 64, "size": 1, "pointerSize": 1}} if name == "model.safetensors" else {}
    hub.put(NAME, plain, listed={name: {"blobId": "e" * 40, **said, **listed}})
    code, _, err = triforce("pull", NAME)
    assert (code, what in err, name in err) == (4, True, True)
    assert not list(folder.rglob(f"{name}*"))


@pytest.mark.parametrize(
    "listed",
    [{"blobId": "../../../evil/evil"}, {"blobId": None}, {"size": None}, {"size": -1}, {"size": "9"}, {"size": 2**40}],
)
def test_a_listing_that_makes_no_sense_is_refused(hub, triforce, plain, tmp_path, listed):
    """A file's hash becomes part of a file name."""
    hub.put(NAME, plain, listed={"config.json": listed})
    code, out, err = triforce("pull", NAME)
    assert (code, out, hub.asked()) == (4, "", [])
    assert "the hub lists no length and hash of 'config.json'" in err or "config.json has 1099511627776 bytes" in err
    assert not list(tmp_path.rglob("*evil*"))


@pytest.mark.parametrize("answer", [b"<html>", b"[]", b"{}", b'{"id": "../x", "sha": "c"}', b'{"id": "a/b", "sha": 3}'])
def test_an_answer_of_no_hub_is_refused(hub, triforce, answer):
    hub.put(NAME, {}, answer=answer)
    code, _, err = triforce("pull", NAME)
    assert (code in (1, 4), "is HF_ENDPOINT a hub?" in err) == (True, True)


def test_names_that_lead_out_are_never_fetched(hub, triforce, folder, plain, tmp_path):
    """Only known names are fetched; an index that lists any other is refused."""
    hub.put(NAME, {**plain, "../evil.json": b"{}", "../../evil.safetensors": b"x", "/etc/evil": b"x"})
    assert triforce("pull", NAME)[0] == 0
    assert pulled(folder) == plain
    out = ("../evil.safetensors", "/evil.safetensors", "a/b.safetensors", "..", ".safetensors", "x.bin", 3)
    for number, shard in enumerate(out):
        index = json.dumps({"weight_map": {"a": shard}}).encode()
        files = {"config.json": plain["config.json"], "model.safetensors.index.json": index, str(shard): b"x"}
        hub.put(f"owner/evil{number}", files)
        code, _, err = triforce("pull", f"owner/evil{number}")
        said = "must be a plain name" if isinstance(shard, str) else 'weight_map is {"a": 3}; it must be'
        assert (code, said in err) == (4, True)
    assert set(hub.asked()) == {"config.json", "model.safetensors.index.json", *plain}
    assert not list(tmp_path.rglob("evil.*"))


def test_an_index_that_names_what_is_not_there_is_refused(hub, triforce, plain):
    index = json.dumps({"weight_map": {"a": "gone.safetensors"}}).encode()
    hub.put(NAME, {"config.json": plain["config.json"], "model.safetensors.index.json": index})
    code, _, err = triforce("pull", NAME)
    assert (code, "names gone.safetensors, which is not in the repository" in err) == (4, True)


def test_weights_of_another_model_are_found_out(hub, triforce, folder, plain, tmp_path):
    other = files_of(save(random_model("qwen2"), tmp_path / "other"))
    hub.put(NAME, {**plain, "model.safetensors": other["model.safetensors"]})
    code, _, err = triforce("pull", NAME)
    assert (code, "the tensors do not fit config.json" in err) == (4, True)


# --- the disk ---

Usage = namedtuple("Usage", "total used free")


def test_too_small_a_disk_is_refused_before_weights_come(hub, triforce, folder, plain, monkeypatch):
    hub.put(NAME, plain)
    needed = weights_and_texts(plain)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1, 1, needed - 1))
    code, _, err = triforce("pull", NAME)
    assert (code, hub.asked()) == (3, ["config.json"])
    assert f"{size(needed)} are needed in {folder}" in err
    assert FOLDER_VARIABLE in err
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1, 1, needed))
    assert triforce("pull", NAME)[0] == 0


def test_a_pickled_shard_needs_room_beside_its_converted_file(hub, triforce, plain, tmp_path, monkeypatch):
    files = pickled(plain, tmp_path, 2)
    hub.put(NAME, files)
    shards = [len(data) for name, data in files.items() if name.endswith(".bin")]
    needed = weights_and_texts(files) - len(files["pytorch_model.bin.index.json"]) + max(shards)
    for free, code in ((needed - 1, 3), (needed, 0)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: Usage(1, 1, free))
        assert triforce("pull", NAME)[0] == code


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_on_the_way_says_so(hub, triforce, folder, plain, monkeypatch, reason):
    hub.put(NAME, plain)
    write = fetch.PartialFile.write

    def full(self, data):
        if self.tell() >= 4 * CHUNK:
            raise OSError(reason, os.strerror(reason))
        return write(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(fetch.PartialFile, "write", full)
        code, _, err = triforce("pull", NAME)
    assert (code, f"the disk of {folder} is full" in err) == (3, True)
    assert triforce("pull", NAME)[0] == 0
    assert pulled(folder) == plain


# --- pickled weights ---


def pickled(plain: dict[str, bytes], tmp_path: Path, num_shards: int = 1, **changes: object) -> dict[str, bytes]:
    """The model's files with its weights as pytorch_model*.bin, with the extra tensors of old checkpoints."""
    state = {**random_model().state_dict(), **changes, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    files = {name: data for name, data in plain.items() if name != "model.safetensors"}
    names = [f"pytorch_model-{n:05d}-of-{num_shards:05d}.bin" for n in range(1, num_shards + 1)]
    names = names if num_shards > 1 else ["pytorch_model.bin"]
    parts = {name: dict(list(state.items())[n::num_shards]) for n, name in enumerate(names)}
    for name, part in parts.items():
        torch.save(part, tmp_path / "shard")
        files[name] = (tmp_path / "shard").read_bytes()
    if num_shards > 1:
        index = {"weight_map": {tensor: name for name, part in parts.items() for tensor in part}}
        files["pytorch_model.bin.index.json"] = json.dumps(index).encode()
    return files


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    with Checkpoint.open(folder) as checkpoint:
        check_model(checkpoint, read_config(folder))
        found = {name: torch.empty(checkpoint.shape(name), dtype=checkpoint.dtype(name)) for name in checkpoint.names()}
        for name, tensor in found.items():
            checkpoint.read_into(name, tensor)
        return found


def same_bits(tensors: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> bool:
    return tensors.keys() == state.keys() and all(
        tensor.dtype == state[name].dtype and tensor.numpy().tobytes() == state[name].numpy().tobytes()
        for name, tensor in tensors.items()
    )


@pytest.mark.parametrize("num_shards", [1, 3])
def test_pickled_weights_become_safetensors_bit_for_bit(hub, triforce, folder, plain, tmp_path, num_shards):
    files = pickled(plain, tmp_path, num_shards)
    hub.put(NAME, files)
    code, _, err = triforce("pull", NAME)
    assert (code, "its weights are pickled" in err) == (0, True)
    texts = {name for name in plain if name != "model.safetensors"}
    shards = {f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)} | {"model.safetensors.index.json"}
    assert set(pulled(folder)) == texts | (shards if num_shards == 3 else {"model.safetensors"})
    assert same_bits(tensors_in(folder), random_model().state_dict())
    hub.asked()
    assert json.loads(triforce("pull", NAME, "--json")[1])["fetched_bytes"] == 0
    assert not any(name.endswith(".bin") for name in hub.asked())
    assert same_bits(tensors_in(folder), random_model().state_dict())


def test_shards_that_were_converted_are_not_fetched_again(hub, triforce, folder, plain, tmp_path):
    hub.put(NAME, pickled(plain, tmp_path, 3))
    break_off(hub, triforce, "pytorch_model-00003-of-00003.bin", 2 * CHUNK)
    assert len(list(folder.rglob("*.safetensors"))) == 2
    assert not list(folder.rglob("*.bin"))  # no more than one lies beside what is made of it
    hub.requests.clear()
    assert triforce("pull", NAME)[0] == 0
    assert hub.requests == [("pytorch_model-00003-of-00003.bin", 2 * CHUNK)]
    assert same_bits(tensors_in(folder), random_model().state_dict())


def test_a_shard_that_came_and_was_not_converted_waits(hub, triforce, folder, plain, tmp_path, monkeypatch):
    hub.put(NAME, pickled(plain, tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr("offload.hub.pull.convert_shard", lambda *args, **named: 1 / 0)
        assert triforce("pull", NAME)[0] == 1
    hub.requests.clear()
    assert triforce("pull", NAME)[0] == 0
    assert hub.requests == []
    assert same_bits(tensors_in(folder), random_model().state_dict())


class Evil:
    """An object whose unpickling would create the file."""

    path = ""

    def __reduce__(self):
        return (open, (Evil.path, "w"))


def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(hub, triforce, folder, plain, tmp_path):
    Evil.path = str(tmp_path / "ran")
    hub.put(NAME, pickled(plain, tmp_path, evil=Evil()))
    torch.load(tmp_path / "shard", weights_only=False)
    assert (tmp_path / "ran").exists()  # so it would
    (tmp_path / "ran").unlink()
    code, _, err = triforce("pull", NAME)
    assert (code, "holds more than tensors, or is damaged; no code in it was run" in err) == (4, True)
    assert not (tmp_path / "ran").exists()
    assert state_of(folder) == "broken off"


@pytest.mark.parametrize("version", ["2.9.1", "2.9.1+cu128", "2.6.0", "1.13.1"])
def test_pickles_are_left_to_a_torch_that_reads_them_safely(
    hub, triforce, folder, plain, tmp_path, monkeypatch, version
):
    """Before 2.10 a crafted file could break torch's weights_only (CVE-2026-24747). Nothing is fetched."""
    hub.put(NAME, pickled(plain, tmp_path))
    monkeypatch.setattr(torch, "__version__", version)
    code, _, err = triforce("pull", NAME)
    assert (code, f"with torch {version} (CVE-2026-24747); install torch 2.10 or later" in err) == (4, True)
    assert "or take a repository with safetensors" in err
    assert "pytorch_model.bin" not in hub.asked()
    with pytest.raises(ModelError, match="CVE-2026-24747"):
        convert_shard(tmp_path / "shard", tmp_path / "made.safetensors", source="", tied=False)
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    assert triforce("pull", NAME)[0] == 0


# --- config only ---


def test_config_only_is_enough_to_plan_and_not_to_generate(hub, triforce, folder, plain):
    hub.put(NAME, plain)
    code, _, err = triforce("pull", NAME, "--config-only")
    assert (code, set(pulled(folder))) == (0, set(plain) - {"model.safetensors"})
    assert err.endswith(f"next: triforce plan --model {NAME}\n")
    assert triforce("plan", "--model", NAME, "--max-tokens", "10")[0] == 0
    code, _, err = triforce("generate", "--model", NAME, "--prompt", "x")
    assert (code, f"only its config.json was pulled; 'triforce pull {NAME}' fetches its weights" in err) == (4, True)
    assert triforce("pull", NAME)[0] == 0
    assert pulled(folder) == plain


def test_config_only_leaves_weights_that_are_there(hub, triforce, folder, plain):
    hub.put(NAME, plain)
    triforce("pull", NAME)
    assert triforce("pull", NAME, "--config-only")[0] == 0
    assert pulled(folder) == plain
    assert "model.safetensors" in Origin.read(folder).files


def test_config_only_leaves_what_has_come_of_weights(hub, triforce, folder, plain):
    hub.put(NAME, plain)
    break_off(hub, triforce, "model.safetensors", 5 * CHUNK)
    assert triforce("pull", NAME, "--config-only")[0] == 0
    assert state_of(folder) == "config only"
    hub.requests.clear()
    assert triforce("pull", NAME)[0] == 0
    assert hub.requests[-1] == ("model.safetensors", 5 * CHUNK)
    assert pulled(folder) == plain


def test_the_hash_of_a_small_file_is_gits(tmp_path):
    """printf 'hello\\n' | git hash-object --stdin"""
    (tmp_path / "file").write_bytes(b"hello\n")
    for digest in ("ce013625030ba8dba906f756967f9e9ca394464a", hashlib.sha256(b"hello\n").hexdigest()):
        file = fetch.RemoteFile("file", 6, digest)
        assert fetch.is_whole(tmp_path / "file", file, count=lambda count: None)
        assert not fetch.is_whole(tmp_path / "none", file, count=lambda count: None)
