"""Advice for a path that holds no model: the path to give instead."""

from __future__ import annotations

import os
from pathlib import Path

from offload.config.gguf_header import MAGIC, SUFFIX, is_gguf
from offload.hub.names import MAIN

_IN_A_MODEL = (".safetensors", ".bin", "config.json")  # suffixes of file names; every model folder has such a file
_VERSIONS = "snapshots"  # in the folder models--OWNER--NAME of the hub's cache
_MAX_REVISION_BYTES = 100


def advice(given: Path) -> str:
    """The message that names the path to give instead of `given`; "" if `given` may be a model folder or GGUF file, or
    does not exist. Reads file names, and the first bytes of a file. OSError."""
    if given.is_file():
        return _about_file(given)
    if not given.is_dir():
        return ""
    if not _is_utf8(given):
        return (
            f"{given} has bytes in its name that are not UTF-8, which the libraries that read models cannot open; "
            "rename it, or make a link to it that has another name"
        )
    names = sorted(os.listdir(given))
    if any(name.endswith(_IN_A_MODEL) for name in names):
        return ""
    if _VERSIONS in names and (version := _version(given)):
        return f"{given} is a folder of the hub's cache, with versions of a model in it; give {version}"
    found = next((name for name in names if name.endswith(SUFFIX)), "")
    return f"{given} is a folder; give the GGUF file in it: {given / found}" if found else ""


def _about_file(file: Path) -> str:
    if is_gguf(file):
        return ""
    with file.open("rb") as opened:
        if opened.read(len(MAGIC)) == MAGIC:
            return f"{file} is a GGUF file by another name; give it one that ends in {SUFFIX}"
    return f"{file} is a file; give the folder of the model, which holds config.json and the weights, or a GGUF file"


def _version(cached: Path) -> Path | None:
    """The folder of the version that the branch main points to, or else of the newest version."""
    versions = [path for path in (cached / _VERSIONS).iterdir() if path.is_dir()]
    main = cached / "refs" / MAIN
    if main.is_file():
        with main.open("rb") as file:
            named = os.fsdecode(file.read(_MAX_REVISION_BYTES).strip())
        versions = [path for path in versions if path.name == named] or versions
    return max(versions, key=lambda path: path.stat().st_mtime, default=None)


def _is_utf8(path: Path) -> bool:
    try:
        os.fsencode(path).decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
