"""Exports the network of a checkpoint, compared with it on images of noise."""

from pathlib import Path

import torch

from ..bad_input import BadInput
from ..checkpoint import Checkpoint
from .exporting import ExportReport, check_new, check_new_file, export_exits, export_stages


def export_saved(checkpoint: Checkpoint, out: Path, format: str | None, stages: bool) -> ExportReport:
    """Write the files of a checkpoint's network; raises as :func:`export_exits` and :func:`export_stages`."""
    if stages:
        check_new("OUT", out)
    else:
        check_new_file("OUT", out)
    size = checkpoint.image_size
    if size is None:
        raise BadInput(
            "checkpoint: was saved without image_size, wants one to make a batch of; export_exits and export_stages "
            "take a batch of yours"
        )
    network = checkpoint.network
    images = torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(0), dtype=network.dtype)
    return (export_stages if stages else export_exits)(network, images, out, format=format)
