"""Runs the commands that make a GPU's table and records one after another, each going on where it was stopped."""

import gzip
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import NamedTuple

import torch

from ...kernels.launch.choose_config import chosen_by_rule, forget_tables
from ...kernels.launch.head_shape import HeadShape
from ...kernels.launch.kernel_hash import is_measured_code, kernel_hash
from ...kernels.launch.tuned_table import table_path
from ...model.basics.files import writing
from ..heads.command import COMPILED_EVERY
from ..heads.run_random import run_random_heads
from ..measuring.environment import this_device
from ..measuring.heads_alone import FUSED
from ..measuring.options import NetworkChoice
from ..records.decisions import by_shape, deciding, measurement, sweep_records
from ..records.heads import RANDOM, last_runs
from ..records.record import Record, as_line, read_records, records_path
from ..records.tables import wide_console
from ..sweep.broad import BROAD
from ..sweep.config_text import text
from ..sweep.run import run_sweep
from ..sweep.search import QUICK
from ..sweep.winners import shape_of
from ..tuned.promote import run_promote

#: ResNets whose heads are swept; further networks may be swept into the same file.
NETWORKS = tuple(
    NetworkChoice.of(model, batch=(1, 8, 32, 128), classes=(10, 1000)) for model in ("resnet18", "resnet50")
)
#: Random heads, and their seed.
RANDOM_HEADS, SEED = 400, 50


class Step(NamedTuple):
    """Heads that one command measures."""

    what: str
    heads: int
    seconds: float
    """About what a head takes, as on an H200 with 16 cores."""
    recorded: Callable[[Sequence[Record]], int]
    """Counts, by the records there are, the heads that need not be measured again."""
    run: Callable[[], object]


def run_everything(folder: Path) -> int:
    """Measure what is not recorded in a folder yet, make the table, and put what is to be committed into the folder.

    Returns:
        How many random heads failed or answered wrongly.

    Raises:
        BadInput: no CUDA device, or a device that was lost.
        BadRecord: a file of records cannot be read.
    """
    gpu, console = torch.cuda.get_device_name(this_device("everything")), wide_console()
    sweeps, randoms = (folder / records_path(None, kind, gpu).name for kind in ("sweep", RANDOM))
    steps = _steps(sweeps, randoms)
    known = [record for path in (sweeps, randoms) if path.exists() for record in read_records(path)]
    known = [record for record in known if record.environment.get("gpu") == gpu and _is_of_this_kernel(record)]
    left = {step: step.seconds * max(step.heads - step.recorded(known), 0) for step in steps}
    console.print(f"{gpu}: {_minutes(sum(left.values()))}; Ctrl-C at any time: the same command goes on.")
    for step, seconds in left.items():
        console.print(f"  {step.what}: {step.heads} heads, {_minutes(seconds)}")
    began = time.monotonic()
    for step in steps:
        console.print(f"\n{step.what}", soft_wrap=True)
        step.run()
    table, kept = table_path(gpu), folder / table_path(gpu).stem
    heads = last_runs(read_records(randoms), RANDOM)
    made = {
        f"autotune/records/{kept.name}/sweep.jsonl.gz": _compressed(what_decides(read_records(sweeps))),
        f"autotune/records/{kept.name}/{RANDOM}.jsonl.gz": _compressed(one for run in heads for one in run.values()),
        f"kernels/launch/tuned/{table.name}": table.read_bytes(),
    }
    kept.mkdir(exist_ok=True)
    console.print(f"\nDone, {_minutes(time.monotonic() - began)} after it began. {kept} has what is to be committed:")
    for place, content in made.items():
        with writing(kept / Path(place).name) as file:
            file.write(content)
        console.print(f"  {place}, {len(content) / 1e6:.2f} MB", soft_wrap=True)
    return sum(run[FUSED].error is not None for run in heads)


def _steps(sweeps: Path, randoms: Path) -> list[Step]:
    """Return the steps; the table comes before the random heads, which are launched by it."""
    shapes = {head.planned(torch.device("cpu")).shape for family in BROAD for head in family}
    broad = _sweep_of("the broad set", shapes, lambda: run_sweep(None, QUICK, sweeps))
    randoms_step = Step(
        "Table, and random heads", RANDOM_HEADS, 1.5,
        lambda known: len({one.cell["number"] for one in known if one.kind == RANDOM}),
        lambda: _promote_and_measure(sweeps, randoms),
    )  # fmt: skip
    return [broad, *(_of_network(chosen, sweeps) for chosen in NETWORKS), randoms_step]


def _sweep_of(what: str, shapes: Set[HeadShape], run: Callable[[], object]) -> Step:
    def recorded(known: Sequence[Record]) -> int:
        """Those that were tuned beside another rule are tuned again."""
        swept = {(shape_of(one), one.protocol["rule"]) for one in sweep_records(known)}
        return sum((shape, text(chosen_by_rule(shape))) in swept for shape in shapes)

    return Step(f"Sweep of {what}", len(shapes), 15, recorded, run)


def _of_network(chosen: NetworkChoice, sweeps: Path) -> Step:
    return _sweep_of(chosen.model, heads_of_resnet(chosen), lambda: run_sweep(chosen, QUICK, sweeps))


def heads_of_resnet(chosen: NetworkChoice) -> set[HeadShape]:
    """Return the shapes of heads after the stages of a ResNet: of 56x56 and 64 channels or 256, then half as wide."""
    channels = 256 if chosen.model == "resnet50" else 64
    return {
        HeadShape(
            cell.batch, channels << stage, 1, (56 >> stage) ** 2, 1, 1, "channels_last", "avg", cell.classes, cell.dtype
        )
        for cell in chosen.cells
        for stage in range(len(cell.taps))
    }


def _promote_and_measure(sweeps: Path, randoms: Path) -> None:
    run_promote([sweeps], None)
    forget_tables()
    run_random_heads(RANDOM_HEADS, SEED, COMPILED_EVERY, randoms)


def _is_of_this_kernel(record: Record) -> bool:
    kernel = str(record.protocol.get("kernel"))
    return is_measured_code(kernel) if record.kind == "sweep" else kernel == kernel_hash()


def what_decides(records: Iterable[Record]) -> Iterator[Record]:
    """Yield, of records of sweeps, those that decide a winner: a third of the bytes that all of them take."""
    for its in by_shape(one for one in sweep_records(records) if _is_of_this_kernel(one)).values():
        timed = [(measurement(record), record) for record in its if record.error is None]
        kept = {id(one) for one in deciding(one for one, _ in timed)}
        yield from (record for one, record in timed if id(one) in kept)


def _compressed(records: Iterable[Record]) -> bytes:
    return gzip.compress("".join(map(as_line, records)).encode(), mtime=0)


def _minutes(seconds: float) -> str:
    return f"about {seconds / 60:,.0f} minutes"
