"""Arguments of ``parallelize``, and what it does without GPUs; see test_split_order.py and test_parallelize_gpu.py."""

from itertools import combinations

import pytest
import torch
from auxhead.model import EagerRunner, parallelize
from auxhead.model.parallel.segments import balanced
from auxhead.model.parallel.split import parallelize as front
from support import pipeline_ranks

pytestmark = pytest.mark.usefixtures("without_interpreter")


def example():
    return pipeline_ranks.batch_of("plain", 16)


@pytest.mark.parametrize("trunk", ["as_is", "cudnn"])
def test_on_cpus_the_network_runs_as_a_whole(trunk):
    network, x = pipeline_ranks.normed(), example()
    with parallelize(network, x, devices=["cpu", "cpu"], exits="polled", trunk=trunk, batch_sizes=[4]) as runner:
        assert isinstance(runner, EagerRunner) and runner.describe().startswith("On CPUs there are no parts: ")
        found, wanted = runner(x), network(x)
    assert torch.equal(found.exit_index, wanted.exit_index) and torch.equal(found.label, wanted.label)
    torch.testing.assert_close(found.probs, wanted.probs, rtol=1e-3, atol=1e-5)


ARGUMENTS = [
    (dict(network=torch.nn.Linear(1, 1)), TypeError, "network: got Linear, wants an EarlyExitNetwork"),
    (dict(network=pipeline_ranks.plain().train()), ValueError, "network: in training mode"),
    (dict(devices=[]), ValueError, r"devices: got \[\], wants a list of one device or more"),
    (dict(devices="cpu"), ValueError, "devices: got 'cpu', wants a list"),
    (dict(devices=["cpu", "gpu"]), ValueError, "devices: got 'gpu', wants 'cuda:0' and the like"),
    (dict(devices=["meta", "meta"]), ValueError, "devices: got meta, wants CUDA devices or the CPU"),
    (dict(devices=["cuda:99"]), ValueError, r"devices: got cuda:99, but torch sees \d+ CUDA devices here"),
    (dict(devices=["cpu"] * 5), ValueError, "devices: got 5, wants at most 4: the network has 3"),
    (dict(balance="even"), ValueError, "balance: got 'even', wants 'auto' or a list of taps"),
    (dict(balance=["1"]), ValueError, r"balance: got \['1'\], wants 1 of \['0', '2', '3'\], in this order"),
    (dict(balance=["0", "2"]), ValueError, "wants 1 of .* for 2 devices"),
    (dict(devices=["cpu"] * 3, balance=["2", "0"]), ValueError, r"balance: got \['2', '0'\], wants 2 of"),
    (dict(exits="gated"), ValueError, r"exits: got 'gated', wants one of \['overlapped', 'polled'\]"),
    (dict(batch_sizes=[0]), ValueError, r"batch_sizes: got \[0\], wants positive ints"),
    (dict(batch_sizes="on_demand"), ValueError, "batch_sizes: got 'on_demand', wants positive ints"),
    (dict(example_input=None, batch_sizes=[2]), TypeError, "example_input: got NoneType, wants"),
    (dict(example_input=torch.zeros(2, 3, 16, 16, device="meta")), ValueError, "example_input: on meta"),
]


def test_arguments_that_do_not_fit(monkeypatch):
    monkeypatch.setattr(front, "make_trunk", lambda *_: pytest.fail("something was made"))
    good = dict(network=pipeline_ranks.plain(), example_input=example(), devices=["cpu", "cpu"])
    for changes, error, message in ARGUMENTS:
        arguments = good | changes
        network, x = arguments.pop("network"), arguments.pop("example_input")
        with pytest.raises(error, match=message):
            parallelize(network, x, **arguments)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_the_slowest_stage_is_as_fast_as_it_can_be(stages):
    loads = [3.0, 1.0, 4.0, 1.0, 5.0]

    def slowest(starts):
        return max(sum(loads[start:end]) for start, end in zip(starts, [*starts[1:], 5], strict=True))

    starts = balanced(loads, stages)
    assert len(starts) == stages and starts[0] == 0 and starts == sorted(set(starts))
    assert slowest(starts) == min(slowest([0, *cuts]) for cuts in combinations(range(1, 5), stages - 1))
