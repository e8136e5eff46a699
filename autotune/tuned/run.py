"""Runs promote and explain: prints what was decided, and how heads are launched."""

from collections.abc import Sequence
from pathlib import Path

import torch

from ...kernels.head_arguments import check_input, check_pool
from ...kernels.head_shape import HeadShape
from ...kernels.head_view import head_view
from ...kernels.tuned_table import tuned_devices
from ...model.bad_input import BadInput
from ..records.activity import activity
from ..records.garbage import no_garbage_collection
from ..records.tables import wide_console
from . import explain as explaining
from . import promote as promoting


def run_promote(records: Sequence[Path], out: Path | None) -> None:
    """Write the table and print what is new in it; raises as :func:`promoting.promote`."""
    doing = f"Reading and comparing records of {', '.join(map(str, records))}"
    with activity(doing), no_garbage_collection():
        promotion = promoting.promote(records, out)
    printed = wide_console()
    printed.print(promoting.as_rich(promotion))
    entries, new = len(promotion.table.entries), len(promotion.winners)
    for one in promotion.left_out:
        printed.print(f"Left out: {one}", soft_wrap=True)
    kept = f", {entries - new} of them from before" if entries > new else ""
    printed.print(f"Table: {promotion.path}, {entries} entries{kept}", soft_wrap=True)


def run_explain(
    shapes: Sequence[tuple[int, ...]],
    classes: int,
    dtype: str,
    layout: str,
    pool: str,
    windows: tuple[int, ...],
    place: str,
    device: str | None,
) -> None:
    """Print how heads of inputs of these shapes are launched on a device; None: the one here.

    Raises:
        BadInput: no CUDA device here, or an input that no head reads.
        BadTable: the device's table cannot be read.
    """
    heads = [_head(one, classes, dtype, layout, pool, windows) for one in shapes]
    where = device or _device_here()
    printed = wide_console()
    for head in heads:
        for line in explaining.explain(where, head, place).lines():
            printed.print(line, soft_wrap=True)


def _head(sizes: tuple[int, ...], classes: int, dtype: str, layout: str, pool: str, grid: tuple[int, ...]) -> HeadShape:
    """Return what the kernel would make of an input."""
    step = 2 if layout == "strided" else 1
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
