"""GGUF files of a repository: listed by their headers alone, fetched by their labels, and by what --model names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import huggingface_hub
import pytest

from kit.gguf_models import write_gguf
from kit.hub import Hub, running
from kit.models import random_model, save
from kit.terminals import Terminal
from offload.config.gguf_header import read_header
from offload.config.kinds import Kind, kinds_of_header
from offload.config.reading import read_config
from offload.errors import ModelError
from offload.hub import headers
from offload.hub.files import gguf_models
from offload.hub.headers import Described, Refused, describe
from offload.hub.labels import is_model, label_of, stored_as, with_label
from offload.hub.library import locate, stored_name
from offload.hub.names import FOLDER_VARIABLE, tagged
from offload.hub.offers import CONTEXT, offer_of
from offload.hub.remote import list_repository
from offload.plan.request import Request
from offload.speed.hardware import probe
from test_cli_fake import environment, play

Run = Callable[..., tuple[int, str, str]]
NAME = "owner/tiny-GGUF"
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64, "vocab_size": 300}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
FIRST = 2048  # bytes of a file that are asked for at once
FOREIGN = 144  # the number of ik_llama.cpp's IQ4_KS


def with_mixture(label: str) -> Callable[[str], str]:
    """Feed-forward matrices in the kind of the label, attention in Q8_0, all else in F16."""
    return lambda name: label if "mlp" in name else "Q8_0" if "attn" in name else "F16"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A model in three quantisations, the second in parts in a folder, with other lists of tokens in the last."""
    made = tmp_path_factory.mktemp("repository")
    folder = save(random_model(**WIDE, rope_parameters=LLAMA3, max_position_embeddings=65536), made / "folder")
    write_gguf(folder, made / "tiny-Q4_K_M.gguf", kind=with_mixture("Q4_K"))
    write_gguf(folder, made / "tiny-UD-Q5_K_XL.gguf", kind=with_mixture("Q5_K"), split=12)
    write_gguf(folder, made / "tiny-TQ1_0.gguf", kind=with_mixture("TQ1_0"))
    found = {path.name: path.read_bytes() for path in made.glob("*.gguf")}
    return {f"UD-Q5_K_XL/{name}" if "-of-" in name else name: data for name, data in found.items()}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    constants = huggingface_hub.constants
    for name, value in ((FOLDER_VARIABLE, tmp_path / "models"), ("NO_PROXY", "127.0.0.1"), ("COLUMNS", "100")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 512)
    monkeypatch.setattr(headers, "FIRST_BYTES", FIRST)
    monkeypatch.setattr(headers, "LONG_BYTES", 1024)
    monkeypatch.setattr(headers, "_COMPARED_BYTES", 256)
    with running() as hub, monkeypatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", hub.url)
        yield hub


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder of models."""
    return tmp_path / "models"


def described(name: str = NAME) -> list[Described | Refused]:
    listing = list_repository(name, "main")
    return [*describe(listing, gguf_models(listing), report=lambda done: None)]


def put_down(data: dict[str, bytes], folder: Path) -> list[Path]:
    """The files as they are, for the reader of whole files."""
    for name, content in data.items():
        (folder / Path(name).name).write_bytes(content)
    return [folder / Path(name).name for name in sorted(data)]


# --- labels ---


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("Qwen3-8B-Q4_K_M.gguf", "Q4_K_M"),
        ("Qwen3.6-35B-A3B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("UD-IQ2_M/Big-UD-IQ2_M-00001-of-00003.gguf", "UD-IQ2_M"),
        ("Q6_K/model-00001-of-00002.gguf", "Q6_K"),
        ("ggml-model-q4_0.gguf", "Q4_0"),
        ("Name.i1-IQ3_XXS.gguf", "IQ3_XXS"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("gpt-oss-20b-MXFP4_MOE.gguf", "MXFP4_MOE"),
        ("bitnet-TQ2_0.gguf", "TQ2_0"),
        ("model-fp16.gguf", "FP16"),
        ("Model-BF16.gguf", "BF16"),
        ("Model-NVFP4.gguf", "NVFP4"),
        ("Phi-3-mini-4k-instruct-q4.gguf", "Q4"),
        ("Model-Q8_0-Q4_K_M-v2.gguf", "Q4_K_M"),
        ("Qwen3.8-27B-APEX-I-Nano.gguf", ""),
        ("Model-4B-F5.gguf", ""),
    ],
)
def test_the_label_of_a_file_is_the_last_in_its_name_or_its_folders(path: str, label: str) -> None:
    assert label_of(path) == label


def test_a_label_is_found_in_any_case_of_letters_and_behind_ud() -> None:
    paths = ["a-Q4_K_M.gguf", "a-UD-Q4_K_M.gguf", "a-UD-Q2_K_XL.gguf", "b/a-iq1_s.gguf"]
    assert with_label(paths, "q4_k_m") == paths[:1]
    assert with_label(paths, "ud-q4_k_m") == paths[1:2]
    assert with_label(paths, "Q2_K_XL") == paths[2:3]
    assert with_label(paths, "IQ1_S") == paths[3:]
    assert with_label(paths, "Q4_K") == with_label(paths, "UD-IQ1_S") == []


def test_image_encoders_importance_matrices_and_later_parts_are_no_models() -> None:
    assert not any(map(is_model, ("mmproj-F16.gguf", "a.imatrix.gguf", "a-00002-of-00002.gguf", "a.txt")))
    assert all(map(is_model, ("a.gguf", "q/a-00001-of-00002.gguf")))


def test_a_file_of_a_folder_is_stored_by_a_name_that_tells_its_label() -> None:
    assert stored_as("Q4_K_M/a-Q4_K_M-00001-of-00002.gguf") == "a-Q4_K_M-00001-of-00002.gguf"
    assert stored_as("Q4_K_M/model-00001-of-00002.gguf") == "Q4_K_M-model-00001-of-00002.gguf"


@pytest.mark.parametrize(
    "name", ["a/b", "a/b:", "a/b:Q4/x", "a:Q4", "../b:Q4", "a/b:..", "local/b:Q4", "a/b:-x", "a/b/c:Q4"]
)
def test_a_name_with_a_label_has_owner_name_and_a_plain_label(name: str) -> None:
    assert tagged(name) is None
    assert tagged("a/b.c:UD-Q4_K_XL") == ("a/b.c", "UD-Q4_K_XL")


# --- headers ---


def test_headers_tell_what_whole_files_tell(hub: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    """Kinds and config, of parts too, and of numbers that are in no header: rope's."""
    hub.put(NAME, files)
    whole = {label_of(path.name): path for path in put_down(files, tmp_path) if is_model(path.name)}
    found = described()
    assert [each.gguf.label for each in found] == ["UD-Q5_K_XL", "Q4_K_M", "TQ1_0"]
    for each in found:
        assert isinstance(each, Described)
        path = whole[each.gguf.label]
        assert each.config == read_config(path)
        assert each.config.rope.kind == "llama3"
        assert list(each.kinds) == kinds_of_header(read_header(path))
        assert each.num_bytes == sum(len(data) for name, data in files.items() if label_of(name) == each.gguf.label)
    assert len(found[0].gguf.parts) == 2


def test_lists_that_files_share_are_fetched_once(hub: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    """Each of twenty files would cost its whole tokenizer, 6 MB of them for a large vocabulary."""
    one, other = "tiny-Q4_K_M.gguf", "tiny-TQ1_0.gguf"
    hub.put(NAME, {one: files[one], other: files[other]})
    (tmp_path / other).write_bytes(files[other])
    described()
    assert [name for name, _ in hub.requests].count(other) == 3  # before the lists, behind them, and rope's factors
    spent, hub.sent = hub.sent, 0
    hub.put(NAME, {one: files[one]})
    described()
    of_other, start = spent - hub.sent, min(each.start for each in read_header(tmp_path / other).tensors.values())
    assert start > 6000
    assert of_other < 2 * FIRST + 512


def test_lists_that_end_otherwise_are_fetched(hub: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    """Of as many tokens, the last of which is longer, and ends a reply."""
    folder = save(random_model(**WIDE), tmp_path / "folder")
    longer = {"change": lambda writer: writer.kv_data[0]["tokenizer.ggml.tokens"].value.__setitem__(-1, "<|eot_id|>")}
    write_gguf(folder, path := tmp_path / "tiny-Q8_0.gguf", kind="Q8_0", **longer)
    one = "tiny-Q4_K_M.gguf"
    hub.put(NAME, {one: files[one], path.name: path.read_bytes()})
    first, last = described()
    assert isinstance(first, Described)
    assert isinstance(last, Described)
    assert last.config == read_config(path)
    assert set(last.config.eos_token_ids) > set(first.config.eos_token_ids)


def test_what_cannot_run_is_told_with_its_reason_and_the_others_are_listed(hub: Hub, files: dict[str, bytes]) -> None:
    data = files["tiny-Q4_K_M.gguf"]
    kind, other = (number.to_bytes(4, "little") for number in (gguf.GGMLQuantizationType.Q4_K, FOREIGN))
    at = data.index(kind, data.index(b"ffn_down.weight"))
    unknown = data.replace(b"llama.", b"lamma.").replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0lamma")
    hub.put(NAME, {
        "a-IQ4_KS.gguf": data[:at] + other + data[at + 4 :], "b-Q8_0.gguf": unknown, "c-Q4_K.gguf": data,
        "d-Q2_K.gguf": data[:5000], "e-Q3_K.gguf": b"", "f-Q5_K-00001-of-00002.gguf": data,
    })  # fmt: skip
    found = {each.gguf.label: each for each in described()}
    problems = {label: each.problem for label, each in found.items() if isinstance(each, Refused)}
    assert [*found] == ["IQ4_KS", "Q8_0", "Q4_K", "Q2_K", "Q3_K"]  # without the one of which a part is missing
    assert re.match(
        r"a-IQ4_KS.gguf: blk.0.ffn_down.weight is in IQ4_KS \(type 144\), which ik_llama.cpp", problems["IQ4_KS"]
    )
    assert problems["Q8_0"].startswith("b-Q8_0.gguf: its architecture is 'lamma'")
    assert found["Q8_0"].kinds == found["Q4_K"].kinds
    assert "d-Q2_K.gguf is not a whole GGUF file" in problems["Q2_K"]
    assert "it has 0 bytes" in problems["Q3_K"]
    assert set(problems) == {"IQ4_KS", "Q8_0", "Q2_K", "Q3_K"}


def test_headers_of_a_hub_without_parts_of_files_are_an_error(hub: Hub, files: dict[str, bytes], triforce: Run) -> None:
    hub.put(NAME, files)
    hub.ranges = False
    code, _, err = triforce("pull", NAME)
    assert (code, "the hub sent 0; try again" in err) == (1, True)


def test_headers_end_at_a_limit(hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    hub.put(NAME, files)
    monkeypatch.setattr(headers, "MOST_BYTES", 3 * FIRST)
    first, *others = described()
    assert isinstance(first, Described)
    assert all(isinstance(each, Refused) and each.problem.startswith("not looked at: ") for each in others)


# --- the page ---


def test_a_pipe_gets_the_page_and_the_command_that_takes_the_first(
    hub: Hub, files: dict[str, bytes], root: Path, triforce: Run
) -> None:
    hub.put(NAME, files, license="mit")
    code, out, err = triforce("pull", NAME)
    lines = out.splitlines()
    assert (code, err) == (0, f"next: triforce pull {NAME}:UD-Q5_K_XL\n")
    assert lines[0] == f"{NAME} at main (cccccccccccc), licence mit: 3 models in GGUF files"
    titles = next(number for number, line in enumerate(lines) if "to fetch" in line)
    rows = [re.split(r" {2,}", line.strip()) for line in lines[titles + 1 : titles + 4]]
    assert [(row[0], row[1]) for row in rows] == [("1", "UD-Q5_K_XL"), ("2", "Q4_K_M"), ("3", "TQ1_0")]
    assert rows[0][3] == "all"
    assert re.fullmatch(r"Q8_0 \d+, F16 \d+, Q5_K \d+", rows[0][-1])
    assert "TQ1_0* " in rows[2][-1]
    assert "32,768 tokens of context" in " ".join(lines)
    assert "*: unpacked to 16 bits here" in " ".join(lines)
    assert not root.exists()


def test_predictions_are_those_of_plans_of_32k_tokens(hub: Hub, files: dict[str, bytes], triforce: Run) -> None:
    hub.put(NAME, files)
    document, hardware = json.loads(triforce("pull", NAME, "--json")[1]), probe("auto")
    assert document["context"] == 32_768
    for model, each in zip(document["models"], described(), strict=True):
        assert isinstance(each, Described)
        offer, short = (
            offer_of(each, hardware, request_of=Request.with_known_curves, context=n) for n in (32_768, CONTEXT)
        )
        assert offer is not None
        assert short is not None
        assert (model["label"], model["fits"], model["longest_context"]) == (each.gguf.label, True, offer.longest)
        assert model["seconds_per_token"] == pytest.approx(offer.seconds_per_token)
        assert model["seconds_per_token"] != pytest.approx(short.seconds_per_token)
        assert model["pull"] == [f"{NAME}:{model['label']}"]
        assert [kind["kind"] for kind in model["kinds"]] == [kind.name for kind in each.kinds]


def test_what_does_not_fit_comes_after_what_does_and_what_cannot_run_last(
    hub: Hub, files: dict[str, bytes], triforce: Run
) -> None:
    data, num_bytes = files["tiny-Q4_K_M.gguf"], 2 * 10**11
    names = ("a-F16.gguf", "b-Q8_0.gguf", "c-Q4_K.gguf", "d-Q2_K.gguf")
    large = {"size": num_bytes}
    hub.put(NAME, {**dict.fromkeys(names, data), "b-Q8_0.gguf": b"x" * 40}, listed={"a-F16.gguf": large})
    code, out, _ = triforce("pull", NAME)
    rows = [line.split() for line in out.partition("to fetch")[2].splitlines()[1:5]]
    assert (code, [row[:2] for row in rows[:2]]) == (0, [["1", "Q4_K"], ["2", "Q2_K"]])
    assert rows[2][:5] == ["F16", "200", "GB", "none", "-"]
    assert rows[3][:5] == ["Q8_0", "40", "B", "-", "-"]
    assert "b-Q8_0.gguf is not a whole GGUF file" in out


def test_plain_numbers_come_behind_the_others_though_they_are_larger(
    hub: Hub, files: dict[str, bytes], triforce: Run, tmp_path: Path
) -> None:
    """They were the first key on any machine that writes a token of them in a fifth of a second."""
    folder = save(random_model(**WIDE, max_position_embeddings=65536), tmp_path / "folder")
    write_gguf(folder, tmp_path / "tiny-F16.gguf", kind="F16")
    plain = (tmp_path / "tiny-F16.gguf").read_bytes()
    hub.put(NAME, {"tiny-F16.gguf": plain, "tiny-Q4_K_M.gguf": files["tiny-Q4_K_M.gguf"]})
    models = json.loads(triforce("pull", NAME, "--json")[1])["models"]
    assert [(model["label"], model["fits"]) for model in models] == [("Q4_K_M", True), ("F16", True)]
    assert models[0]["bytes"] < models[1]["bytes"]


def test_a_repository_of_no_model_that_fits_says_so(hub: Hub, triforce: Run) -> None:
    hub.put(NAME, {"a-Q4_K.gguf": b"x" * 40})
    code, out, err = triforce("pull", NAME)
    assert (code, "1 model in GGUF files" in out, "none of them fits here" in " ".join(out.split())) == (0, True, True)
    assert err == ""


Open = Callable[..., Terminal]


@pytest.fixture
def at_terminal() -> Iterator[Open]:
    """`triforce ARGS` at a terminal."""
    opened: list[Terminal] = []

    def begin(*args: str, columns: int = 100) -> Terminal:
        opened.append(
            Terminal(
                ["true"],
                env={},
                columns=columns,
                begin=lambda: play(list(args), environment(COLUMNS=str(columns)), stand_in=False),
            )
        )
        return opened[-1]

    yield begin
    for terminal in opened:
        terminal.close()


def test_a_key_fetches_a_model_and_q_none(hub: Hub, files: dict[str, bytes], root: Path, at_terminal: Open) -> None:
    hub.put(NAME, files)
    terminal = at_terminal("pull", NAME)
    terminal.until_shown("1-3 fetch (or resume); Enter or q leaves:")
    terminal.send("q")
    assert (terminal.finish(), root.exists()) == (0, False)
    terminal = at_terminal("pull", NAME)
    terminal.until_shown("Enter or q leaves:")
    terminal.send("2")
    assert terminal.finish() == 0
    assert f"next: triforce chat --model {NAME}:Q4_K_M" in terminal.lines
    assert (root / NAME / "tiny-Q4_K_M.gguf").read_bytes() == files["tiny-Q4_K_M.gguf"]


# --- one by its label ---


def test_a_model_is_pulled_by_its_label_with_its_parts_and_found_by_it(
    hub: Hub, files: dict[str, bytes], root: Path, triforce: Run
) -> None:
    hub.put(NAME, files)
    code, out, err = triforce("pull", f"{NAME}:q5_k_xl")
    assert (code, out) == (0, f"{root / NAME}\n")
    assert err.splitlines()[-1] == f"next: triforce chat --model {NAME}:UD-Q5_K_XL"
    parts = {Path(name).name: data for name, data in files.items() if "-of-" in name}
    assert {path.name: path.read_bytes() for path in (root / NAME).glob("*.gguf")} == parts
    first = root / NAME / min(parts)
    assert locate(f"{NAME}:UD-Q5_K_XL") == locate(f"{NAME}:q5_k_xl") == locate(NAME) == first
    triforce("pull", f"{NAME}:Q4_K_M")
    assert locate(f"{NAME}:Q4_K_M") == root / NAME / "tiny-Q4_K_M.gguf"
    assert stored_name(f"{NAME}:q4_k_m") == f"{NAME}/tiny-Q4_K_M.gguf"
    hub.asked()
    assert triforce("pull", f"{NAME}:Q4_K_M")[0] == 0
    assert hub.asked() == []
    assert triforce("models", "rm", f"{NAME}:UD-Q5_K_XL", "--yes")[0] == 0
    assert [path.name for path in (root / NAME).glob("*.gguf")] == ["tiny-Q4_K_M.gguf"]


def test_a_file_whose_folder_alone_tells_its_label_is_found_by_it(
    hub: Hub, files: dict[str, bytes], root: Path, triforce: Run
) -> None:
    data = files["tiny-Q4_K_M.gguf"]
    hub.put(NAME, {"Q4_K_M/model.gguf": data, "Q6_K/model.gguf": data})
    assert triforce("pull", f"{NAME}:Q6_K")[0] == 0
    assert triforce("pull", NAME, "--file", "Q4_K_M/model.gguf")[0] == 0
    assert hub.asked() == ["Q6_K/model.gguf", "Q4_K_M/model.gguf"]
    assert locate(f"{NAME}:Q6_K") == root / NAME / "Q6_K-model.gguf"
    assert locate(f"{NAME}:Q4_K_M") == root / NAME / "Q4_K_M-model.gguf"


def test_a_label_that_none_or_two_have_is_refused_with_what_there_is(
    hub: Hub, files: dict[str, bytes], root: Path, triforce: Run
) -> None:
    data = files["tiny-Q4_K_M.gguf"]
    hub.put(NAME, {"a-Q4_0.gguf": data, "b-Q4_0.gguf": data, "c-Q8_0.gguf": data, "mmproj-F16.gguf": data})
    code, _, err = triforce("pull", f"{NAME}:F16")
    assert (code, f"{NAME} has no GGUF file in F16; it has Q4_0, Q8_0" in err) == (4, True)
    code, _, err = triforce("pull", f"{NAME}:Q4_0")
    assert (code, "has 2 GGUF files in Q4_0; name one with --file: a-Q4_0.gguf, b-Q4_0.gguf" in err) == (4, True)
    assert hub.asked() == []
    document = json.loads(triforce("pull", NAME, "--json")[1])
    assert {tuple(model["pull"]) for model in document["models"]} == {
        (NAME, "--file", "a-Q4_0.gguf"), (NAME, "--file", "b-Q4_0.gguf"), (f"{NAME}:Q8_0",),
    }  # fmt: skip
    for file in ("a-Q4_0.gguf", "b-Q4_0.gguf"):
        assert triforce("pull", NAME, "--file", file)[0] == 0
    with pytest.raises(ModelError, match=f"{NAME}:q4_0 is 2 GGUF files; name one: {NAME}/a-Q4_0.gguf, {NAME}/b-Q4_0"):
        locate(f"{NAME}:q4_0")
    assert stored_name(f"{NAME}:q4_0") is None
    assert (root / NAME).exists()


def test_a_label_with_file_or_config_only_is_refused(hub: Hub, triforce: Run) -> None:
    assert triforce("pull", f"{NAME}:Q4_0", "--file", "a.gguf")[0] == 2
    assert triforce("pull", f"{NAME}:Q4_0", "--config-only")[0] == 2


def test_another_revision_is_in_the_commands_to_run(hub: Hub, files: dict[str, bytes], triforce: Run) -> None:
    hub.put(NAME, files, revisions=("v2",))
    assert triforce("pull", NAME, "--revision", "v2")[2] == f"next: triforce pull {NAME}:UD-Q5_K_XL --revision v2\n"
    hub.refusals["tiny-Q4_K_M.gguf"] = (500, "")
    _, _, err = triforce("pull", f"{NAME}:Q4_K_M", "--revision", "v2")
    assert f"'triforce pull {NAME}:Q4_K_M --revision v2' resumes it" in err


# --- what --model names ---


def test_a_model_that_is_not_here_is_refused_in_a_pipe_and_fetched_with_yes(
    hub: Hub, files: dict[str, bytes], root: Path, triforce: Run
) -> None:
    hub.put(NAME, files)
    wanted = ("--model", f"{NAME}:Q4_K_M")
    for command in (
        ("plan",),
        ("generate", "--prompt", "x"),
        ("ask", "x"),
        ("chat",),
        ("serve",),
        ("bench",),
        ("score",),
    ):
        code, _, err = triforce(*command, *wanted)
        assert (code, f"'triforce pull {NAME}:Q4_K_M' fetches it, and so does --yes" in err) == (4, True), command
    assert (hub.requests, root.exists()) == ([], False)
    code, out, err = triforce("plan", *wanted, "--context", "4096", "--yes")
    assert (code, "1 file, " in err, "tiny-Q4_K_M" in out) == (0, True, True)
    assert hub.asked() == ["tiny-Q4_K_M.gguf"]
    assert triforce("plan", *wanted, "--context", "4096")[0] == 0
    assert hub.asked() == []


def test_quiet_fetches_quietly_and_a_draft_is_fetched_too(
    hub: Hub, files: dict[str, bytes], root: Path, triforce: Run, tmp_path: Path
) -> None:
    hub.put(NAME, files)
    (tmp_path / "text").write_text("x")
    wanted = ("--model", f"{NAME}:Q4_K_M", "--draft", f"{NAME}:TQ1_0")
    code, _, err = triforce("tokens", str(tmp_path / "text"), *wanted, "--yes", "--quiet")
    assert (code, err, hub.asked()) == (0, "", ["tiny-Q4_K_M.gguf", "tiny-TQ1_0.gguf"])


def test_a_person_is_asked_and_may_decline(hub: Hub, files: dict[str, bytes], root: Path, at_terminal: Open) -> None:
    hub.put(NAME, files)
    asked = f"{NAME}:Q4_K_M is not here; fetch "
    terminal = at_terminal("plan", "--model", f"{NAME}:Q4_K_M", "--context", "4096", columns=200)
    terminal.until_shown("[y/N]")
    assert asked in terminal.shown
    assert "asking the hub" not in terminal.shown  # which turned on beside the question
    assert f"free in {root})?" in terminal.shown
    terminal.send("n\r")
    assert (terminal.finish(), root.exists()) == (4, False)
    terminal = at_terminal("plan", "--model", f"{NAME}:Q4_K_M", "--context", "4096", columns=200)
    terminal.until_shown("[y/N]")
    terminal.send("y\r")
    assert terminal.finish() == 0
    assert (root / NAME / "tiny-Q4_K_M.gguf").exists()


def test_an_alias_may_be_of_a_model_that_is_fetched(
    hub: Hub, files: dict[str, bytes], triforce: Run, tmp_path: Path
) -> None:
    hub.put(NAME, files)
    (tmp_path / "c.toml").write_text(f'[aliases]\nmine = "{NAME}:Q4_K_M"\n')
    command = ("plan", "--model", "mine", "--context", "4096", "--config", str(tmp_path / "c.toml"))
    code, _, err = triforce(*command)
    assert (code, f"'triforce pull {NAME}:Q4_K_M' fetches it, and so does --yes" in err) == (4, True)
    assert triforce(*command, "--yes")[0] == 0


# --- the kinds of one model ---


def test_models_lists_the_kinds_of_a_file_by_bytes(
    files: dict[str, bytes], triforce: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (path := tmp_path / "tiny-TQ1_0.gguf").write_bytes(files["tiny-TQ1_0.gguf"])
    code, out, err = triforce("models", str(path))
    head, titles, *rows = out.splitlines()
    assert (code, head.startswith(f"{path}: ")) == (0, True)
    assert titles.split() == ["kind", "tensors", "bytes", "share", "bits", "here"]
    kinds = {row.split()[0]: row for row in rows}
    assert [*kinds] == ["Q8_0", "F16", "TQ1_0"]
    assert kinds["Q8_0"].endswith("  8.50  as stored")
    assert kinds["F16"].endswith("  16.0  plain numbers")
    numbers = 2 * 3 * 256 * 256
    assert kinds["TQ1_0"].endswith(f"  1.69  unpacked to {2 * numbers / 1e3:.0f} kB")
    assert err.startswith("in memory: ")
    document = json.loads(triforce("models", "show", str(path), "--json")[1])
    assert document["held_bytes"] - document["bytes"] == 2 * numbers - numbers // 256 * 54
    (unpacked,) = (kind for kind in document["kinds"] if kind["unpacked"])
    assert (unpacked["kind"], unpacked["tensors"], unpacked["numbers"]) == ("TQ1_0", 6, numbers)


def test_models_lists_the_kinds_of_a_folder(triforce: Run, tmp_path: Path) -> None:
    folder = save(random_model(**WIDE), tmp_path / "folder")
    path, *_ = json.loads(triforce("models", str(folder), "--json")[1])["kinds"]
    assert (path["kind"], path["bits"], path["unpacked"]) == ("F32", 32, False)
    config = json.loads((folder / "config.json").read_text())
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}
    for changed, names in ((gptq, ["INT4_F16/64", "F32"]), ({**gptq, "desc_act": True}, ["gptq, 4 bits", "F32"])):
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": changed}))
        kinds = json.loads(triforce("models", str(folder), "--json")[1])["kinds"]
        assert sorted(kind["kind"] for kind in kinds) == sorted(names)
        assert [kind["kind"] for kind in kinds if kind["unpacked"]] == [name for name in names if name.startswith("g")]


def test_small_shares_are_not_zero_and_as_many_kinds_are_named_as_have_room() -> None:
    from triforce_cli.render.kinds import shares

    kinds = [Kind("Q4_K", 1, 1000, 500), Kind("IQ4_NL", 1, 900, 498), Kind("TQ1_0", 1, 9, 2, unpacked=True)]
    assert shares(kinds, 40) == "Q4_K 50, IQ4_NL 50, TQ1_0* <1"
    assert shares(kinds, 24) == "Q4_K 50, IQ4_NL 50, ..."
    assert shares(kinds, 5) == "Q4_K 50, ..."


def test_a_model_is_shown_by_its_name_and_options_stand_behind_it(triforce: Run) -> None:
    code, _, err = triforce("models", "--json", "x.gguf")
    assert (code, "--json stands before x.gguf; put it behind triforce models x.gguf" in err) == (2, True)
    assert triforce("models", "none/such")[0] == 4
