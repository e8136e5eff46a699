"""The command ``auxhead``: demo, infer and profile."""

import dataclasses
import shlex
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from ..autotune.measuring.environment import clocks, environment
from ..autotune.measuring.exit_latency import exit_latency
from ..autotune.measuring.subject import own_cell
from ..autotune.profile.measure import compare, demo_model, repeated
from ..autotune.profile.records import profile_records
from ..autotune.profile.tables import print_comparison
from ..autotune.records.console import plain_console
from ..autotune.records.record import BadRecord, append_record
from ..plots.figures.exits import draw as draw_exits
from ..plots.files import save_figure
from .bad_input import BadInput
from .calibration.evaluation import batches
from .checkpoint import load_checkpoint
from .commands.errors import one_line_errors
from .commands.user_model import load_factory
from .demo.run import DemoReport, run_demo, save_demo
from .demo.small_resnet import ARCHITECTURE
from .images import normalise, open_image, to_pixels
from .json_file import write_json
from .training.data_sets import load_source

app = typer.Typer(
    help="Early-exit heads that cost next to nothing on a GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Device(str, Enum):
    """Where to run."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dataset(str, Enum):
    """Data sets by name."""

    digits = "digits"
    cifar10 = "cifar10"


class Exits(str, Enum):
    """Runners that a profile can show as "after"."""

    overlapped = "overlapped"
    polled = "polled"
    gated = "gated"


class Trunk(str, Enum):
    """What a runner may make of the trunk."""

    as_is = "as_is"
    cudnn = "cudnn"
    inductor = "inductor"


@app.callback()
def main() -> None:
    """Early-exit heads that cost next to nothing on a GPU."""


@app.command()
def demo(
    data: Annotated[
        Path | None, typer.Option(help="Your own images: a directory with one folder of images a class.")
    ] = None,
    dataset: Annotated[
        Dataset | None, typer.Option(help="A data set by name; the digits (shipped with scikit-learn) by default.")
    ] = None,
    root: Annotated[
        Path | None, typer.Option(help="For --dataset cifar10: the directory that holds cifar-10-batches-py.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where checkpoint, report and figure go.")] = Path("auxhead-demo"),
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over the training images.  [default: 8, more for few images]")
    ] = None,
    image_size: Annotated[
        int | None,
        typer.Option(min=8, max=512, help="Images are resized to this, pixels.  [default: 16 for the digits, else 32]"),
    ] = None,
    max_accuracy_drop: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="What leaving early may cost on the validation split, as a fraction."),
    ] = 0.005,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of splits, parameters and order.")] = 0,
    device: Annotated[Device, typer.Option(help="Where to run.")] = Device.auto,
) -> None:
    """Train a small ResNet-18 with a head after every block, and see real images leave it early."""
    console = plain_console()
    with one_line_errors():
        where = _device(device)
        _check_writable(out)
        source = load_source(data, dataset.value if dataset else None, root)
        size = image_size or (16 if data is None and dataset in (None, Dataset.digits) else 32)
        console.print(
            f"{len(source.labels):,} images of {source.name}, {len(source.classes)} classes, {size}x{size} pixels; "
            f"ResNet-18 with 8 heads on {where}",
            soft_wrap=True,
        )
        with ProgressLines(console) as watch:
            run = run_demo(
                source,
                image_size=size,
                device=where,
                seed=seed,
                epochs=epochs,
                max_accuracy_drop=max_accuracy_drop,
                watch=watch,
            )
        report = run.report
        if where.type == "cuda":
            images = torch.cat(list(batches(run.splits.test.pixels[:2048], where)))
            report = dataclasses.replace(report, latency=exit_latency(run.network, images))
        examples = save_demo(out, run, source)
        content = dataclasses.asdict(report)
        write_json(out / "report.json", content)
        figure, drawn = draw_exits(content)
        save_figure(figure, drawn, out / "exits")
        _print_report(console, report)
        console.print(
            f"\nSaved in {out}: model.safetensors, model.json, report.json, exits.png, .svg, .json",
            soft_wrap=True,
        )
        if examples:
            chosen = " ".join(shlex.quote(str(path)) for path in examples[:3])
            console.print("Try it on pictures of the test split:")
            console.print(f"  auxhead infer --checkpoint {shlex.quote(str(out))} {chosen}", soft_wrap=True)


@app.command()
def infer(
    images: Annotated[list[Path], typer.Argument(help="Picture files.", show_default=False)],
    checkpoint: Annotated[Path, typer.Option(help="A directory written by `auxhead demo`.", show_default=False)],
    device: Annotated[Device, typer.Option(help="Where to run.")] = Device.auto,
) -> None:
    """Answer for picture files, and say which exit answered."""
    with one_line_errors():
        where = _device(device)
        loaded = load_checkpoint(checkpoint)
        pixels = torch.stack([to_pixels(open_image(path), loaded.image_size) for path in images])
        network = loaded.network.to(where)
        exits = [*network.taps, "classifier"]
        table = Table(
            Column("file", overflow="fold"),
            "answer",
            Column("sure", justify="right"),
            Column(f"exit (of {len(exits)})", no_wrap=True),
            "most likely",
        )
        place = 0
        for chunk in pixels.split(256):
            result = network(normalise(chunk.to(where), loaded.mean, loaded.std))
            assert result.probs is not None
            top = result.probs.topk(min(3, len(loaded.classes)), dim=1)
            for row in range(len(chunk)):
                exit_index = int(result.exit_index[row])
                table.add_row(
                    str(images[place]),
                    loaded.classes[int(result.label[row])],
                    f"{result.confidence[row].item():.1%}",
                    f"{exit_index + 1}: {exits[exit_index]}",
                    ", ".join(
                        f"{loaded.classes[int(label)]} {value.item():.0%}"
                        for value, label in zip(top.values[row], top.indices[row], strict=True)
                    ),
                )
                place += 1
        plain_console().print(table)


@app.command()
def profile(
    model: Annotated[
        str | None,
        typer.Option(help="Your model: package.module:factory, a function that returns (EarlyExitNetwork, a batch)."),
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Or a directory written by `auxhead demo`.")] = None,
    exits: Annotated[
        Exits,
        typer.Option(help="The runner: overlapped computes every head, polled and gated skip what nobody needs."),
    ] = Exits.overlapped,
    trunk: Annotated[
        Trunk, typer.Option(help="The trunk as it is, on cuDNN's fused convolutions, or through Inductor.")
    ] = Trunk.as_is,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples a request.  [default: the factory's batch; 1 for a checkpoint]")
    ] = None,
    requests: Annotated[int, typer.Option(min=2, help="Requests that are counted and timed.")] = 20,
    out: Annotated[Path, typer.Option(help="Where records and the Chrome traces go.")] = Path("auxhead-profile"),
) -> None:
    """Show what a request costs on a GPU, naive early exit before and a runner after.

    Launches, CUDA API calls, host and device time; status 1 if the runner is not in a steady state.
    """
    console = plain_console()
    with one_line_errors(BadRecord):
        if (model is None) == (checkpoint is None):
            got = "neither" if model is None else "both"
            raise BadInput(f"--model, --checkpoint: got {got}, wants exactly one of the two")
        if not torch.cuda.is_available():
            raise BadInput("profile: torch sees no CUDA device here; launches and CUDA API calls need one")
        _check_writable(out)
        if checkpoint is not None:
            subject, made_of = demo_model(checkpoint, batch or 1)
        else:
            subject, made_of = load_factory(str(model))(), "the factory's batch"
        device = torch.device("cuda", torch.cuda.current_device())
        x = subject.example_input.to(device)
        x = x if batch in (None, len(x)) else repeated(x, batch)
        network = subject.network.to(device).eval()
        console.print(
            f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}; batches of {len(x)}, {made_of}\n"
            "before: eager PyTorch, plain heads in line, .item() after each, left once all samples are sure\n"
            f"after: {exits.value}, trunk {trunk.value}",
            soft_wrap=True,
        )
        found = compare(network, x, exits=exits.value, trunk=trunk.value, requests=requests, out=out)
        where = {**environment(device), "clocks": clocks(device)}
        cell = own_cell(model or ARCHITECTURE, network, x)
        records = profile_records(found, cell, f"{exits.value}@{trunk.value}", where)
        for record in records:
            append_record(out / "profile.jsonl", record)
        print_comparison(console, records)
        console.print(
            f"\nSaved in {out}: before.json, after.json (Chrome traces, for ui.perfetto.dev or chrome://tracing), "
            "profile.jsonl (appended: records)",
            soft_wrap=True,
        )
    if found.problems:
        raise typer.Exit(1)


class ProgressLines:
    """A progress bar on a terminal; elsewhere a line every ten seconds and one at the end."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("images, {task.fields[rate]} images/s"),
            TextColumn("{task.fields[remark]}", markup=False),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._console = console

    def __enter__(self) -> "ProgressLines":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, name: str, total: int) -> Callable[[int, str], None]:
        """Begin something that takes ``total`` images; returns what to call with each advance."""
        task: TaskID = self._progress.add_task(name, total=total, rate="-", remark="")
        done, printed = 0, time.monotonic()

        def advance(images: int, remark: str) -> None:
            nonlocal done, printed
            done += images
            speed = self._progress.tasks[task].speed
            rate = f"{speed:,.0f}" if speed else "-"
            self._progress.update(task, advance=images, rate=rate, remark=remark)
            if not self._console.is_terminal and (done == total or time.monotonic() > printed + 10.0):
                printed = time.monotonic()
                line = f"{name}: {done:,} of {total:,} images" + (f", {remark}" if remark else "")
                self._console.print(line, soft_wrap=True)

        return advance


def _device(wanted: Device) -> torch.device:
    if wanted is Device.cuda and not torch.cuda.is_available():
        raise BadInput("--device: got cuda, but torch sees no CUDA device here; wants auto or cpu")
    use_cuda = wanted is Device.cuda or (wanted is Device.auto and torch.cuda.is_available())
    return torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")


def _check_writable(out: Path) -> None:
    """Find out before the training that there is a directory to write to."""
    if out.exists() and not out.is_dir():
        raise BadInput(f"--out: {out} is a file, wants a directory")
    out.mkdir(parents=True, exist_ok=True)


def _difference(points: float) -> str:
    text = f"{points:+.2f}"
    return "no difference" if text in ("+0.00", "-0.00") else f"{text} percentage points"


def _print_report(console: Console, report: DemoReport) -> None:
    table = Table(title=f"Test split: {report.images['test']:,} images that neither training nor thresholds have seen")
    for column in (
        "exit",
        "leaves if\nconfidence >",
        "images that\nleave here",
        "their\naccuracy",
        "accuracy if it\nanswered all",
    ):
        table.add_column(column, justify="left" if column == "exit" else "right")
    for line in report.exits:
        never = line.threshold is not None and line.threshold >= 1.0
        table.add_row(
            line.name,
            "the rest" if line.threshold is None else "never" if never else f"{line.threshold:.3f}",
            f"{line.images:,} ({line.share:.1%})",
            "-" if line.accuracy is None else f"{line.accuracy:.1%}",
            f"{line.accuracy_on_all:.1%}",
        )
    console.print(table)
    console.print(
        f"Early exit: {report.accuracy:.2%} accuracy; full network: {report.full_accuracy:.2%} "
        f"({_difference(-report.accuracy_drop_points)}).\n"
        f"{report.left_before_last_block:.1%} of the images left before the last block; on average an image had its "
        f"answer after {report.mean_blocks:.1f} of {report.blocks} blocks (counted, not timed).",
        soft_wrap=True,
    )
    if report.latency is None:
        console.print("Latency was not measured: the demo ran on the CPU, without a CUDA device.")
        return
    table = Table(title=f"Latency, eager float32 on {report.environment['device']}, median (20th to 80th percentile)")
    for column in ("batch", "run as", "heads", "device, us", "host to answer, us"):
        table.add_column(column, justify="left" if column in ("run as", "heads") else "right")
    for row in report.latency:
        times = [
            f"{row[kind]['median']:,.0f}\n({row[kind]['p20']:,.0f}-{row[kind]['p80']:,.0f})"
            for kind in ("device_us", "host_us")
        ]
        table.add_row(str(row["batch"]), row["mode"], row["variant"], *times)
    console.print(table)


if __name__ == "__main__":
    app()
