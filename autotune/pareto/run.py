"""Runs the measurement of accuracy against time on the demo's network and its images, and prints the table."""

import secrets
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from ...model.checkpoint import Checkpoint
from ...model.demo.saved import load_demo
from ...model.demo.small_resnet import ARCHITECTURE
from ...model.description import content_hash, read_description, weights_name
from ...model.images import normalise
from ...model.training.data_sets import Split, load_source
from ...model.trunk.fused_convolution import fastest_convolutions
from ..measuring.environment import release_memory, this_device
from ..measuring.subject import Subject, own_cell
from ..records.record import append_record, read_records, records_path
from ..records.tables import print_tables, wide_console
from .demo_splits import demo_splits
from .measure import Pareto, operating_points
from .records import pareto_records
from .tables import KIND, pareto_tables


def run_pareto(
    checkpoint: Path,
    data: Path | None,
    dataset: str | None,
    root: Path | None,
    *,
    batches: Sequence[int],
    trunk: str,
    out: Path | None,
) -> None:
    """Measure, keep and print; the arguments are the options.

    Raises:
        BadInput: no CUDA device, no such checkpoint or images, or not the images that it was trained on.
        BadRecord: ``out`` cannot be read.
    """
    console = wide_console()
    loaded = load_demo(checkpoint)
    source = load_source(data, dataset, root)
    splits = demo_splits(checkpoint, loaded, source)
    device = this_device(KIND)
    where = records_path(out, KIND, torch.cuda.get_device_name(device))
    network = loaded.network.to(device)
    points = operating_points(network, splits.validation)
    weights = content_hash(checkpoint / weights_name(read_description(checkpoint)))[:12]
    about = {"data": source.name, "weights": weights}
    run = secrets.token_hex(6)
    for size in batches:
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
