"""A 4096-entry byte-level BPE tokenizer that `transformers.AutoTokenizer` loads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from . import settings
from .corpus import Document


def train(documents: list[Document], folder: Path) -> Tokenizer:
    """Trains on the texts that are not held out and writes tokenizer.json and tokenizer_config.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.VOCAB_SIZE,
        special_tokens=[settings.BOS, settings.EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(weighted_texts(documents), trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{settings.BOS} $A",
                pair=f"{settings.BOS} $A $B",
                special_tokens=[(settings.BOS, settings.BOS_ID)],
            ),
        ]
    )
    check(tokenizer)
    save(tokenizer, folder)
    return tokenizer


def weighted_texts(documents: list[Document]) -> Iterator[str]:
    """Training texts; a light document gives only its first share, so merges follow the mixture."""
    for document in documents:
        if document.held_out:
            continue
        whole, part = divmod(document.weight, 1.0)
        for _ in range(int(whole)):
            yield document.text
        yield document.text[: int(part * len(document.text))]


def check(tokenizer: Tokenizer) -> None:
    """Checks what the engine relies on: size, special ids, and a lossless round trip of any text."""
    assert tokenizer.get_vocab_size() == settings.VOCAB_SIZE
    assert tokenizer.token_to_id(settings.BOS) == settings.BOS_ID
    assert tokenizer.token_to_id(settings.EOS) == settings.EOS_ID
    for text in ("Hello,  world !\n\n\tx", " naïve — “quotes” 猫 🙂\r\n", "", "it 's  n't . \u0000\u200b"):
        ids = tokenizer.encode(text, add_special_tokens=True).ids
        assert ids[0] == settings.BOS_ID
        assert tokenizer.decode(ids[1:]) == text, text


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json and the tokenizer_config.json that names the class to load it with."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": settings.BOS,
        "eos_token": settings.EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": settings.TARGET_LONG.max_positions,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load(folder: Path) -> Tokenizer:
    """The tokenizer `train` saved."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def encode(tokenizer: Tokenizer, documents: list[Document], path: Path) -> None:
    """Writes every document's ids (uint16 [tokens], no special tokens) keyed by its name."""
    encodings = tokenizer.encode_batch([document.text for document in documents], add_special_tokens=False)
    arrays = {d.name: np.array(e.ids, dtype=np.uint16) for d, e in zip(documents, encodings, strict=True)}
    np.savez(path, **arrays)
