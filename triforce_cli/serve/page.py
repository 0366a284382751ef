"""The page at `/`: one file, under a policy that lets nothing else run or be loaded."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from functools import cache
from importlib.resources import files

from starlette.responses import Response

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@cache
def page() -> Response:
    """The page; its own script and style are named by their hashes."""
    text = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    allowed = "; ".join(f"{kind}-src '{_hash(inside)}'" for kind, inside in _INLINE.findall(text))
    policy = (
        f"default-src 'none'; {allowed}; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    headers = {
        "content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin", "cache-control": "no-cache", "vary": "Accept",
    }  # fmt: skip
    return Response(text, media_type="text/html", headers=headers)


def _hash(text: str) -> str:
    return f"sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
