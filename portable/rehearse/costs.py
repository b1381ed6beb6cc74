"""What things cost on one vendor's devices, in words: filled in by the backends, which alone know their vendor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cost:
    """The words for one kind of finding.

    Attributes:
        cost: what it costs on this device.
        fix: what to do on this device, "" for the general advice.
        source: who states it.
    """

    cost: str
    fix: str = ""
    source: str = ""


@dataclass(frozen=True)
class Costs:
    """A vendor's words.

    Attributes:
        entries: rule id ("REH-SYNC-ITEM") or group ("sync", see `portable.rehearse.rules`) to its words; the id goes first.
        error_pattern: regular expression that finds, in an exception's message, that the vendor's package refused something; ""
            if only exceptions raised by Python code of the backend are known to be refusals.
        gap_pattern: regular expression for messages that mean that the emulation lacks what the real device has.
    """

    entries: Mapping[str, Cost] = field(default_factory=dict)
    error_pattern: str = ""
    gap_pattern: str = ""

    def of(self, rule: str, group: str) -> Cost | None:
        """The words for a rule, None if the vendor has none of its own."""
        return self.entries.get(rule) or self.entries.get(group)
