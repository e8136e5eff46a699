"""The command ``auxhead export``."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from ..basics.bad_input import BadInput
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
    decide: Annotated[
        bool,
        typer.Option("--decide", help="Write the answer for one sample, which stops at the first exit that is sure."),
    ] = False,
    backbone: BackboneOption = None,
    modules: ModulesOption = None,
) -> None:
    """Write the logits of all exits, or the answer, for ONNX or torch.export, and a JSON with the rules."""
    import torch

    from ..export.decision import export_decision
    from ..export.exporting import beside, check_new, export_exits, export_stages
    from .user_model import load_network

    with one_line_errors(RuntimeError):
        if decide and stages:
            raise BadInput("--decide: got --stages, too, wants one of them: a decision is one file")
        loaded = load_network("auxhead export", checkpoint, backbone, modules)
        with by_option("format"):
            check_new("OUT", out, *([] if stages else [beside(out)]))
            network, prepare = loaded.network, loaded.preprocessing
            shape = (1 if decide else 3, prepare.channels, prepare.crop, prepare.crop)
            images = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=network.dtype)
            if decide:
                report = export_decision(network, images, out, format=format, classes=loaded.classes)
            else:
                report = (export_stages if stages else export_exits)(network, images, out, format=format)
        plain_console().print(str(report), soft_wrap=True)
