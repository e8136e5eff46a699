"""The commands around tuned tables: promote and explain."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from ...kernels.head_arguments import check_input, check_pool
from ...kernels.head_shape import DTYPES, LAYOUTS, HeadShape
from ...kernels.head_view import head_view
from ...kernels.tuned_table import PLACES, BadTable, tuned_devices
from ...model.bad_input import BadInput
from ...model.commands.errors import one_line_errors
from ..records.record import BadRecord
from ..records.tables import wide_console
from . import explain as explaining
from . import promote as promoting


def promote(
    records: Annotated[
        list[Path], typer.Argument(help="Files of `auxhead-tune sweep`, of one device.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option(help="The table (default: kernels/tuned/DEVICE.json of this installation).")
    ] = None,
) -> None:
    """Make the winners of sweeps the launch configurations of their device.

    Ties go to the rule's configuration, then to the simplest one. Other entries of the table stay. What could not be
    measured is left out, and said.
    """
    with one_line_errors(BadRecord, BadTable):
        promotion = promoting.promote(records, out)
        printed = wide_console()
        printed.print(promoting.as_rich(promotion))
        entries, new = len(promotion.table.entries), len(promotion.winners)
        for one in promotion.left_out:
            printed.print(f"Left out: {one}", soft_wrap=True)
        kept = f", {entries - new} of them from before" if entries > new else ""
        printed.print(f"Table: {promotion.path}, {entries} entries{kept}", soft_wrap=True)


def explain(
    shapes: Annotated[
        list[str],
        typer.Argument(
            metavar="SHAPE...",
            help="Of one sample of a head's input: 64x56x56 (a map, CxHxW), 197x768 (tokens, TxD) or 512 (a vector).",
            show_default=False,
        ),
    ],
    batch: Annotated[int, typer.Option(min=1, help="Samples a call.")] = 1,
    classes: Annotated[int, typer.Option(min=1, help="Of the head.")] = 1000,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "float16",
    layout: Annotated[str, typer.Option(help=f"Of a map: {', '.join(LAYOUTS)}.")] = "channels_last",
    pool: Annotated[str, typer.Option(help="avg, max, first or none.")] = "avg",
    pool_size: Annotated[str, typer.Option(help="Windows of a map: 1, or 3x2 for 3 rows of 2.")] = "1",
    place: Annotated[str, typer.Option(help="alone: launched by fused_head; network: by a runner.")] = "network",
    device: Annotated[
        str | None, typer.Option(help="Name of a GPU, which need not be here (default: the one here).")
    ] = None,
) -> None:
    """Say which launch configuration a head gets on a device, and why."""
    with one_line_errors(BadTable):
        for name, value, allowed in (("dtype", dtype, DTYPES), ("layout", layout, LAYOUTS), ("place", place, PLACES)):
            if value not in allowed:
                raise BadInput(f"--{name}: got {value}, wants one of {', '.join(allowed)}")
        heads = [_head((batch, *_sizes("SHAPE", one)), classes, dtype, layout, pool, pool_size) for one in shapes]
        where = device or _device_here()
        printed = wide_console()
        for head in heads:
            for line in explaining.explain(where, head, place).lines():
                printed.print(line, soft_wrap=True)


def _sizes(name: str, written: str) -> tuple[int, ...]:
    parts = written.split("x")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise BadInput(f"{name}: got {written}, wants sizes such as 64x56x56")
    return tuple(map(int, parts))


def _head(sizes: tuple[int, ...], classes: int, dtype: str, layout: str, pool: str, pool_size: str) -> HeadShape:
    """Return what the kernel would make of an input."""
    step = 2 if layout == "strided" else 1
    grid = _sizes("--pool-size", pool_size)
    try:
        x = torch.empty((*sizes[:-1], sizes[-1] * step), dtype=getattr(torch, dtype), device="meta")[..., ::step]
        if layout == "channels_last" and x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        window_grid = check_pool(pool, grid if len(grid) > 1 else grid[0])
        check_input(x, pool, window_grid)
    except (ValueError, RuntimeError, TypeError) as error:  # the last two of sizes beyond 64 bits
        raise BadInput(str(error).partition("\n")[0]) from None
    view = head_view(tuple(x.shape), x.stride(), pool, window_grid)
    return HeadShape.of(view, classes, pool_max=pool == "max", dtype=x.dtype)


def _device_here() -> str:
    if not torch.cuda.is_available():
        known = ", ".join(tuned_devices()) or "no device yet"
        raise BadInput(f"--device: torch sees no CUDA device here, wants a name; there are tables for {known}")
    return torch.cuda.get_device_name()
