"""Options of the command ``auxhead-tune doctor``."""

import os
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from ...model.commands.errors import one_line_errors
from ...model.commands.options import RUNS_YOUR_CODE, check_output_directory
from ..records.record import BadRecord
from .trace import BadTrace
from .user_code import UserCodeError


def doctor(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="package.module:factory, a function that returns (a module, an input for it); or a Chrome trace of "
            "torch.profiler, .json or .json.gz; or the word run, and then a script with its arguments. "
            f"{RUNS_YOUR_CODE}",
            show_default=False,
        ),
    ],
    script: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT ARGUMENTS", help="Of `run`: the script is ended once enough was seen."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the trace and the record go.")] = Path("auxhead-doctor"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: the verdict, findings and the timeline.")
    ] = False,
) -> None:
    """Say why work on a GPU does not overlap: findings, worst first, what each costs, and what to change.

    Options go before TARGET. Status 1 if there are findings, 2 if there is an error, your code's included.
    """
    before = threading.enumerate()
    with one_line_errors(BadRecord, BadTrace):
        from .run import named_target, run_doctor

        named = named_target(target, script or [])
        check_output_directory(out)
        try:
            found = run_doctor(named, out, as_json=as_json)
        except UserCodeError as error:
            print(error.shown, end="", file=sys.stderr)
            raise
    if any(not thread.daemon for thread in threading.enumerate() if thread not in before):
        # of a script that was ended: they may wait for work for good, and Python would wait for them
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(found))
    if found:
        raise typer.Exit(1)
