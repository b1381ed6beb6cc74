"""torch_npu's loss scaler, with what `portable.scaling` keeps out. Imported when the device is in use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch_npu

from portable.scaling import SkippedFirstStep

if TYPE_CHECKING:
    from torch.amp import GradScaler as Base
else:
    Base = torch_npu.npu.amp.GradScaler


class GradScaler(SkippedFirstStep, Base):
    """``torch.npu.amp.GradScaler`` as `pt.GradScaler` makes it."""
