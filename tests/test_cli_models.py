"""Names of models: what `--model` and `--draft` take them for, and what `triforce models` lists."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kit.models import byte_tokenizer, random_model, save
from offload.errors import ModelError
from offload.hub.library import MOVING, STAGING, Origin, has_room, locate, state_of
from offload.hub.names import ALIASES, FOLDER_VARIABLE, alias_of, id_of, is_id, repository_of, short_name
from offload.speed import hardware
from offload.speed.hardware import Hardware
from triforce_cli import __version__
from triforce_cli.setup.choice import choose_models

YARN = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "finetuned": True}
LLAMA_13B = {
    "model_type": "llama", "vocab_size": 32000, "rms_norm_eps": 1e-5, "torch_dtype": "float16", "hidden_size": 5120,
    "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40, "max_position_embeddings": 4096,
    "rope_scaling": YARN,
}  # fmt: skip
LARGE = "NousResearch/Yarn-Llama-2-13b-128k"
SMALL = "JackFram/llama-68m"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "models"))
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path / "models"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with 32 GiB."""
    monkeypatch.setattr(hardware, "probe", lambda device: Hardware("cpu", "test CPU", 2**35, 2**35, True))


def put(folder: Path, config: object = LLAMA_13B, *, weights: bool = True) -> Path:
    """A model as far as listing and planning look at it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if weights:
        save_file({"a": torch.zeros(250)}, folder / "model.safetensors")
    return folder


# --- names ---


def test_aliases_are_names_of_repositories_and_of_drafts_among_them():
    names = [alias.name for alias in ALIASES]
    assert len(set(names)) == len(names)
    for alias in ALIASES:
        assert is_id(alias.repository)
        assert alias.name == alias.repository.split("/")[1].lower()
        assert alias.draft == "" or alias.draft in names
        assert (repository_of(alias.name), short_name(alias.repository)) == (alias.repository, alias.name)
    for name in ("yarn-llama-2-13b-128k", "yarn-llama-2-7b-128k", "lwm-text-chat-128k"):
        assert alias_of(name).draft == "llama-68m"


@pytest.mark.parametrize(
    "name", ["", "x", "a/b/c", "..", "../x", "a/..", "a/.b", "a/b..c", "a//b", "/a", "a/b\n", "ä/b"]
)
def test_what_could_lead_out_of_the_folder_is_no_id(name):
    assert not is_id(name)
    assert id_of(name) is None


def test_repositories_are_found_whatever_their_case():
    assert id_of("largeworldmodel/lwm-text-chat-128k") == "LargeWorldModel/LWM-Text-Chat-128K"
    assert id_of("Llama-68M") == SMALL


# --- what --model takes them for ---


def test_a_folder_wins_over_a_name(root, tmp_path, monkeypatch):
    put(root / SMALL)
    assert locate("llama-68m") == locate(SMALL) == root / SMALL
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-68m").mkdir()
    (tmp_path / SMALL).mkdir(parents=True)
    assert (locate("llama-68m"), locate(SMALL)) == (Path("llama-68m"), Path(SMALL))


def test_a_name_of_what_is_not_here_says_what_to_run(root, triforce):
    code, out, err = triforce("generate", "--model", LARGE, "--prompt", "x")
    assert (code, out) == (4, "")
    said = "is not a folder, and no such model was pulled; run 'triforce pull yarn-llama-2-13b-128k'\n"
    assert err == f"error: model {LARGE} {said}"
    assert triforce("chat", "--model", "yarn-llama-2-13b-128k")[2] == f"error: model yarn-llama-2-13b-128k {said}"
    assert "run 'triforce pull some/other'" in triforce("plan", "--model", "some/other")[2]
    err = triforce("plan", "--model", "nonsense")[2]
    assert "is not a model's name" in err.replace("folder and not", "folder, is not")


def test_families_that_run_here_are_listed_with_what_is_refused(triforce):
    code, out, _ = triforce("models", "--families")
    assert code == 0
    about = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert about["granite"].startswith("Granite 3")
    assert about["cohere"].startswith("Command R")
    assert about["llava"].endswith("not: pictures")
    listed = json.loads(triforce("models", "--families", "--json")[1])["families"]
    assert [each["model_type"] for each in listed] == [line.split()[0] for line in out.splitlines()]
    assert [each["refused"] for each in listed if each["model_type"] == "mistral3"] == ["pictures"]


def test_a_name_of_what_was_not_converted_says_what_was(root):
    put(root / "local/mine")
    assert locate("local/mine") == root / "local/mine"
    with pytest.raises(ModelError, match=r"no model yours was converted into .*; there are: local/mine"):
        locate("local/yours")


@pytest.mark.parametrize(
    ("begun", "state"), [([STAGING], "broken off"), ([STAGING, "config.json"], "config only"), ([], "absent")]
)
def test_what_is_not_whole_is_not_used(root, begun, state):
    folder = root / SMALL
    folder.mkdir(parents=True)
    for name in begun:
        (folder / name).mkdir() if name == STAGING else (folder / name).write_text("{}")
    assert state_of(folder) == state
    with pytest.raises(ModelError, match="'triforce pull llama-68m'"):
        locate("llama-68m")


def test_a_model_whose_files_were_changing_places_is_not_used(root):
    folder = put(root / SMALL)
    (folder / STAGING).mkdir()
    assert locate("llama-68m") == folder  # an update has begun
    (folder / STAGING / MOVING).touch()
    with pytest.raises(ModelError, match="interrupted"):
        locate("llama-68m")


def test_a_model_named_by_its_name_comes_with_its_draft_and_says_so(root):
    put(root / LARGE)
    alone = choose_models(Path("yarn-llama-2-13b-128k"), None)
    assert (alone.target, alone.draft) == (root / LARGE, None)
    assert alone.note == "no draft: llama-68m would suit yarn-llama-2-13b-128k; 'triforce pull llama-68m' fetches it"
    put(root / SMALL)
    for name in ("yarn-llama-2-13b-128k", LARGE):
        pair = choose_models(Path(name), None)
        assert (pair.target, pair.draft) == (root / LARGE, root / SMALL)
        assert pair.note == f"draft: llama-68m, which suits {name} (--draft none goes without)"
    for model, draft in ((LARGE, "none"), (str(root / LARGE), None), ("llama-68m", None)):
        chosen = choose_models(Path(model), draft)
        assert (chosen.draft, chosen.note) == (None, "")
    named = choose_models(Path(LARGE), "llama-68m")
    assert (named.draft, named.note) == (root / SMALL, "")


def test_generate_and_plan_run_on_names(root, triforce, tmp_path):
    save(random_model(vocab_size=258), root / LARGE)
    byte_tokenizer().save_pretrained(root / LARGE)
    save(random_model(vocab_size=258, seed=1), root / SMALL)
    byte_tokenizer().save_pretrained(root / SMALL)
    args = ("--model", "yarn-llama-2-13b-128k", "--max-tokens", "4")
    (tmp_path / "prompt.txt").write_text("Once upon a time")
    code, out, err = triforce("generate", *args, "--prompt-file", str(tmp_path / "prompt.txt"), "--json")
    assert (code, "draft: llama-68m, which suits yarn-llama-2-13b-128k" in err) == (0, True)
    assert json.loads(out)["model"] == {"target": str(root / LARGE), "draft": str(root / SMALL)}
    code, out, err = triforce("plan", *args, "--json")
    assert (code, json.loads(out)["model"]) == (0, str(root / LARGE))
    assert err == "draft: llama-68m, which suits yarn-llama-2-13b-128k (--draft none goes without)\n"


def test_a_plan_needs_no_weights(root, triforce):
    put(root / LARGE, weights=False)
    args = ("--model", LARGE, "--gpus", "2")
    assert triforce("plan", *args)[0] == 0
    code, _, err = triforce("generate", "--model", LARGE, "--prompt", "x")
    assert (code, "only its config.json was pulled; 'triforce pull yarn-llama-2-13b-128k' fetches" in err) == (4, True)


# --- what is listed ---


@pytest.mark.usefixtures("machine")
def test_models_lists_what_is_here_what_it_takes_and_what_can_be_pulled(root, triforce):
    put(root / LARGE)
    put(root / "local/mine", {**LLAMA_13B, "num_hidden_layers": 4})
    put(root / "some/config", {**LLAMA_13B, "num_hidden_layers": 60}, weights=False)
    put(root / "some/mamba", {**LLAMA_13B, "model_type": "mamba"})
    put(root / "some/torn", []).joinpath("config.json").write_text("{")
    (put(root / "some/cut") / "model.safetensors").write_bytes(b"x" * 20)
    (put(root / "some/gap", weights=False) / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b"}}')
    (root / "some/gap/b.safetensors").write_bytes(b"")
    (root / "some/begun" / STAGING).mkdir(parents=True)
    (root / "some/empty").mkdir()
    (root / "a file").write_text("")
    code, out, err = triforce("models")
    lines = out.splitlines()
    assert (code, " ".join(lines[0].split())) == (0, "name on disk params context KV/token fits here draft")
    rows = {line.split()[0]: line.split()[1:] for line in lines[1 : lines.index("")] if not line.startswith("    ")}
    assert rows["demo-target"][0] == "(embedded)"
    assert rows["demo-target"][-2:] == ["all", "demo-draft"]
    target = rows["yarn-llama-2-13b-128k"]
    assert target[:7] == ["1.41", "kB", "13.0", "B", "131,072", "819", "kB"]
    assert target[-1] == "llama-68m"
    assert 0 < int(target[7].replace(",", "")) < 12_000  # 32 GiB less 26 GB of weights
    assert rows["local/mine"][-2:] == ["all", "-"]
    assert rows["some/config"][0] == "config"
    assert rows["some/config"][-2] == "nothing"
    for name in ("mamba", "torn", "begun", "cut", "gap"):
        assert rows[f"some/{name}"][2:] == ["-", "-", "-", "-"]
    words = " ".join(out.split())  # a long folder is wrapped elsewhere
    assert "its header claims" in words
    assert "shard 'b' must be a plain name" in words
    assert 'model_type is "mamba"' in words
    assert "cannot be read as JSON" in words
    assert "its pull was interrupted; 'triforce pull some/begun' resumes it" in words
    assert "empty" not in out
    absent = lines[lines.index("not here yet (triforce pull NAME):") + 1 :]
    assert absent[0].split() == ["name", "download", "fits", "here", "owner"]
    pulled = {line.split()[0]: line.split()[1:-1] for line in absent[1:]}
    assert pulled["llama-3.1-8b-instruct"] == ["16.1", "GB", "yes"]
    assert pulled["llama-68m"] == ["-", "-"]
    assert [line.split()[0] for line in absent[1:]] == [alias.name for alias in ALIASES if alias.repository != LARGE]
    assert err == f"in {root}; what fits here: on test CPU, 34.4 GB free\n"


@pytest.mark.usefixtures("machine")
def test_models_as_json(root, triforce):
    folder = put(root / LARGE)
    Origin(source=LARGE, commit="c" * 40, license="llama2", files=("config.json",)).write(folder)
    put(root / "some/mamba", {"model_type": "mamba"})
    code, out, err = triforce("models", "--json")
    said = json.loads(out)
    assert (code, err, said["folder"], said["version"]) == (0, "", str(root), __version__)
    assert [model["name"] for model in said["models"]][:2] == ["demo-target (embedded)", "demo-draft (embedded)"]
    large, mamba = said["models"][2:]
    assert 0 < large.pop("longest_context") < large["context"]
    assert large == {
        "name": "yarn-llama-2-13b-128k",
        "folder": str(folder),
        "state": "whole",
        "source": LARGE,
        "commit": "c" * 40,
        "license": "llama2",
        "bytes": sum(path.stat().st_size for path in folder.iterdir()),
        "num_parameters": 13_015_864_320,
        "context": 131_072,
        "kv_bytes_per_token": 819_200,
        "draft": "llama-68m",
        "problem": None,
    }
    assert (mamba["name"], mamba["context"], mamba["longest_context"]) == ("some/mamba", None, None)
    assert "mamba" in mamba["problem"]
    assert said["absent"][0] == {
        "name": "yarn-llama-2-7b-128k",
        "repository": "NousResearch/Yarn-Llama-2-7b-128k",
        "draft": "llama-68m",
        "bytes": 13_500_000_000,
        "fits": True,
    }


@pytest.mark.parametrize(
    ("hardware_", "fits"),
    [
        (Hardware("cpu", "CPU", 17 * 10**9, 17 * 10**9, True), True),
        (Hardware("cpu", "CPU", 16 * 10**9, 16 * 10**9, True), False),
        (Hardware("cpu", "CPU", 17 * 10**9, 17 * 10**9, False), False),  # which computes in fp32
        (Hardware("cuda:0", "GPU", 10**9, 16 * 10**9, True), True),
        (Hardware("cuda:0", "GPU", 10**9, 15 * 10**9, True), False),
    ],
)
def test_a_model_fits_where_its_weights_have_room(hardware_: Hardware, fits: bool) -> None:
    assert has_room(alias_of("llama-3.1-8b-instruct"), hardware_) is fits
    assert has_room(alias_of("llama-68m"), hardware_) is None


@pytest.mark.usefixtures("machine")
def test_an_unreadable_note_of_the_origin_is_a_problem_of_one_model(root, triforce):
    (put(root / SMALL) / "triforce.json").write_text('{"source": 3, "commit": "", "license": "", "files": []}')
    code, out, _ = triforce("models")
    assert (code, "source is 3; it must be a text; remove the file" in " ".join(out.split())) == (
        0,
        True,
    )


def test_models_fits_a_narrow_terminal_and_says_where_it_looked(root, triforce, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    put(root / "some/mamba", {"model_type": "mamba"})
    code, out, err = triforce("models", "--device", "cpu")
    assert code == 0
    assert max(map(len, out.partition("not here yet")[2].splitlines())) <= 60
    reason = [line for line in out.splitlines() if line.startswith("    ")]
    assert len(reason) > 1
    assert all(len(line) <= 60 for line in reason if os.sep not in line)
    assert str(root) in err
    assert not (root / "some/mamba" / STAGING).exists()
