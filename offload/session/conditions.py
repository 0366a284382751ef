"""The conditions of a prefill: everything beside its tokens on which the bits of its rows depend."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import torch

from offload.config.reading import read_config
from offload.kernels.choice import of_model, prefill_attention
from offload.kernels.rounding import rounding as rounding_of
from offload.machine import cpu_features, installed_version, machine_name
from offload.model.loading import DTYPES
from offload.pages.tiles import tile_tokens
from offload.plan.planner import Plan
from offload.session.fingerprints import identify
from offload.session.identity import STATE_FIELDS, Identity
from offload.weights.checkpoint import Checkpoint

BITS = 2  # changes when a change of this program gives rows of a prefill other bits
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Conditions:
    """The conditions of a prefill. Rows of equal tokens under equal conditions have equal bits, up to the first token
    that falls into another tile.

    identity: of the model, its dtype and page format. files: (bytes, time of the last change in ns) of each file of
    weights: a digest of samples would miss a change of few weights. rounding: what else decides how sums round, by
    name: sizes of blocks, the device, libraries, kernels. tile_tokens: tokens of a tile of the full cache.
    """

    identity: Identity
    files: tuple[tuple[int, int], ...]
    rounding: tuple[tuple[str, str], ...]
    tile_tokens: int

    @classmethod
    def of(cls, folder: Path, plan: Plan) -> Conditions:
        """The conditions of a prefill of the model in `folder` under `plan`, in this process. Raises ModelError."""
        config, request, placement = read_config(folder), plan.request, plan.placement
        identity = identify(
            folder, config, dtype=request.dtype, capacity=request.capacity, page_tokens=placement.page_tokens
        )
        with Checkpoint.open(folder) as checkpoint:
            status = [path.stat() for path in checkpoint.files()]
        device = torch.device(request.device)
        on_cpu = device.type == "cpu"
        attentions = (block.attention for block in config.blocks if block.attends)
        shapes = {(each.head_dim, each.latent): each for each in attentions}
        kinds = [prefill_attention(device, each, page=placement.page_tokens, windows=False) for each in shapes.values()]
        rounding = {
            "bits": BITS,
            "triforce": importlib.metadata.version("triforce"),
            "torch": torch.__version__,
            "triton": installed_version("triton") if device.type == "cuda" else None,
            "flash-attn": installed_version("flash_attn") if device.type == "cuda" else None,
            "machine": machine_name() if on_cpu else None,
            "instructions": (torch.backends.cpu.get_cpu_capability(), *cpu_features()) if on_cpu else None,
            "rounding": rounding_of(DTYPES[request.dtype], torch.get_num_threads()) if on_cpu else None,
            "device": request.device_name,
            "devices": request.num_devices,
            "threads": torch.get_num_threads(),
            "kernels": of_model(device, config).name,
            "attention": [type(each).__name__ for each in kinds],
            **placement.rounding,
        }
        told = tuple((name, str(value)) for name, value in rounding.items())
        files = tuple((each.st_size, each.st_mtime_ns) for each in status)
        return cls(identity, files, told, tile_tokens(plan, config))

    @cached_property
    def digest(self) -> str:
        """The digest of all on which the bits of rows depend, but for the size of tiles, which decides from the first
        page behind a tile on (`links`)."""
        identity = asdict(self.identity)
        del identity["model_name"]  # a renamed folder holds the same model
        if not self.identity.num_state_layers:
            identity = {name: value for name, value in identity.items() if name not in STATE_FIELDS}
        told = json.dumps([identity, self.files, self.rounding], sort_keys=True)
        return hashlib.blake2b(told.encode(), digest_size=_DIGEST_BYTES).hexdigest()

    def links(self, tokens: Sequence[int]) -> list[str]:
        """A digest for each whole page of `tokens`: of the conditions, all tokens up to the page's end, and the tiles
        that begin among them."""
        link, page, found = bytes.fromhex(self.digest), self.identity.page_tokens, []
        for first in range(0, len(tokens) - page + 1, page):
            begins_tile = first > 0 and first % self.tile_tokens == 0
            content = array("q", tokens[first : first + page]).tobytes()
            link = hashlib.blake2b(link + content + b"tile" * begins_tile, digest_size=_DIGEST_BYTES).digest()
            found.append(link.hex())
        return found
