"""``Facts`` of a network, measured on one GPU; ``Splits``: what they predict of it in parts on several."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ...model import EarlyExitNetwork
from ...model.basics.bad_input import BadInput
from ...model.basics.memory import free_bytes
from ...model.listening.batches import of_size
from ...model.parallel.balance import Costs, balanced, measure
from ...model.parallel.cut import Cut
from ..measuring.environment import release_memory

#: Of the hosts for each micro-batch, which they launch and send beside the turns of the stages: assumed. It was some
#: 600 on a host of two H200s, where PyTorch's schedule and NCCL's calls are the most of it.
HOST_US = 600.0
#: Of a link between two GPUs of one host, assumed: about half of what NVLink of an H200 can do in one direction.
LINK_BYTES_PER_US, LINK_US = 200e3, 10.0
#: The largest batch at which a pipeline is compared with ``parallelize``, in powers of two.
MOST = 4096
#: Batches in which segments are measured, besides the largest one asked for.
_SIZES = (1, 8, 64)


class Facts(NamedTuple):
    """What a network takes on one GPU, as a whole and by the segments that it can be cut into."""

    best: Mapping[int, tuple[str, float]]
    """Name and microseconds of the fastest runner by batch size; none if the GPU has no room for the whole network."""
    free: int | None
    """Bytes of the GPU that are free without the network; None on the CPU."""
    held: Sequence[int]
    """Bytes of each segment's parameters and buffers, those of its head with them."""
    us: Mapping[int, Sequence[float]]
    """Times of the segments by batch size, without heads; none if the GPU has no room for each of them alone."""
    at_work: Mapping[int, Sequence[int]]
    """Bytes that each segment takes besides, by the same sizes."""
    handed: Sequence[float]
    """Bytes a sample that each segment but the last hands over."""
    ends: Sequence[str]
    """Taps at which segments end, but for the last."""
    uncuttable: Mapping[str, str]
    """Why none can end at other taps."""
    shared: Mapping[str, Sequence[int]]
    """By name, the segments that read the same parameter or buffer, if they are several: they have to stay together."""
    trunk: str
    """How the segments were run."""

    def costs(self, samples: int) -> Costs:
        """Return what the segments take of a batch, in line with those that were measured."""
        return Costs({samples: _at(self.us, samples)}, self.held, [int(each) for each in _at(self.at_work, samples)])

    def torn(self, starts: Sequence[int]) -> str | None:
        """Return the name of a parameter or buffer that several parts would read, if there is one."""
        parts = {name: {bisect_right(starts, segment) for segment in its} for name, its in self.shared.items()}
        return next((name for name, its in parts.items() if len(its) > 1), None)


class Split(NamedTuple):
    """Time of a batch through a network in parts, one a GPU."""

    us: float
    samples: int
    """That go from part to part at once."""
    ends: Sequence[str]
    """The taps behind which it is cut."""


class Splits:
    """Predicts times of a network in parts, on so many GPUs like the one of the facts; None where there are none."""

    def __init__(self, facts: Facts, gpus: int) -> None:
        self._facts, self._gpus = facts, gpus
        self._parts = cache(self._balanced)

    def _balanced(self, samples: int) -> tuple[list[float], list[str]] | None:
        """Return the microseconds of each part, its link with them, and the taps behind which it is cut."""
        facts = self._facts
        if not facts.us:
            return None
        costs = facts.costs(samples)
        starts = balanced(costs, [facts.free] * self._gpus)
        if starts is None or facts.torn(starts) is not None:
            return None
        us = [sum(costs.us[samples][start:end]) for start, end in pairwise([*starts, len(facts.held)])]
        for part, start in enumerate(starts[1:]):
            us[part] += LINK_US + facts.handed[start - 1] * samples / LINK_BYTES_PER_US
        return us, [facts.ends[start - 1] for start in starts[1:]]

    def parallelize(self, batch: int) -> Split | None:
        """Return the time of a batch that goes as a whole through one part after the other."""
        found = self._parts(batch)
        return None if found is None else Split(sum(found[0]), batch, found[1])

    def pipelined(self, batch: int) -> Split | None:
        """Return the time of a batch in micro-batches of a size with which it takes least."""
        ways = []
        for size in {-(-batch // 2**halvings) for halvings in range(batch.bit_length() + 1)}:
            if (found := self._parts(size)) is not None:
                count = -(-batch // size)
                us = (count + self._gpus - 1) * max(found[0]) + count * HOST_US
                ways.append(Split(us, size, found[1]))
        return min(ways, default=None)

    def pays_from(self) -> int | None:
        """Return the smallest batch that a pipeline answers sooner than ``parallelize``, if that has room for it."""
        for batch in (2**power for power in range(MOST.bit_length())):
            piped, other = self.pipelined(batch), self.parallelize(batch)
            if piped is not None and (other is None or piped.us < other.us):
                return batch
        return None


def measure_facts(network: EarlyExitNetwork, example: Tensor, device: torch.device, largest: int, trunk: str) -> Facts:
    """Measure a network's segments one by one, up to a largest batch; of the whole network nothing is measured.

    Args:
        network: on the device, or where there is no room for it on the CPU.
        example: a batch where the network is.
        device: to measure on.
        largest: the largest batch size.
        trunk: "as_is" or "cudnn", see :func:`make_trunk`.
    """
    free, whole = free_bytes(device), sum(each.nbytes for each in (*network.parameters(), *network.buffers()))
    if free is not None and example.device.type == device.type:
        free += whole
    try:
        cut = Cut(network, example)
    except BadInput as error:
        why = str(error).removeprefix("network: ")
        return Facts({}, free, [whole], {}, {}, [], [], {"any tap": why}, {}, trunk)
    us, at_work = {}, {}
    for size in sorted({*_SIZES, largest}):
        try:
            costs = measure(cut, {size: of_size(example, size).to(device)}, trunk)
        except torch.OutOfMemoryError:
            break
        finally:
            release_memory()
        us[size], at_work[size] = costs.us[size], costs.at_work
    held = [cut.bytes_of(segment, segment + 1) for segment in range(cut.segments)]
    handed = [each.nbytes / 2 for each in cut.handed_like(2)]
    shared = {name: sorted(segments) for name, _, segments in cut.state if len(segments) > 1}
    return Facts({}, free, held, us, at_work, handed, cut.ends, cut.uncuttable, shared, trunk)


def _at(by_size: Mapping[int, Sequence[float]], batch: int) -> list[float]:
    """Return the values of a batch size, on the line through those of the two sizes around it, or nearest to it."""
    sizes = sorted(by_size)
    if len(sizes) == 1:
        return [value * batch / sizes[0] for value in by_size[sizes[0]]]
    place = min(max(bisect_left(sizes, batch), 1), len(sizes) - 1)
    low, high = sizes[place - 1], sizes[place]
    share = (batch - low) / (high - low)
    pairs = zip(by_size[low], by_size[high], strict=True)
    # by noise a larger batch may take no longer: beyond the largest size no time falls
    return [max(b, a + share * (b - a)) if share > 1 else a + share * (b - a) for a, b in pairs]
