"""`triforce models rm`: what goes, what stays, and what is refused."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from offload.errors import ModelError
from offload.hub import removal
from offload.hub.library import LOCK, STAGING
from offload.hub.names import FOLDER_VARIABLE
from offload.hub.removal import find_stored
from test_architecture import heavy_modules_after
from test_cli_models import LARGE, SMALL, put
from triforce_cli.settings import configuration

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "models"))
    put(tmp_path / "models" / LARGE)
    put(tmp_path / "models" / SMALL)
    put(tmp_path / "models/local/mine")
    return tmp_path / "models"


def models_in(root: Path) -> set[str]:
    return {f"{path.parent.name}/{path.name}" for path in root.glob("*/*")}


def test_named_models_go_with_their_owners_folders_and_the_others_stay(root: Path, triforce: Run) -> None:
    nbytes = sum(path.stat().st_size for path in (root / SMALL).iterdir())
    code, out, err = triforce("models", "rm", "llama-68m", SMALL, "local/mine", "--yes")
    assert (code, out, len(err.splitlines())) == (0, "", 2)
    assert err.startswith(f"removed llama-68m, {nbytes / 1000:.2f} kB\n")
    assert [path.name for path in root.iterdir()] == [LARGE.split("/")[0]]
    assert models_in(root) == {LARGE}


def test_an_alias_is_taken_for_its_model(root: Path, triforce: Run, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('[aliases]\nlarge = "long"\nlong = "yarn-llama-2-13b-128k"\n')
    assert triforce("models", "rm", "large", "-y", "-q", "--config", str(tmp_path / "c.toml")) == (0, "", "")
    assert models_in(root) == {SMALL, "local/mine"}


@pytest.mark.parametrize("name", ["none/such", "{root}/local/mine", "..", "local", "local/mine/config.json", "x.gguf"])
def test_what_is_not_among_the_models_is_refused_and_nothing_goes(name: str, root: Path, triforce: Run) -> None:
    name = name.format(root=root)
    code, _, err = triforce("models", "rm", "local/mine", name, "--yes")
    assert code == 4
    assert f"{name} is no model in {root}; there are: llama-68m, yarn-llama-2-13b-128k, local/mine" in err
    assert len(models_in(root)) == 3


def test_without_a_terminal_it_wants_yes(root: Path, triforce: Run) -> None:
    code, _, err = triforce("models", "rm", "local/mine")
    assert (code, "give --yes" in err, len(models_in(root))) == (2, True, 3)


def test_a_pull_that_was_interrupted_can_go_and_one_that_runs_cannot(root: Path, triforce: Run) -> None:
    staging = root / "some/begun" / STAGING
    staging.mkdir(parents=True)
    with (staging / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, _, err = triforce("models", "rm", "some/begun", "--yes")
        assert (code, "another process is pulling into" in err, staging.exists()) == (4, True, True)
    assert triforce("models", "rm", "some/begun", "--yes")[0] == 0
    assert not (root / "some").exists()


def test_a_link_is_left_to_its_owner(root: Path, triforce: Run, tmp_path: Path) -> None:
    (root / "local/mine").rename(tmp_path / "mine")
    (root / "local/mine").symlink_to(tmp_path / "mine")
    code, _, err = triforce("models", "rm", "local/mine", "--yes")
    assert (code, "is a link; remove it yourself" in err) == (4, True)
    assert (tmp_path / "mine/config.json").exists()


def test_half_a_model_is_never_taken_for_one(root: Path, triforce: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal that is killed has moved the folder away first; the next one takes the rest."""
    with monkeypatch.context() as patch:
        patch.setattr(removal.shutil, "rmtree", lambda path: (path / "config.json").unlink())
        assert triforce("models", "rm", "local/mine", "--yes")[0] == 0
    assert models_in(root) - {LARGE, SMALL} == {f"{next(root.glob('.removed-*')).name}/model.safetensors"}
    with pytest.raises(ModelError, match="there are: llama-68m, yarn"):
        find_stored("local/mine")
    assert triforce("models", "rm", "llama-68m", "--yes")[0] == 0
    assert [path.name for path in root.iterdir()] == [LARGE.split("/")[0]]


def test_one_of_several_gguf_files_goes_alone(root: Path, triforce: Run) -> None:
    folder = root / "some/quants"
    folder.mkdir(parents=True)
    for name in ("a.gguf", "b.gguf"):
        (folder / name).write_bytes(b"GGUF" + bytes(20))
    assert triforce("models", "rm", "some/quants/a.gguf", "--yes")[0] == 0
    assert [path.name for path in folder.iterdir()] == ["b.gguf"]
    assert triforce("models", "rm", "some/quants/b.gguf", "--yes")[0] == 0  # the last of them is the model
    assert not folder.exists()


def test_of_a_gguf_file_in_parts_the_first_goes_last(
    root: Path, triforce: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is what names the others: a removal that is broken off is done by the next one."""
    folder, unlink, gone = root / "some/quants", Path.unlink, list[str]()
    folder.mkdir(parents=True)
    for name in ("a-00001-of-00003.gguf", "a-00002-of-00003.gguf", "a-00003-of-00003.gguf", "b.gguf"):
        (folder / name).write_bytes(b"GGUF" + bytes(20))

    def broken_off(path: Path, missing_ok: bool = False) -> None:
        if gone:
            raise OSError(5, "Input/output error")
        gone.append(path.name)
        unlink(path, missing_ok)

    first = "some/quants/a-00001-of-00003.gguf"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", broken_off)
        assert triforce("models", "rm", first, "--yes")[0] == 4
    assert gone == ["a-00003-of-00003.gguf"]
    assert triforce("models", "rm", first, "--yes")[0] == 0
    assert [path.name for path in folder.iterdir()] == ["b.gguf"]


def test_options_of_the_listing_are_not_lost_before_another_command(root: Path, triforce: Run) -> None:
    code, _, err = triforce("models", "--quiet", "rm", "local/mine", "--yes")
    assert (code, "--quiet stands before rm; put it behind triforce models rm" in err) == (2, True)
    assert triforce("models", "rn")[0] == 4  # no model has this name
    assert len(models_in(root)) == 3


def test_the_listing_and_its_section_of_the_file_are_as_before(
    root: Path, triforce: Run, tmp_path, monkeypatch
) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[models]\njson = true\n\n[models.rm]\nyes = true\n")
    monkeypatch.setenv(configuration.VARIABLE, str(file))
    code, out, _ = triforce("models")
    assert (code, len(json.loads(out)["models"])) == (0, 5)
    assert triforce("models", "rm", "local/mine")[0] == 0
    assert models_in(root) == {LARGE, SMALL}
    commands = {
        tuple(each["commands"]) for each in json.loads(triforce("config", "show", "models", "--json")[1])["settings"]
    }
    assert {word for words in commands for word in words} == {"models", "models show", "models rm"}


def test_a_removal_loads_no_torch() -> None:
    assert heavy_modules_after("import triforce_cli.commands.models, offload.hub.removal") == ""
