"""Options that several commands have: images, seed, device, and the directory for results."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..basics.bad_input import BadInput

#: Said in the help of each option that names a function of the user's.
RUNS_YOUR_CODE = (
    "This runs your code: the module, of the current directory or installed, is imported and the function called."
)
#: Devices to run on.
Device = Literal["auto", "cpu", "cuda"]

BackboneOption = Annotated[
    str | None,
    typer.Option(
        help="Makes the backbone of a checkpoint: package.module:function, called without arguments. "
        f"{RUNS_YOUR_CODE} Or a network of torchvision by name. None is needed by a checkpoint that names one of "
        "torchvision (that of `train --backbone`, or of save_checkpoint with backbone='torchvision.models:NAME' and "
        "classes) or is the demo's; nothing else that a checkpoint names is called."
    ),
]
ModulesOption = Annotated[
    str | None,
    typer.Option(
        help="Makes the heads of a checkpoint that are modules of your own: package.module:function, which returns a "
        f"dict of modules by tap. {RUNS_YOUR_CODE} A network that --backbone returns has them already.",
    ),
]
DataOption = Annotated[
    Path | None,
    typer.Option(
        help="Your own images: a directory with one folder of images a class, or with such below train, val and test; "
        "a .csv or .tsv file with the columns path and label; a directory of a Hugging Face data set's parquet files, "
        "or one of them; the directory that holds CIFAR-10 or CIFAR-100, of which pickles are opened only if their "
        "checksums are theirs. Images are BMP, GIF, JPEG, JPEG2000, PNG, PPM, TIFF, WEBP.",
        show_default="the digits that come with scikit-learn",
    ),
]
SkipDamagedOption = Annotated[
    bool, typer.Option("--skip-damaged", help="Leave out image files that cannot be read, and name the first few.")
]
SeedOption = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of splits, parameters and order.")]
DeviceOption = Annotated[Device, typer.Option(help="Where to run.")]
EpochsOption = Annotated[
    int | None,
    typer.Option(min=1, help="Passes over the training images.", show_default="10, more for few images"),
]
CheckpointArgument = Annotated[
    Path, typer.Argument(help="A directory written by `auxhead demo`, `train` or save_checkpoint.", show_default=False)
]

#: Draws the content of a ``report.json``; returns a figure and the numbers in it.
Draw = Callable[[Mapping[str, Any]], tuple[Any, dict[str, Any]]]
#: Writes a figure and its numbers to files that begin with a path: PNG, SVG and JSON.
SaveFigure = Callable[[Any, Mapping[str, Any], Path], object]


def numbers(text: str) -> tuple[float, ...]:
    """Return the numbers of an option, separated by commas."""
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise typer.BadParameter(f"got {text!r}, wants numbers, separated by commas: 0.485,0.456,0.406") from None


def check_output_directory(out: Path) -> None:
    """Check, before the work begins, that a directory for results is there or can be made.

    Raises:
        BadInput: a file is in its place, or nothing can be written there.
    """
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not there.is_dir():
        raise BadInput(f"--out: {there} is a file, wants a directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise BadInput(f"--out: {there} cannot be written to, wants a directory that can")


def make_output_directory(out: Path) -> None:
    """Make the directory for results; raises as :func:`check_output_directory`."""
    check_output_directory(out)
    out.mkdir(parents=True, exist_ok=True)
