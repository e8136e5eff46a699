"""Options of the command ``auxhead-tune heads``."""

from pathlib import Path
from typing import Annotated

from ...model.commands.errors import one_line_errors
from ..measuring.failures import resumable
from ..measuring.options import Batches, Classes, Dtypes, HeadKinds, Model, NetworkChoice, Placements, out_option
from ..records.record import BadRecord, check_out


def heads(
    model: Model,
    batch: Batches = None,
    dtype: Dtypes = None,
    classes: Classes = None,
    placement: Placements = None,
    heads: HeadKinds = None,
    out: Annotated[Path | None, out_option("heads")] = None,
) -> None:
    """Measure a network's heads alone: fused, in plain PyTorch, and through torch.compile's max-autotune.

    Each is a chain of launches in a CUDA graph, and its answers are checked first. Options that choose networks may be
    given several times. A run that was stopped goes on where it was.
    """
    with one_line_errors(BadRecord), resumable():
        chosen = NetworkChoice.of(model, batch=batch, dtype=dtype, classes=classes, placement=placement, heads=heads)
        check_out(out)
        from .run import run_heads

        run_heads(chosen, out)
