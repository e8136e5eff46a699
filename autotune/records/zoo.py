"""Networks of the zoo as their records have them: of each the run that counts, and times over torch.compile's."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .record import Record, grouped

KIND = "zoo"
#: The variant that ``make_runner`` makes without options; and the same in the next process.
DEFAULT = "default@auto"
AGAIN = f"{DEFAULT}, next process"
#: What it is compared with: the backbone without heads.
COMPILED = "compile-bare-reduce-overhead@as_is"
MAX_AUTOTUNE = "compile-bare-max-autotune@as_is"
GRAPH = "graph-bare@as_is"


class ZooCell(NamedTuple):
    """A network at one batch size, with its records by variant."""

    model: str
    batch: int
    records: Mapping[str, Record]

    def us(self, variant: str, clock: str = "device") -> float | None:
        """Return the median time of a variant, on the device or the host; None where there is none."""
        record = self.records.get(variant)
        times = None if record is None or record.error is not None else getattr(record, f"{clock}_us")
        return None if times is None else float(times["median"])

    def ratio(self, variant: str = DEFAULT, to: str = COMPILED, clock: str = "device") -> float | None:
        """Return a variant's time over another's; None unless both were timed."""
        return ratio(self.us(variant, clock), self.us(to, clock))

    def measured(self, variant: str, name: str) -> float | None:
        """Return a further measurement of a variant, of several captures the first one's."""
        record = self.records.get(variant)
        value = None if record is None or record.error is not None else (record.measured or {}).get(name)
        return value[0] if isinstance(value, list) else value


def ratio(one: float | None, other: float | None) -> float | None:
    """Return one value over another; None unless there are both."""
    return None if one is None or other is None else one / other


def zoo_cells(records: Iterable[Record]) -> list[ZooCell]:
    """Return networks and batches of one environment, each with its last run in which anything was timed."""
    zoo = [one for one in records if one.kind == KIND]
    cells = grouped(zoo, lambda one: (f"{one.cell['model']}", int(one.cell["batch"])))
    return [ZooCell(model, batch, _that_count(its)) for (model, batch), its in cells.items()]


def _that_count(records: Sequence[Record]) -> dict[str, Record]:
    """Return a cell's records by variant; a run that was stopped has failures alone."""
    runs = list(grouped((one for one in records if one.variant != AGAIN), lambda one: one.run).values())
    timed = [run for run in runs if any(one.device_us is not None for one in run)]
    again = [one for one in records if one.variant == AGAIN]
    return {one.variant: one for one in (*(timed or runs or [[]])[-1], *again)}


class Summary(NamedTuple):
    """The default runner's times over torch.compile's, of several cells."""

    cells: int
    as_fast: int
    """Cells in which it takes no longer."""
    median: float
    lowest: float
    highest: float


def summary_of(cells: Iterable[ZooCell]) -> Summary | None:
    """Summarise all cells in which both were timed; None if there is none."""
    ratios = [one for cell in cells if (one := cell.ratio()) is not None]
    if not ratios:
        return None
    return Summary(len(ratios), sum(one <= 1.0 for one in ratios), statistics.median(ratios), min(ratios), max(ratios))


def by_model(cells: Iterable[ZooCell]) -> dict[str, dict[int, ZooCell]]:
    """Return cells by network and batch, networks with the lowest median ratio first, those without one last."""
    networks = {model: {one.batch: one for one in its} for model, its in grouped(cells, lambda one: one.model).items()}

    def place(model: str) -> float:
        summary = summary_of(networks[model].values())
        return float("inf") if summary is None else summary.median

    return {model: networks[model] for model in sorted(networks, key=place)}
