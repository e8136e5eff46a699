"""The command ``auxhead-tune profile``."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer

from ...model.bad_input import BadInput
from ...model.commands.console import plain_console
from ...model.commands.errors import one_line_errors
from ...model.commands.options import make_output_directory
from ...model.commands.user_model import load_factory
from ...model.demo.small_resnet import ARCHITECTURE
from ..measuring.environment import clocks, environment, this_device
from ..measuring.subject import own_cell
from ..records.record import BadRecord, append_record
from .measure import compare, demo_model, repeated
from .records import KIND, profile_records
from .tables import print_comparison


class Exits(str, Enum):
    """Runners that can be profiled as "after"."""

    overlapped = "overlapped"
    polled = "polled"
    gated = "gated"


class Trunk(str, Enum):
    """Kinds of trunks that a runner may have."""

    as_is = "as_is"
    cudnn = "cudnn"
    inductor = "inductor"


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
        int | None,
        typer.Option(min=1, help="Samples a request.", show_default="the factory's batch; 1 for a checkpoint"),
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
        device = this_device(KIND, ": launches and CUDA API calls are counted there")
        make_output_directory(out)
        if checkpoint is not None:
            subject, made_of = demo_model(checkpoint, batch or 1)
        else:
            subject, made_of = load_factory(str(model))(), "the factory's batch"
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
