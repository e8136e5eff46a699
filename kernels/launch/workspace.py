"""Workspace: device memory in which the programs of one head leave numbers for each other."""

from typing import NamedTuple

import torch
from torch import Tensor

from .launch_config import LaunchConfig, Programs


class Workspace(NamedTuple):
    """Memory of one head in one launch, one-dimensional; its layout: ``head_stages.head_program``."""

    features: Tensor | None
    """Pooled features if tiled, int32."""
    partial: Tensor
    """Partial logits: int32 where programs wait for them (``LaunchConfig.hands_over``), else float32."""
    arrived: Tensor | None
    """Programs of each sample that are done, [N] int32; None where programs wait instead."""

    @classmethod
    def of(cls, config: LaunchConfig, programs: Programs, zeros: Tensor) -> "Workspace":
        """Divide ``zeros``, [programs.zeroed] int32, which the launch sets back to 0; allocate what need not be 0."""
        if config.hands_over:
            return cls(zeros[programs.partial_sums :] if config.tiled else None, zeros, None)
        return cls(None, torch.empty(programs.partial_sums, dtype=torch.float32, device=zeros.device), zeros)
