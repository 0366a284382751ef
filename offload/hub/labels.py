"""Labels of GGUF files: the quantisation that a file's name tells, such as Q4_K_M or UD-IQ2_M."""

from __future__ import annotations

import re
from collections.abc import Sequence

from offload.config.gguf_header import SUFFIX, part_names

_LABEL = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q[1-8]|TQ[12]|MXFP[468]|NVFP4|BF16|FP?16|FP?32)(?:_\w+)?)(?=$|[-./])",
    re.ASCII | re.IGNORECASE,
)
_PART = re.compile(r"-\d{5}-of-\d{5}$", re.ASCII)
_DYNAMIC = "UD-"  # begins Unsloth's labels
_BESIDE = ("mmproj", "imatrix")  # in the names of GGUF files that are no models


def label_of(path: str) -> str:
    """The label of a GGUF file by its path in a repository, in capitals: the last one in the file's name, or else in
    its folder's; "" if there is none."""
    found = _LABEL.findall(_PART.sub("", path.removesuffix(SUFFIX)))
    return str(found[-1]).upper() if found else ""


def is_model(path: str) -> bool:
    """Whether a path is that of a model's GGUF file, or of its first part. An image encoder's file is none."""
    name = path.rpartition("/")[2].lower()
    is_first = part_names(path)[:1] == [path]
    return is_first and name.endswith(SUFFIX) and not any(mark in name for mark in _BESIDE)


def with_label(paths: Sequence[str], wanted: str) -> list[str]:
    """The paths that have the label, in any case of letters; if there are none, those that have it behind UD-."""
    for label in (wanted.upper(), f"{_DYNAMIC}{wanted.upper()}"):
        if found := [path for path in paths if label_of(path) == label]:
            return found
    return []


def stored_as(path: str) -> str:
    """The name that a file has among the stored models, in one folder: its own, with those of its folders in front
    unless it tells a label."""
    name = path.rpartition("/")[2]
    return name if label_of(name) else path.replace("/", "-")
