"""The command ``auxhead-tune pareto``."""

import gc
import hashlib
import secrets
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from ...model.bad_input import BadInput
from ...model.checkpoint import WEIGHTS, Checkpoint
from ...model.commands.errors import one_line_errors
from ...model.demo.saved import load_demo
from ...model.demo.small_resnet import ARCHITECTURE
from ...model.images import normalise
from ...model.training.data_sets import Split, load_source
from ...model.trunk.fused_convolution import fastest_convolutions
from ..bench.measure import paired_with
from ..bench.variants import TRUNKS, Variant
from ..measuring.environment import clocks, environment, this_device
from ..measuring.subject import Subject, own_cell
from ..records.record import BadRecord, Record, append_record, read_records, records_path, utc_now
from ..records.summaries import summary
from ..records.tables import print_tables, wide_console
from .demo_splits import demo_splits
from .measure import Outcome, Pareto, Point, operating_points
from .tables import KIND, pareto_tables


def pareto(
    checkpoint: Annotated[Path, typer.Option(help="A directory written by `auxhead demo`.", show_default=False)],
    data: Annotated[
        Path | None, typer.Option(help="The images that it was trained on, as the demo takes them.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Or their data set.")] = None,
    root: Annotated[Path | None, typer.Option(help="Where that lies.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Images a call.", show_default="1 and 64")] = None,
    trunk: Annotated[str, typer.Option(help=f"How the backbone is run: {', '.join(TRUNKS)}.")] = "cudnn",
    out: Annotated[
        Path | None,
        typer.Option(help="Records are appended here.", show_default="autotune-records/pareto-DEVICE.jsonl"),
    ] = None,
) -> None:
    """Measure what early exit costs in accuracy and saves in time to the answer, for several sets of thresholds.

    They are calibrated on the demo's validation split for at most so much of accuracy; accuracy and times are those of
    its test split. Runners and the bare network take turns, and their answers are checked first.
    """
    console = wide_console()
    with one_line_errors(BadRecord):
        if trunk not in TRUNKS:
            raise BadInput(f"--trunk: got {trunk}, wants one of {', '.join(TRUNKS)}")
        device = this_device(KIND)
        where = records_path(out, KIND, torch.cuda.get_device_name(device))
        loaded = load_demo(checkpoint)
        source = load_source(data, dataset, root)
        splits = demo_splits(checkpoint, loaded, source)
        network = loaded.network.to(device)
        points = operating_points(network, splits.validation)
        weights = hashlib.sha256((checkpoint / WEIGHTS).read_bytes()).hexdigest()[:12]
        about = {"data": source.name, "weights": weights}
        run = secrets.token_hex(6)
        for size in batch or (1, 64):
            subject = _subject(loaded, splits.test, size, device)
            with fastest_convolutions(size):
                console.print(f"batch {size}: capturing")
                measured = Pareto(subject, splits.test.labels, trunk)
                try:
                    for point in points:
                        console.print(f"batch {size}: {point.exits}")
                        outcomes = measured.measure(point)
                        for record in _records(measured, subject, point, outcomes, about, run):
                            append_record(where, record)
                finally:
                    measured.close()
            del measured
            gc.collect()
            torch.cuda.empty_cache()
        print_tables(console, pareto_tables(record for record in read_records(where) if record.run == run))
        console.print(f"Records: {where}", soft_wrap=True)


def _subject(loaded: Checkpoint, test: Split, batch: int, device: torch.device) -> Subject:
    """The test split in batches, the last one filled up with the first pictures."""
    count = -(-len(test.labels) // batch) * batch
    pixels: Tensor = torch.cat([test.pixels] * -(-count // len(test.labels)))[:count]
    inputs = tuple(
        normalise(chunk.to(device), loaded.mean, loaded.std).contiguous(memory_format=torch.channels_last)
        for chunk in pixels.split(batch)
    )
    return Subject(own_cell(ARCHITECTURE, loaded.network, inputs[0]), loaded.network, inputs)


def _records(
    measured: Pareto, subject: Subject, point: Point, outcomes: dict[str, Outcome], about: dict[str, Any], run: str
) -> list[Record]:
    device = subject.example.device
    where = {**environment(device), "clocks": clocks(device)}
    times = {
        name: (summary(one.samples.host), summary(one.samples.device))
        for name, one in outcomes.items()
        if one.samples is not None
    }

    def record(variant: Variant) -> Record:
        one = outcomes[variant.name]
        timed: dict[str, Any] = {}
        if one.samples is not None:
            host, of_device = times[variant.name]
            timed = {"host_us": host, "device_us": of_device, "paired": paired_with(variant, times)}
            for pair in timed["paired"]:
                baseline = outcomes[pair["variant"]].mean_host_us
                assert baseline is not None and one.mean_host_us is not None
                pair["mean_host_us"], pair["mean_host_ratio"] = baseline, one.mean_host_us / baseline
            timed["measured"] = {
                "samples": measured.samples,
                "accuracy": one.accuracy,
                "mean_host_us": one.mean_host_us,
            }
        return Record(
            kind=KIND,
            cell=subject.cell.as_json(),
            exits=point.exits,
            variant=variant.name,
            run=run,
            utc=utc_now(),
            environment=where,
            protocol={
                "rounds": measured.rounds,
                "captures": variant.captures,
                "inputs": len(subject.inputs),
                "repeat": 1,
                "order": "interleaved, shuffled every round",
                "l2": "warm, by the variant itself",
                "clocks": "as found",
                "thresholds": dict(zip(subject.network.taps, point.thresholds, strict=True)),
                "samples_by_exit": measured.samples_by_exit(point, variant),
                **about,
            },
            correctness=one.counts,
            notes=measured.notes(variant),
            error=one.error,
            **timed,
        )

    return [record(variant) for variant in measured.variants]
