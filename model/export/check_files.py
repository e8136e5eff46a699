"""Compares exported files with the network: the logits of all exits, for two batch sizes."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..early_exit_network import EarlyExitNetwork
from ..rounding import relative_error
from .file_formats import open_file

#: Other sizes than the one of the export, and one sample, which PyTorch likes to treat apart.
_SIZES = (1, 3)
#: How far logits may be off, in parts of the largest one: a wrong graph is off by more, TF32 on a GPU by less.
_ALLOWED = {torch.float64: 1e-6, torch.float32: 5e-3}
_ALLOWED_NARROW = 5e-2


@torch.no_grad()
def check_files(
    network: EarlyExitNetwork, images: Tensor, paths: Sequence[Path], format: str
) -> tuple[float | None, str]:
    """Run the files, one after another, beside the network.

    Returns:
        The largest difference of a logit, in parts of the largest one, and what ran the files; None and the reason if
        onnx's reference, which lacks operators, cannot run them.

    Raises:
        BadInput: a file that onnx.checker refuses.
        RuntimeError: a file cannot be run, or logits differ by more than rounding.
    """
    files = [open_file(path, format) for path in paths]
    by, largest = files[0].by, 0.0
    for size in _SIZES:
        x = images[torch.arange(size) % len(images)]
        found: list[Tensor] = []
        handed: Sequence[Tensor] = [x.clone()]
        for file in files:
            try:
                returned = file.run(handed)
            except Exception as error:  # of many kinds
                said = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
                if by == "onnx.reference" and size == _SIZES[0]:
                    return None, f"onnx.checker alone, since onnx.reference cannot run it ({said})"
                raise RuntimeError(f"file: {by} cannot run it on a batch of {size}: {said}") from error
            logits, handed = (returned[:1], returned[1:]) if len(files) > 1 else (returned, [])
            found += logits
        wanted = [logits.cpu() for logits in network.logits(x)]
        off = relative_error([logits.cpu() for logits in found], [logits.double() for logits in wanted])
        if not off <= _ALLOWED.get(wanted[-1].dtype, _ALLOWED_NARROW):
            raise RuntimeError(
                f"file: logits that {by} computes of a batch of {size} differ from the network's by {off:.2g} of the "
                "largest one"
            )
        largest = max(largest, off)
    return largest, by
