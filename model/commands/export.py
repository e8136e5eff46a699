"""The command ``auxhead export``."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from .console import plain_console
from .errors import by_option, one_line_errors
from .options import BackboneOption, CheckpointArgument, ModulesOption


def export(
    checkpoint: CheckpointArgument,
    out: Annotated[
        Path,
        typer.Argument(
            help="The file to write, with a JSON beside it; with --stages a folder. There is nothing yet.",
            show_default=False,
        ),
    ],
    format: Annotated[
        Literal["pt2", "onnx"] | None,
        typer.Option(
            help="pt2, which torch.export.load reads, or onnx, which needs onnx and onnxscript.",
            show_default="by which OUT ends, else pt2",
        ),
    ] = None,
    stages: Annotated[
        bool, typer.Option("--stages", help="Write a file for each exit, which goes on where the one before ended.")
    ] = False,
    backbone: BackboneOption = None,
    modules: ModulesOption = None,
) -> None:
    """Write the logits of all exits for ONNX or torch.export, and the rules by which they count as a JSON."""
    from ..export.exporting import export_saved
    from .user_model import load_network

    with one_line_errors(RuntimeError):
        loaded = load_network("auxhead export", checkpoint, backbone, modules)
        with by_option("format"):
            report = export_saved(loaded, out, format, stages)
        plain_console().print(str(report), soft_wrap=True)
