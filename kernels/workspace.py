"""What the programs of one head leave for each other."""

from typing import NamedTuple

import torch
from torch import Tensor

from .launch_config import LaunchConfig, Programs


class Workspace(NamedTuple):
    """Memory of one head in one launch; see ``head_stages.head_program``."""

    features: Tensor | None
    partial: Tensor
    arrived: Tensor | None

    @classmethod
    def of(cls, config: LaunchConfig, programs: Programs, zeros: Tensor) -> "Workspace":
        """Divide ``zeros``, [programs.zeroed] int32, which are 0 again after every launch."""
        if config.hands_over:
            return cls(zeros[programs.partial_sums :] if config.tiled else None, zeros, None)
        return cls(None, torch.empty(programs.partial_sums, dtype=torch.float32, device=zeros.device), zeros)
