"""What happens when a call ends on the math path: warn once per line, raise, or nothing."""

from __future__ import annotations

import logging
import sys
from typing import Literal

from portable.attn.path import Fit
from portable.errors import ConfigurationError

Policy = Literal["warn", "error", "quiet"]
_POLICIES: tuple[Policy, ...] = ("warn", "error", "quiet")
_OWN = __file__.rpartition("/")[0]
log = logging.getLogger("portable")
_policy: Policy = "warn"
_seen: set[tuple[str, int]] = set()


def attention_policy(policy: Policy) -> Policy:
    """Set what a call on the math path of an accelerator does: "warn" (once per line), "error" or "quiet".

    Returns:
        The policy before.
    """
    global _policy
    if policy not in _POLICIES:
        raise ConfigurationError(f"attention_policy({policy!r}) was called. Use one of {', '.join(map(repr, _POLICIES))}.")
    before, _policy = _policy, policy
    return before


def note_math(fit: Fit) -> None:
    """A call takes the math path."""
    if _policy == "quiet":
        return
    message = (
        f"attention takes the math path for {fit.request.words()}, which holds all scores: "
        f"{2 * fit.request.score_bytes / 2**20:.1f} MiB. pt.explain_attention says why each faster path refused."
    )
    if _policy == "error":
        raise ConfigurationError(f"{message} pt.attention_policy('warn') lets it run.")
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    place = (frame.f_code.co_filename, frame.f_lineno)
    if place not in _seen:
        _seen.add(place)
        log.warning("%s:%d: %s", *place, message)
