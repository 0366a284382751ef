"""Ids are those of tokenizer.json, read by the tokenizers library alone, whatever class another file names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoModelForCausalLM

from kit.models import GREEDY, Sizes, random_model, save, tiny_engine, tiny_plan
from offload.engine.request import GenerationRequest
from offload.errors import ModelError
from offload.text.tokenizer import Tokenizer

CLASSES = ["GPT2Tokenizer", "LlamaTokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer", "PreTrainedTokenizerFast", None]
FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [
    "Notes:\n\n1. one\n\n2. two\n\n", " 2023 costs 650841823 and 12.5 ", "  a  b\t\tc\r\n\r\nd", "",
    "I'll HAVE it's don't",
    "cafe\u0301 na\u00efve \u65e5\u672c\u8a9e \U0001f44d\U0001f3fd", "<s>a</s>", "a </s> b<tool> c<end>", "<end>",
    "a</s>", "x<|im_start|>user\nhi<|im_end|>\n",
]  # fmt: skip


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_level(cut: pre_tokenizers.PreTokenizer, **parts: object) -> tokenizers.Tokenizer:
    """Byte-level BPE with a few merges that reach over what the pre-tokenizers cut differently."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("Ċ", "Ċ"), ("Ġ", "1"), ("1", "."), ("2", "0"), ("Ġ", "a"), ("Ġ", "Ġ"), ("Ã", "©"), (":", "Ċ")]
    merges += [("'", "l"), ("'l", "l"), ("20", "2"), ("0", "8")]
    vocabulary |= {a + b: len(vocabulary) + i for i, (a, b) in enumerate(merges)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer, inner.decoder = cut, decoders.ByteLevel()
    return finished(inner, **parts)


def finished(inner: tokenizers.Tokenizer, **parts: object) -> tokenizers.Tokenizer:
    for name, part in parts.items():
        setattr(inner, name, part)
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>", "<end>")])
    inner.add_tokens([AddedToken("<tool>", lstrip=True, normalized=False), AddedToken("<|im_end|>", normalized=False)])
    return inner


def word_pieces(**parts: object) -> tokenizers.Tokenizer:
    """SentencePiece's shape: words carry their space, what is unknown is bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"▁abcdent12.", "▁a", "▁▁", "on", "one"]
    merges = [("▁", "a"), ("▁", "▁"), ("o", "n"), ("on", "e")]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, "o"])}
    inner = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return finished(inner, **parts)


def opening(start: str = "<s>", end: str = "") -> processors.PostProcessor:
    return processors.TemplateProcessing(single=f"{start} $A {end}".strip(), special_tokens=[("<s>", 1), ("</s>", 2)])


DIGITS = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
LEGACY = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
SHAPES: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "prefix space": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "digits": lambda: byte_level(DIGITS),
    "qwen2": lambda: byte_level(split(QWEN), normalizer=normalizers.NFC()),
    "llama3": lambda: byte_level(split(QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")), post_processor=opening()),
    "no normalizer": lambda: byte_level(split(QWEN)),
    "lowercase": lambda: byte_level(split(QWEN), normalizer=normalizers.Lowercase()),
    "metaspace always": lambda: word_pieces(pre_tokenizer=pre_tokenizers.Metaspace(), post_processor=opening()),
    "metaspace first": lambda: word_pieces(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "metaspace never": lambda: word_pieces(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="never")),
    "legacy": lambda: word_pieces(normalizer=LEGACY, post_processor=opening()),
}  # fmt: skip


def put(folder: Path, inner: tokenizers.Tokenizer, *, family: str = "llama", **settings: object) -> Path:
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    return folder


@pytest.mark.parametrize("named", CLASSES)
@pytest.mark.parametrize("shape", SHAPES)
def test_ids_are_those_of_the_file_for_every_class_and_family(tmp_path: Path, shape: str, named: str | None) -> None:
    """Bug: transformers' GPT2Tokenizer, LlamaTokenizer and Qwen2Tokenizer brought their own pre-tokenizer, normalizer
    and decoder, so that 15 ids came where the file says 13."""
    family = FAMILIES[list(SHAPES).index(shape) % len(FAMILIES)]
    put(tmp_path, SHAPES[shape](), family=family, tokenizer_class=named, eos_token="</s>", bos_token="<s>")
    reference = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_folder(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == reference.encode(text).ids, text
        plain = reference.encode(text, add_special_tokens=False).ids
        assert ours.decode(plain) == reference.decode(plain), text
    assert ours.vocabulary() == reference.get_vocab()
    assert (ours.eos_token_id, len(ours)) == (reference.token_to_id("</s>"), reference.get_vocab_size())


def test_digits_are_cut_as_in_smollm2(tmp_path: Path) -> None:
    put(tmp_path, byte_level(DIGITS), tokenizer_class="GPT2Tokenizer")
    tokens = Tokenizer.from_folder(tmp_path).encode("a 12")
    assert [byte_level(DIGITS).id_to_token(token) for token in tokens] == ["a", "Ġ", "1", "2"]


@pytest.mark.parametrize(
    "settings",
    [
        {"add_bos_token": True}, {"add_eos_token": True}, {"add_prefix_space": True}, {"split_special_tokens": True},
        {"added_tokens_decoder": {"268": {"content": "<s>", "lstrip": True, "rstrip": True, "special": True}}},
        {"additional_special_tokens": ["one", "a"]}, {"unk_token": "b", "pad_token": "c"}, {"legacy": False},
        {"auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}, "tokenizer_class": "Own"}, {"eos_token": "one"},
        {"clean_up_tokenization_spaces": True}, {"model_max_length": 1, "truncation_side": "left"},
    ],
    ids=lambda settings: next(iter(settings)),
)  # fmt: skip
def test_no_setting_of_the_other_file_changes_an_id(tmp_path: Path, settings: dict[str, object]) -> None:
    """Nor makes a plain word a token: transformers adds each special token that it finds there."""
    inner = byte_level(DIGITS, post_processor=None)
    put(tmp_path, inner, **{"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>", "bos_token": "<s>"} | settings)
    ours = Tokenizer.from_folder(tmp_path)
    for text in [*TEXTS, "one a b c", "a <s> b"]:
        assert ours.encode(text) == inner.encode(text).ids
    assert ours.vocabulary() == inner.get_vocab()


@pytest.mark.parametrize("typed", ["a</s>", "</s>", "</s></s>", "a</s> "])
def test_the_end_token_that_a_person_wrote_stays_and_that_of_the_file_does_not(tmp_path: Path, typed: str) -> None:
    """Bug: a prompt that ended with the end token lost it."""
    for closing in (False, True):
        inner = word_pieces(post_processor=opening(end="</s>" if closing else ""))
        put(tmp_path, inner, eos_token="</s>", bos_token="<s>")
        assert Tokenizer.from_folder(tmp_path).encode(typed) == [1, *inner.encode(typed, add_special_tokens=False).ids]


@pytest.mark.parametrize(
    ("named", "end"), [("LlamaTokenizerFast", "</s>"), ("GPT2Tokenizer", None), ("PreTrainedTokenizerFast", None)]
)
def test_a_class_has_its_end_token_where_it_is_one_and_nothing_else_is_named(tmp_path, named, end) -> None:
    inner = byte_level(DIGITS)
    for settings, expected in (({}, end), ({"eos_token": "<end>"}, "<end>"), ({"eos_token": "<unheard of>"}, None)):
        put(tmp_path, inner, tokenizer_class=named, **settings)
        found = Tokenizer.from_folder(tmp_path).eos_token_id
        assert found == (None if expected is None else inner.token_to_id(expected))


ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def test_a_token_that_only_the_other_file_has_keeps_its_id_or_is_refused(tmp_path: Path) -> None:
    inner = byte_level(DIGITS)
    free = inner.get_vocab_size()
    for number, said in ((free, ""), (free + 1, "no room"), (5, "there; save both")):
        put(tmp_path, inner, added_tokens_decoder={str(number): {"content": "<|x|>", **ADDED}})
        if said:
            with pytest.raises(
                ModelError, match=rf"'<\|x\|>' has id {number}, tokenizer.json does not know it.*{said}"
            ):
                Tokenizer.from_folder(tmp_path)
        else:
            assert Tokenizer.from_folder(tmp_path).encode("<|x|>") == [free]
    put(tmp_path, inner)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|y|>": free, "</s>": 3}))
    assert Tokenizer.from_folder(tmp_path).encode("<|y|></s>") == [free, inner.token_to_id("</s>")]


def sparse(*, in_vocabulary: bool) -> dict[str, object]:
    """Bytes are tokens 0 to 255, <s> and </s> 300 and 301: a tokenizer.json."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary | ({"<s>": 300, "</s>": 301} if in_vocabulary else {}), merges=[])
    )
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    added = [{"id": 300 + i, "content": text, **ADDED} for i, text in enumerate(("<s>", "</s>"))]
    return json.loads(inner.to_str()) | {"added_tokens": added}


def put_sparse(folder: Path, *, in_vocabulary: bool = True) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(sparse(in_vocabulary=in_vocabulary)))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_ids_need_not_be_dense(tmp_path: Path) -> None:
    """Bug: the number of tokens was taken for one more than the highest id."""
    tokenizer = Tokenizer.from_folder(put_sparse(tmp_path))
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.encode("</s>")) == (302, 301, [301])
    assert tokenizer.decode([tokenizer.encode("a")[0], 280, 301]) == "a"


@pytest.fixture
def sparse_model(tmp_path: Path) -> Path:
    """A model whose head gives the end token, 301, after four others of which one is 300."""
    model = random_model(vocab_size=304, seed=3)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.01)
    folder = put_sparse(save(model, tmp_path / "model"))
    tokens = [97, 300, 301, 98]
    hidden = model.model(torch.tensor([tokens])).last_hidden_state[0].detach()
    with torch.no_grad():
        for state, said in zip(hidden, [280, 301, 300, 300], strict=True):
            model.lm_head.weight[said] += 20 * state / state.norm() ** 2
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("sizes", [Sizes(), Sizes(gamma=4, lookup=True)], ids=["plain", "lookup"])
def test_a_token_over_the_number_of_tokens_is_drawn_and_ends_a_text(sparse_model: Path, sizes: Sizes) -> None:
    """Bug: logits were cut to the number of tokens, so that neither 300 nor the end token, 301, was ever drawn, and a
    lookup of one of them in the prompt indexed out of range."""
    prompt = [97, 300, 301, 98] * 4
    plan = tiny_plan(sparse_model, None, sizes, num_prompt_tokens=len(prompt), max_tokens=12)
    model = AutoModelForCausalLM.from_pretrained(sparse_model, dtype=torch.float32)
    said = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=301)
    theirs = said[0, len(prompt) :].tolist()
    with tiny_engine(plan, sparse_model) as engine:
        assert engine.worker.vocab_size == 302
        steps = list(engine.generate(GenerationRequest(prompt, GREEDY, max_tokens=12)))
    ours = [token for step in steps for token in step.tokens]
    assert (ours, theirs) == ([300, 301], [300, 301])
    assert (steps[-1].finish, plan.composition.lookup) == ("stop", sizes.lookup)


def test_an_end_token_that_only_the_model_names_can_be_drawn_too(tmp_path: Path) -> None:
    """Bug: as above, where the tokenizer does not know it."""
    folder = save(random_model(vocab_size=304, eos_token_id=[257, 301]), tmp_path, tokenizer=True)
    with tiny_engine(tiny_plan(folder, None, Sizes(), num_prompt_tokens=4, max_tokens=1), folder) as engine:
        assert engine.worker.vocab_size == 302


def test_an_id_that_the_library_changes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="added token '<s>' has id 300, but the tokenizers library makes it 256"):
        Tokenizer.from_folder(put_sparse(tmp_path, in_vocabulary=False))


def test_older_files_alone_load_as_their_class_reads_them(tmp_path: Path) -> None:
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"Ġa": 256}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nĠ a\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert Tokenizer.from_folder(tmp_path).encode("b a") == [vocabulary["b"], 256]


@pytest.mark.parametrize("named", ["LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer"])
def test_a_class_that_finds_no_file_of_its_own_is_refused(tmp_path: Path, named: str) -> None:
    """Bug: it began with special tokens alone, and a text had no tokens, without a word."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": named}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / ("vocab.json" if named == "LlamaTokenizer" else "vocab.txt")).write_text(json.dumps({"a": 0}))
    with pytest.raises(ModelError, match=r"tokenizer\.json is needed"):
        Tokenizer.from_folder(tmp_path)


def test_of_a_librarys_advice_the_first_line_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "vocab.txt").write_text("no class reads this")
    with pytest.raises(ModelError) as raised:
        Tokenizer.from_folder(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path}: no usable tokenizer (Couldn't instantiate")
    assert "\n" not in str(raised.value)
