"""Options of the command ``auxhead-tune pareto``."""

import hashlib
import secrets
from contextlib import closing
from pathlib import Path
from typing import Annotated

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
from ..bench.variants import TRUNKS
from ..measuring.environment import release_memory, this_device
from ..measuring.options import out_option
from ..measuring.subject import Subject, own_cell
from ..records.record import BadRecord, append_record, read_records, records_path
from ..records.tables import print_tables, wide_console
from .demo_splits import demo_splits
from .measure import Pareto, operating_points
from .records import pareto_records
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
    out: Annotated[Path | None, out_option(KIND)] = None,
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
            console.print(f"batch {size}: capturing")
            with fastest_convolutions(size), closing(Pareto(subject, splits.test.labels, trunk)) as measured:
                for point in points:
                    console.print(f"batch {size}: {point.exits}")
                    results = measured.measure(point)
                    for record in pareto_records(measured, subject, point, results, about, run):
                        append_record(where, record)
            del measured
            release_memory()
        print_tables(console, pareto_tables(record for record in read_records(where) if record.run == run), where)


def _subject(loaded: Checkpoint, test: Split, batch: int, device: torch.device) -> Subject:
    """Return the test split in batches, the last one filled up with the first pictures."""
    count = -(-len(test.labels) // batch) * batch
    pixels: Tensor = torch.cat([test.pixels] * -(-count // len(test.labels)))[:count]
    inputs = tuple(
        normalise(chunk.to(device), loaded.mean, loaded.std).contiguous(memory_format=torch.channels_last)
        for chunk in pixels.split(batch)
    )
    return Subject(own_cell(ARCHITECTURE, loaded.network, inputs[0]), loaded.network, inputs)
