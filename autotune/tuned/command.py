"""Options of the commands around tuned tables: promote and explain."""

from pathlib import Path
from typing import Annotated

import typer

from ...model.basics.bad_input import BadInput
from ...model.commands.errors import one_line_errors
from ..records.forms import WORDS
from ..records.record import BadRecord


def promote(
    records: Annotated[
        list[Path], typer.Argument(help="Files of `auxhead-tune sweep`, of one device.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The table.", show_default="kernels/launch/tuned/DEVICE.json of this installation"),
    ] = None,
) -> None:
    """Make the winners of sweeps the launch configurations of their device.

    Ties go to the rule's configuration, then to the simplest one. Other entries of the table stay. What could not be
    measured is left out, and said.
    """
    from ...kernels.launch.tuned_table import BadTable
    from .promote import run_promote

    with one_line_errors(BadRecord, BadTable):
        run_promote(records, out)


def explain(
    shapes: Annotated[
        list[str],
        typer.Argument(
            metavar="SHAPE...",
            help="Of one sample of a head's input: 64x56x56 (a map, CxHxW), 197x768 (tokens, TxD) or 512 (a vector).",
            show_default=False,
        ),
    ],
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, max=2**31 - 1, help="Samples a call; may be given several times.", show_default="1"),
    ] = None,
    classes: Annotated[int, typer.Option(min=2, max=2**26, help="Of the head.")] = 1000,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(WORDS['dtype'])}.")] = "float16",
    layout: Annotated[str, typer.Option(help=f"Of a map: {', '.join(WORDS['layout'])}.")] = "channels_last",
    pool: Annotated[str, typer.Option(help="avg, max, first or none.")] = "avg",
    pool_size: Annotated[str, typer.Option(help="Windows of a map: 1, or 3x2 for 3 rows of 2.")] = "1",
    device: Annotated[
        str | None, typer.Option(help="Name of a GPU, which need not be here.", show_default="the one here")
    ] = None,
) -> None:
    """Say which launch configuration a head gets on a device, and why.

    The head has one linear layer. Its sizes are printed as the kernel reads them: dimensions that lie one behind the
    other are one, and where nothing is pooled each element is a window.
    """
    with one_line_errors():
        for name, value in (("dtype", dtype), ("layout", layout)):
            if value not in WORDS[name]:
                raise BadInput(f"--{name}: got {value}, wants one of {', '.join(WORDS[name])}")
        sizes = [(samples, *_sizes("SHAPE", one)) for one in shapes for samples in batch or [1]]
        windows = _sizes("--pool-size", pool_size)
    from .explain import run_explain

    with one_line_errors():
        run_explain(sizes, classes, dtype, layout, pool, windows, device)


def _sizes(name: str, written: str) -> tuple[int, ...]:
    parts = written.split("x")
    if not all(part.isdecimal() and len(part) <= 10 and 0 < int(part) < 2**31 for part in parts):
        raise BadInput(f"{name}: got {written}, wants sizes such as 64x56x56, below 2 ** 31")
    return tuple(map(int, parts))
