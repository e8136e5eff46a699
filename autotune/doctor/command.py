"""Options of the command ``auxhead-tune doctor``."""

import os
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ...model.basics.bad_input import BadInput
from ...model.commands.errors import one_line_errors
from ...model.commands.options import RUNS_YOUR_CODE, check_output_directory
from ..records.record import BadRecord
from .target import DIFF, SCRIPT, named_target
from .trace import BadTrace
from .user_code import UserCodeError

#: Where the trace and the record go, unless it is said.
_OUT = Path("auxhead-doctor")


class DoctorCommand(TyperCommand):
    """A command whose options stand anywhere, but not behind a script: what follows that is its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words."""
        options, *_ = self.make_parser(ctx).parse_args(list(args))
        ctx.allow_interspersed_args = options.get("target") != SCRIPT
        rest: list[str] = super().parse_args(ctx, args)
        return rest


def doctor(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="package.module:factory, a function that returns (a module, an input for it); or a Chrome trace of "
            "torch.profiler, .json or .json.gz; or the word run, and then a script with its arguments; or the word "
            f"diff, and then two files of records, one before and one of now. {RUNS_YOUR_CODE}",
            show_default=False,
        ),
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT ARGUMENTS | BASELINE NOW",
            help="Of `run`: the script is ended once enough was seen. Of `diff`: doctor.jsonl of two diagnoses.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help=f"Where the trace and the record go, {_OUT} by default.", show_default=False)
    ] = None,
    gate: Annotated[
        str | None,
        typer.Option(help="Of `diff`: status 1 if slower by more than this, 5% say, or with a new finding."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: the verdict, findings and the timeline; of `diff` all parts.")
    ] = False,
) -> None:
    """Say why work on a GPU does not overlap: findings, worst first, what each costs, and what to change.

    Options of `run` go before it. Status 1 if there are findings, 2 if there is an error, your code's included.
    `diff` compares two diagnoses of one target: status 1 if one is over the gate.
    """
    before = threading.enumerate()
    with one_line_errors(BadRecord, BadTrace):
        if target == DIFF:
            is_bad = _diff(words or [], out, gate, as_json)
        elif gate is not None:
            raise BadInput(
                f"--gate: is of diff, and TARGET is {target}: auxhead-tune doctor diff BASELINE NOW --gate 5%"
            )
        else:
            is_bad = _diagnose(target, words or [], out or _OUT, as_json)
    if any(not thread.daemon for thread in threading.enumerate() if thread not in before):
        # of a script that was ended: they may wait for work for good, and Python would wait for them
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(is_bad))
    if is_bad:
        raise typer.Exit(1)


def _diff(words: list[str], out: Path | None, gate: str | None, as_json: bool) -> bool:
    from .diff import run_diff

    if out is not None:
        raise BadInput(f"--out: got {out}, but diff writes nothing; leave it out")
    return run_diff(words, gate, as_json=as_json)


def _diagnose(target: str, words: list[str], out: Path, as_json: bool) -> bool:
    from .run import run_doctor

    named = named_target(target, words)
    check_output_directory(out)
    try:
        return run_doctor(named, out, as_json=as_json)
    except UserCodeError as error:
        print(error.shown, end="", file=sys.stderr)
        raise
