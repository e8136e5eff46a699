"""Runs the profile of a network: finds or loads it, measures before and after, and prints and keeps both."""

from pathlib import Path

import torch

from ...model.commands.console import plain_console
from ...model.commands.options import make_output_directory
from ...model.commands.user_model import load_factory
from ...model.own_exits.silenced_model import SilencedModel
from ...model.saving.checkpoint_files import read_description
from ..measuring.environment import clocks, environment, this_device
from ..measuring.subject import own_cell
from ..records.record import append_record
from .measure import KIND, compare, profile_records, repeated, saved_model
from .tables import exits_table, print_comparison


def run_profile(
    model: str | None,
    checkpoint: Path | None,
    *,
    backbone: str | None,
    modules: str | None,
    exits: str,
    trunk: str,
    batch: int | None,
    requests: int,
    out: Path,
) -> bool:
    """Measure, print and keep; returns whether the runner is in a steady state. The arguments are the options.

    Raises:
        BadInput: no CUDA device, no such factory or checkpoint, or a network that cannot be run like this.
    """
    console = plain_console()
    saved = None if checkpoint is None else saved_model(checkpoint, batch or 1, backbone, modules)
    factory = None if model is None else load_factory(model)
    device = this_device(KIND, ": launches and CUDA API calls are counted there")
    make_output_directory(out)
    if saved is not None:
        subject, made_of = saved
    else:
        assert factory is not None
        subject, made_of = factory(), "the factory's batch"
    x = subject.example_input.to(device)
    x = x if batch in (None, len(x)) else repeated(x, batch)
    network = subject.network.to(device).eval()
    console.print(
        f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}; batches of {len(x)}, {made_of}\n"
        "before: eager PyTorch, plain heads in line, .item() after each, left once all samples are sure\n"
        f"after: {exits}, trunk {trunk}",
        soft_wrap=True,
    )
    if isinstance(network.backbone, SilencedModel):
        console.print(exits_table(network.backbone.exits))
    found = compare(network, x, exits=exits, trunk=trunk, requests=requests, out=out)
    where = {**environment(device), "clocks": clocks(device)}
    described = "" if checkpoint is None else str(read_description(checkpoint)["backbone"])
    cell = own_cell(model or backbone or described.rpartition(":")[2], network, x)
    records = profile_records(found, cell, f"{exits}@{trunk}", where)
    for record in records:
        append_record(out / "profile.jsonl", record)
    print_comparison(console, records)
    console.print(
        f"\nSaved in {out}: before.json, after.json (Chrome traces, for ui.perfetto.dev or chrome://tracing), "
        "profile.jsonl (appended: records)",
        soft_wrap=True,
    )
    return not found.problems
