"""The command ``auxhead calibrate``."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from ..basics.bad_input import BadInput
from .console import plain_console
from .errors import one_line_errors
from .options import BackboneOption, Device, ModulesOption, check_output_directory, make_output_directory


class BeyondCalibration(NamedTuple):
    """Functions of packages and folders that calibration may not import."""

    load_network: Callable[[Path, str | None, str | None], Any]
    """Loads a checkpoint, given its folder, what makes its backbone (None: a known one) and modules of its heads."""
    draw: Callable[[Mapping[str, Any]], tuple[Any, dict[str, Any]]]
    """Draws the content of ``report.json``; returns a figure and the numbers in it."""
    save_figure: Callable[[Any, Mapping[str, Any], Path], object]
    """Writes a figure and its numbers to files that begin with a path: PNG, SVG and JSON."""


def calibrate_command(beyond: Callable[[], BeyondCalibration]) -> Callable[..., None]:
    """Return the command ``calibrate``, given what imports functions of other packages when it runs."""

    def calibrate(
        checkpoint: Annotated[
            Path, typer.Option(help="A directory written by `auxhead demo` or by save_checkpoint.", show_default=False)
        ],
        data: Annotated[
            Path | None,
            typer.Option(help="Labelled images: a directory with one folder of images a class."),
        ] = None,
        dataset: Annotated[str | None, typer.Option(help="Or a data set by name: digits or cifar10.")] = None,
        root: Annotated[Path | None, typer.Option(help="Where cifar10 lies.")] = None,
        backbone: BackboneOption = None,
        modules: ModulesOption = None,
        train_data: Annotated[
            Path | None,
            typer.Option(
                help="Images that your network has learned from, a folder a class, left out under any name; or none."
            ),
        ] = None,
        skip_damaged: Annotated[
            bool, typer.Option("--skip-damaged", help="Leave out image files that cannot be read.")
        ] = False,
        max_accuracy_drop: Annotated[
            float | None,
            typer.Option(
                min=0.0,
                max=1.0,
                help="What leaving early may cost, a fraction.",
                show_default="0.01, or none with another budget",
            ),
        ] = None,
        confidence: Annotated[float, typer.Option(help="Of the bound on that, between 0 and 1.")] = 0.9,
        batch: Annotated[
            int | None, typer.Option(min=1, help="Images a request; times of the answers are measured for it.")
        ] = None,
        max_latency_ms: Annotated[
            float | None, typer.Option(help="What a request may take on average instead; wants --batch.")
        ] = None,
        max_work: Annotated[
            float | None,
            typer.Option(
                min=0.0,
                max=1.0,
                help="Instead, how much of the backbone an image may take on average, a fraction of its FLOPs.",
            ),
        ] = None,
        seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the splits.")] = 0,
        out: Annotated[Path, typer.Option(help="Where the calibrated checkpoint, report and figure go.")] = Path(
            "auxhead-calibrated"
        ),
        device: Annotated[Device, typer.Option(help="Where to run.")] = Device.auto,
    ) -> None:
        """Fit temperatures and thresholds to images that the network has not seen, with a bound on what they cost.

        Images that the network has learned from are left out, as its checkpoint knows them. Of the others 20 % are for
        temperatures, 50 % for thresholds, and 30 % for the test, whose numbers are printed. Several processes of
        torchrun share the batches.
        """
        from ..basics.files import write_json
        from ..processes.process_group import own_rank
        from ..processes.rank_failures import RankFailed
        from .calibrate_run import Request, run_calibration, save_calibrated
        from .calibrate_tables import print_report
        from .processes import process_group

        outside = beyond()
        console = plain_console()
        with one_line_errors(ValueError, RankFailed), process_group(device) as where:
            if own_rank() == 0:  # which alone writes; another host has another disk
                check_output_directory(out)
            request = Request(
                checkpoint, data, dataset, root, backbone, modules, train_data, skip_damaged, max_accuracy_drop,
                max_latency_ms, max_work, confidence, batch, seed, where,
            )  # fmt: skip
            if os.path.realpath(out) == os.path.realpath(checkpoint):
                raise BadInput(f"--out: {out} is the checkpoint itself, wants another directory")
            run = run_calibration(request, outside.load_network)
            if own_rank() > 0:
                return  # rank 0 has the same report
            make_output_directory(out)
            save_calibrated(out, checkpoint, run)
            content = run.report.to_json()
            write_json(out / "report.json", content)
            outside.save_figure(*outside.draw(content), out / "calibration")
            print_report(console, run.report)
            files = "model.json and its parameters, report.json, calibration.png, .svg, .json"
            console.print(f"\nSaved in {out}: {files}", soft_wrap=True)

    return calibrate
