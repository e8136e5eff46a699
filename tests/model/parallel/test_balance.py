"""Where parts begin: times are balanced with bytes within limits; what does not fit is said."""

from itertools import combinations

import pytest
import torch
from auxhead.model.basics.bad_input import BadInput
from auxhead.model.basics.memory import bytes_in
from auxhead.model.parallel.balance import Costs, balanced, measure, starts_of
from auxhead.model.parallel.cut import Cut
from support import pipeline_ranks

pytestmark = pytest.mark.usefixtures("without_interpreter")
US = [3.0, 1.0, 4.0, 1.0, 5.0]


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize("limit", [None, 70, 40])
def test_the_slowest_part_is_as_fast_as_it_can_be(parts, limit):
    costs = Costs({4: US}, [10, 20, 30, 20, 10], [5, 5, 5, 10, 5])
    limits = [limit] * parts

    def within(starts):
        spans = list(zip(starts, [*starts[1:], 5], strict=True))
        return all(limit is None or costs.bytes_of(*span) <= limit for span in spans)

    def slowest(starts):
        return max(sum(US[start:end]) for start, end in zip(starts, [*starts[1:], 5], strict=True))

    ways = [[0, *cuts] for cuts in combinations(range(1, 5), parts - 1) if within([0, *cuts])]
    starts = balanced(costs, limits)
    if not ways:
        assert starts is None
    else:
        assert starts in ways and slowest(starts) == min(map(slowest, ways))


def test_a_small_device_has_a_small_part():
    costs = Costs({1: [1.0, 1.0, 1.0, 1.0]}, [10, 10, 10, 10], [0] * 4)
    assert balanced(costs, [None, None]) == [0, 2] and balanced(costs, [10, None]) == [0, 1]
    assert balanced(costs, [None, 10]) == [0, 3] and balanced(costs, [10, 10]) is None


def test_segments_are_measured_one_by_one():
    network, x = pipeline_ranks.plain(), pipeline_ranks.batch_of("plain", 8)
    cut = Cut(network, x)
    costs = measure(cut, {2: x[:2], 8: x}, "as_is")
    assert [len(costs.us[size]) for size in (2, 8)] == [4, 4] and min(min(each) for each in costs.us.values()) > 0
    held = [sum(each.nbytes for each in (*layer.parameters(), *layer.buffers())) for layer in network.heads]
    own = [sum(each.nbytes for each in network.backbone[place].parameters()) for place in (0, 2, 3, 6)]
    assert [*costs.held] == [a + b for a, b in zip(own, [*held, 0], strict=True)]


def test_what_does_not_fit_is_said_in_bytes():
    network, x = pipeline_ranks.plain(), pipeline_ranks.batch_of("plain", 8)
    cut = Cut(network, x)
    costs = Costs({8: [1.0] * 4}, [2**20, 2**21, 2**20, 2**20], [0] * 4)
    with pytest.raises(
        BadInput, match="does not fit on 2 devices, which may take 2, 2 MiB: its segments take 1 MiB up"
    ):
        starts_of("balance", "auto", cut, [2**21, 2**21], "devices", lambda: costs)


@pytest.mark.parametrize(
    "given, wanted", [(10, 10), ("10", 10), ("10GiB", 10 * 2**30), ("1.5 mb", 1_500_000), ("3KiB", 3072)]
)
def test_bytes_as_text(given, wanted):
    assert bytes_in("max_memory", given) == wanted


@pytest.mark.parametrize("given", ["ten", "10 TB", -1, None, True, 1.5])
def test_bytes_that_are_none(given):
    with pytest.raises(ValueError, match="max_memory: got .*, wants bytes, as an int or as in '10GiB'"):
        bytes_in("max_memory", given)


def test_ranks_share_no_memory_of_what_is_measured():
    network, x = pipeline_ranks.plain(), pipeline_ranks.batch_of("plain", 4)
    before = {name: each.data_ptr() for name, each in network.named_parameters()}
    measure(Cut(network, x), {4: x}, "cudnn")
    assert {name: each.data_ptr() for name, each in network.named_parameters()} == before
    assert all(each.device == torch.device("cpu") for each in network.parameters())
