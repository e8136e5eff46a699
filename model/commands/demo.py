"""The command ``auxhead demo``."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from .console import plain_console
from .errors import one_line_errors
from .options import (
    DataOption,
    DeviceOption,
    Draw,
    EpochsOption,
    SaveFigure,
    SeedOption,
    SkipDamagedOption,
    check_output_directory,
    make_output_directory,
)


class BeyondDemo(NamedTuple):
    """Functions of packages that model may not import."""

    measure_latency: Callable[[Any, Any], list[dict[str, Any]]]
    """Times a network's exits on a CUDA device, given a batch of its input; see ``latency`` of the report."""
    draw: Draw
    save_figure: SaveFigure


def demo_command(beyond: Callable[[], BeyondDemo]) -> Callable[..., None]:
    """Return the command ``demo``, given what imports functions of other packages when it runs."""

    def demo(
        data: DataOption = None,
        skip_damaged: SkipDamagedOption = False,
        out: Annotated[Path, typer.Option(help="Where checkpoint, report and figure go.")] = Path("auxhead-demo"),
        epochs: EpochsOption = None,
        image_size: Annotated[
            int | None,
            typer.Option(
                min=8, max=512, help="Images are resized to this, pixels.", show_default="16 for the digits, else 32"
            ),
        ] = None,
        max_accuracy_drop: Annotated[
            float,
            typer.Option(min=0.0, max=1.0, help="What leaving early may cost on the validation split, as a fraction."),
        ] = 0.005,
        seed: SeedOption = 0,
        device: DeviceOption = "auto",
    ) -> None:
        """Train a small ResNet-18 with a head after every block, and see real images leave it early."""
        from torch import channels_last

        from ..basics.files import write_json
        from ..basics.preprocessing import Preprocessing
        from ..training.sources import load_source
        from .console import PhaseProgress
        from .demo_run import print_report, run_demo, save_demo
        from .processes import torch_device

        measure_latency, draw, save_figure = beyond()
        console = plain_console()
        with one_line_errors():
            check_output_directory(out)
            source = load_source(data)
            where = torch_device(device)
            size = image_size or (16 if data is None else 32)
            halves = (0.5, 0.5, 0.5)  # pixels in [-1, 1]; batch normalisation does the rest
            preprocessing = Preprocessing(crop=size, resize=size, mean=halves, std=halves)
            console.print(
                f"{len(source.labels):,} images of {source.name}, {len(source.classes)} classes; ResNet-18 with 8 "
                f"heads on {where}\n{preprocessing.describe()}",
                soft_wrap=True,
            )
            with PhaseProgress(console) as start_phase:
                run = run_demo(
                    source, preprocessing=preprocessing, device=where, seed=seed, epochs=epochs,
                    max_accuracy_drop=max_accuracy_drop, skip_damaged=skip_damaged,
                    tell=lambda lines: console.print(lines, soft_wrap=True), start_phase=start_phase,
                )  # fmt: skip
            report = run.report
            if where.type == "cuda":
                images = preprocessing.normalised(run.splits.test.pixels[:2048].to(where))
                images = images.contiguous(memory_format=channels_last)
                report["latency"] = measure_latency(run.network, images)
            make_output_directory(out)
            examples = save_demo(out, run)
            write_json(out / "report.json", report)
            save_figure(*draw(report), out / "exits")
            print_report(console, report)
            files = "model.json and its parameters, report.json, exits.png, .svg, .json"
            console.print(f"\nSaved in {out}: {files}", soft_wrap=True)
            if examples:
                chosen = " ".join(shlex.quote(str(path)) for path in examples[:3])
                console.print("Try it on pictures of the test split:")
                console.print(f"  auxhead infer {shlex.quote(str(out))} {chosen}", soft_wrap=True)

    return demo
