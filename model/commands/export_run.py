"""The files of a checkpoint's network, as ``auxhead export`` writes them."""

from pathlib import Path

import torch

from ..export.decision import export_decision
from ..export.exporting import ExportReport, beside, check_new, export_exits, export_stages
from ..saving.checkpoint import Checkpoint


def export_saved(checkpoint: Checkpoint, out: Path, format: str | None, *, stages: bool, decide: bool) -> ExportReport:
    """Write the files of a checkpoint's network; raises as the functions for networks do."""
    check_new("OUT", out, *([] if stages else [beside(out)]))
    network, prepare = checkpoint.network, checkpoint.preprocessing
    shape = (1 if decide else 3, prepare.channels, prepare.crop, prepare.crop)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=network.dtype)
    if decide:
        return export_decision(network, images, out, format=format, classes=checkpoint.classes)
    return (export_stages if stages else export_exits)(network, images, out, format=format)
