"""Checks of a draft: whether it can draft for its target, where the target's caches are."""

from __future__ import annotations

from offload.config.model import ModelConfig
from offload.errors import UsageError
from offload.plan.composition import Composition
from offload.plan.placement import Placement
from offload.plan.sizing import Sizing


def check_draft(sizing: Sizing) -> None:
    """Raise UsageError for a draft whose layers have states, since it runs over sinks and a window, and for an
    assistant that is the target, or that has another one than this target."""
    target, draft = sizing.target, sizing.draft
    if target.assistant is not None:
        raise UsageError(
            f"{target.family} is no model by itself: it drafts for another one; give it as --draft of that"
        )
    if draft is None:
        return
    if draft.stateful:
        raise UsageError(
            f"the draft is a {draft.family} model: its layers have recurrent states, so it cannot draft for another "
            "one; give another draft, or leave out --draft"
        )
    if draft.assistant is not None and not (
        draft.assistant.target_size == target.hidden_size and _reads(draft, target)
    ):
        raise UsageError(
            f"the draft is a {draft.family} for another target: it reads hidden rows of {draft.assistant.target_size} "
            f"numbers and (KV heads, sizes) of {draft.kv_shapes}, this target has rows of {target.hidden_size} and "
            f"{tuple(dict.fromkeys(target.kv_shapes))}; give the target's own assistant, or --draft none"
        )
    if draft.assistant is not None and sizing.num_devices > 1:
        raise UsageError(
            f"the draft is a {draft.family}, which reads the keys of all heads, and each of {sizing.num_devices} ranks "
            "has some of them; give --gpus 1, or --draft none"
        )


def check_keys_are_there(sizing: Sizing, composition: Composition, placement: Placement) -> None:
    """Raise UsageError for an assistant where the target's keys cross a link, as they would for each drafted token."""
    draft = sizing.draft
    if draft is not None and draft.assistant is not None and composition.draft and "kv" in placement.offload:
        raise UsageError(
            f"the draft is a {draft.family}, which reads the target's keys on the device, and they are on the host; "
            "give a shorter --context, --offload weights, or --draft none"
        )


def _reads(draft: ModelConfig, target: ModelConfig) -> bool:
    """Whether each of the draft's layers finds keys of its shape in the last layer of the target that sees as much."""
    last = {True: target.growing[-1:], False: target.windowed[-1:]}
    for at, block in enumerate(draft.blocks):
        window = block.attention.window
        for source in last[window is None] or (None,):
            if source is None or target.blocks[source].attention.window != window:
                return False
            if target.kv_shapes[source] != draft.kv_shapes[at]:
                return False
    return True
