"""Decisions by records of sweeps: the measurements that count, the winner, and the simpler ones tied with it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

from .comparison import DECIDING, Difference, Paired, compare_runs, runs_tie
from .forms import SHAPE
from .record import Record, grouped

Key = TypeVar("Key")
#: Fields of a launch configuration and their values.
Fields = Mapping[str, Any]

_shape_of = itemgetter(*SHAPE)


class Measurement(NamedTuple):
    """A configuration of a head that was timed beside the rule's."""

    variant: str
    """Its name."""
    rule: str
    """Name of the rule's configuration, the baseline."""
    config: Any
    """``Fields``, as the record has them."""
    paired: Paired
    median_us: float

    @property
    def rounds(self) -> int:
        """Timed rounds of all captures together."""
        return sum(map(len, self.paired.own))


def measurement(record: Record) -> Measurement:
    """Read the record of something that was timed."""
    (rule,) = (pair for pair in record.paired if pair["role"] == "rule")
    assert record.device_us is not None
    paired = Paired(record.device_us["samples"], rule["samples"], record.run)
    config = record.protocol.get("config")
    return Measurement(record.variant, rule["variant"], config, paired, record.device_us["median"])


def sweep_records(records: Iterable[Record]) -> list[Record]:
    """Return the records of sweeps, but for those of heads in captured networks: tuning there gained nothing."""
    return [record for record in records if record.kind == "sweep" and record.protocol["place"] == "alone"]


def of_last_kernel(records: Iterable[Record]) -> list[Record]:
    """Return the records of sweeps of the kernel that was measured last; other kernels' say nothing about it."""
    swept = sweep_records(records)
    return [record for record in swept if record.protocol["kernel"] == swept[-1].protocol["kernel"]]


def by_shape(records: Iterable[Record]) -> dict[tuple[Any, ...], list[Record]]:
    """Group records of sweeps, failures included, by the values of ``SHAPE``, in order of each one's first record."""
    return grouped(records, lambda record: _shape_of(record.cell))


def deciding(measured: Iterable[Measurement]) -> list[Measurement]:
    """Return, of the measurements of one head, those that decide: the ones timed most often.

    Of these only the ones beside the last one's rule, since times over different baselines cannot be compared.
    """
    found = list(measured)
    beside = [one for one in found if one.rule == found[-1].rule]
    most = max((one.rounds for one in beside), default=0)
    return [one for one in beside if one.rounds == most]


def simplicity(config: Fields) -> tuple[int, ...]:
    """Return a sort key for tied configurations, the simplest first.

    No caps before caps, split before tiled, features that are sent before those in memory, counting before waiting,
    whole windows before parts, no reading ahead before reading ahead, few warps before many; then large blocks before
    small ones, so that there are few programs.
    """
    return (
        config["max_registers"] > 0,
        config["max_programs"] > 0,
        config["block_f"] > 1,
        config.get("features", "awaited") != "awaited",
        config["waits"],
        *(config[name] for name in ("window_parts", "stages", "weight_buffers", "num_warps")),
        *(-config[f"block_{letter}"] for letter in "cpakfsj"),
        *(config[name] for name in ("max_registers", "max_programs", "block_n")),
    )


def joint_confidence(count: int) -> float:
    """Return the confidence of each interval, so that those of ``count`` variants against one hold together.

    Of n variants that are all the same one is fastest by chance, and looks the faster the more there are.
    """
    return 1.0 - (1.0 - DECIDING) / max(count - 1, 1)


@dataclass(eq=False)
class Decision(Generic[Key]):
    """The winner among configurations of one head that were timed beside one rule's."""

    times: Mapping[Key, Paired]
    rule: Key
    """The rule's configuration, which wins ties."""

    @cached_property
    def winner(self) -> Key | None:
        """The fastest, or what is tied with it: first the rule's, then the simplest; None if nothing was timed."""
        if not self.times:
            return None
        return winner(self.times, sorted(self.times, key=lambda one: (one != self.rule, simplicity(vars(one)))))

    @property
    def winner_is_fastest(self) -> bool:
        """True if the winner has the lowest time over the rule's; else it is tied with the fastest, and simpler."""
        ratios = [one.over_baseline for one in self.times.values()]
        return self.winner is not None and self.times[self.winner].over_baseline == min(ratios)

    def compare(self, one: Key | None, other: Key | None) -> Difference | None:
        """Compare two configurations; None if one of them was not timed."""
        if one is None or other is None or one not in self.times or other not in self.times:
            return None
        return Difference(1.0, 1.0, 1.0) if one == other else compare_runs(self.times[one], self.times[other])


def winner(times: Mapping[Key, Paired], simpler_first: Sequence[Key]) -> Key:
    """Return the fastest variant, or the first tied with it of ``simpler_first``, which holds all, of one baseline.

    What is tied with the fastest and with a simpler variant that is slower than the fastest is no answer: it could not
    be said why it is taken and not the simpler one.

    Raises:
        ValueError: no variants, or others in ``simpler_first``.
    """
    if not times or set(times) != set(simpler_first):
        raise ValueError(f"simpler_first: got {len(simpler_first)} variants, wants those of times ({len(times)})")
    fastest = min(simpler_first, key=lambda one: times[one].over_baseline)
    confidence = joint_confidence(len(times))

    def tied(one: Key, other: Key) -> bool:
        return runs_tie(times[one], times[other], confidence=confidence)

    slower: list[Key] = []
    for one in simpler_first:
        if one == fastest:
            break
        if not tied(one, fastest):
            slower.append(one)
        elif not any(tied(one, other) for other in slower):
            return one
    return fastest
