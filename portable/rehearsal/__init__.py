"""Emulated devices: a vendor's documented rules on a machine without the vendor's hardware.

`start` gives this process a device of a `Profile`. Programs run on it with the CPU's numbers under the profile's rules, and a
`Recorder` counts what would cost time or be wrong on the real device. Nothing about time is emulated, and nothing that ran here
may be recorded as hardware.
"""

from __future__ import annotations

from portable.rehearsal.profile import Profile, Rule
from portable.rehearsal.recorder import Recorder
from portable.rehearsal.session import Rehearsal, current, start

__all__ = ["Profile", "Recorder", "Rehearsal", "Rule", "current", "start"]
