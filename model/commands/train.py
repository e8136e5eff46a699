"""The command ``auxhead train``."""

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import typer

from .console import plain_console
from .errors import one_line_errors
from .options import (
    RUNS_YOUR_CODE,
    DataOption,
    DeviceOption,
    EpochsOption,
    SeedOption,
    SkipDamagedOption,
    numbers,
)


def train(
    data: DataOption = None,
    skip_damaged: SkipDamagedOption = False,
    model: Annotated[
        str | None,
        typer.Option(
            help="Your network: package.module:factory, which returns it, with its heads or exits, and a batch. "
            f"{RUNS_YOUR_CODE}"
        ),
    ] = None,
    backbone: Annotated[
        str | None,
        typer.Option(help="In place of --model a classifier of torchvision, resnet50 say, or of timm: timm:NAME."),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="Of --backbone: DEFAULT or another name of torchvision's, DEFAULT of timm, or a .safetensors or .pth "
            "file; images are prepared as for those of a name, and by default for a file, which does not say. "
            "A classifier of other classes is new.",
            show_default="none: it begins at random",
        ),
    ] = None,
    tap: Annotated[
        list[str] | None,
        typer.Option(
            help="With --backbone a layer that gets a head; once for each, as they run. Without any, up to three are "
            "placed by shares of the work."
        ),
    ] = None,
    method: Annotated[
        Literal["joint", "heads", "distill"],
        typer.Option(
            help="joint: all exits together; heads: the heads, and a new classifier, on features of the backbone as it "
            "is, in seconds; distill: as joint, and the heads learn from the last exit, too.",
        ),
    ] = "joint",
    gradients: Annotated[
        Literal["equal", "depth"],
        typer.Option(
            help="equal: the losses of all exits count the same; depth: 1, 2, 3, ... in the order of the exits. Not "
            "with --method heads, whose exits share nothing that learns."
        ),
    ] = "equal",
    epochs: EpochsOption = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images of a batch, of all processes of torchrun.")] = 32,
    learning_rate: Annotated[float, typer.Option(min=1e-9, max=10.0, help="The largest, of AdamW.")] = 1e-3,
    precision: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(
            help="Of the forward pass, by autocast.", show_default="bfloat16 on a GPU that has it, else float32"
        ),
    ] = None,
    augment: Annotated[
        Literal["none", "shift", "standard", "trivial"] | None,
        typer.Option(
            help="How images are changed at random: not; shifted by a sixteenth; cropped, resized and flipped; and by "
            "TrivialAugment, too. Not with --method heads.",
            show_default="shift",
        ),
    ] = None,
    label_smoothing: Annotated[
        float, typer.Option(min=0.0, max=0.99, help="Part of each label that all classes share.")
    ] = 0.0,
    ema: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=0.999999,
            help="Keep a moving average of the parameters, of which a step leaves this: 0.999, say.",
            show_default="the parameters themselves",
        ),
    ] = None,
    accumulate: Annotated[int, typer.Option(min=1, help="Batches for one step.")] = 1,
    patience: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Stop after so many epochs in a row in which the exits are no better on the validation split.",
            show_default="never stop",
        ),
    ] = None,
    crop: Annotated[
        int | None,
        typer.Option(
            min=8,
            max=1024,
            help="Height and width of what is cut from the middle of a picture, pixels.",
            show_default="as for --weights; that of the batch of --model; 224",
        ),
    ] = None,
    resize: Annotated[
        int | None,
        typer.Option(
            min=8,
            max=2048,
            help="Shorter side of a picture before that, pixels.",
            show_default="as for --weights; 8/7 of --crop; of the digits and CIFAR-10 --crop",
        ),
    ] = None,
    squash: Annotated[
        bool, typer.Option("--squash", help="Resize whole pictures to a square, whatever their shape, and cut nothing.")
    ] = False,
    mean: Annotated[
        Any,
        typer.Option(
            parser=numbers,
            metavar="R,G,B",
            help="Of pixels from 0 to 1, subtracted; one number for grey.",
            show_default="as for --weights; ImageNet's; of the digits and CIFAR-10 0.5",
        ),
    ] = None,
    std: Annotated[
        Any,
        typer.Option(
            parser=numbers, metavar="R,G,B", help="By which pixels are divided then.", show_default="likewise"
        ),
    ] = None,
    channels: Annotated[
        int | None,
        typer.Option(min=1, max=3, help="3 for RGB, 1 for grey pictures.", show_default="as --mean or --model has; 3"),
    ] = None,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    out: Annotated[Path, typer.Option(help="Where the checkpoint goes.")] = Path("auxhead-train"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what the same command left in --out when it was stopped.")
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write loss and accuracies for TensorBoard into --out, too.")
    ] = False,
) -> None:
    """Train the exits of a network on labelled images; several processes of torchrun train it together."""
    asked = SimpleNamespace(**locals())
    from ..processes.rank_failures import RankFailed
    from .processes import process_group
    from .train_run import run_training

    with one_line_errors(RankFailed), process_group(device, gradients=True) as where:
        run_training(plain_console(), asked, where)
