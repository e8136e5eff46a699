"""Networks split over CPUs: placement, order, copies and answers; and arguments that do not fit."""

import copy

import pytest
import torch
from auxhead.model import EarlyExitNetwork, ExitMonitor, SplitRunner, parallelize
from auxhead.model.parallel.split import parallelize as front
from auxhead.model.parallel.split import runner as split_runner
from support import pipeline_ranks
from support.example_models import SmallNet, plain_heads
from support.head_plan_cases import Adapter

pytestmark = pytest.mark.usefixtures("without_interpreter")


def example():
    return pipeline_ranks.batch_of("plain", 16)


def assert_same(found, wanted):
    assert torch.equal(found.label, wanted.label) and torch.equal(found.exit_index, wanted.exit_index)
    torch.testing.assert_close(found.confidence, wanted.confidence, equal_nan=True)
    torch.testing.assert_close(found.probs, wanted.probs)


@pytest.mark.parametrize(
    "name, balance, exits",
    [("plain", ["0", "3"], "polled"), ("plain", "auto", "overlapped"), ("skipping", "auto", "polled"),
     ("skipping", "auto", "overlapped")],
    ids=str,
)  # fmt: skip
def test_answers_are_the_networks(name, balance, exits):
    """Of 1 to 130 samples, padded and split, whoever leaves where, by which rules."""
    network = getattr(pipeline_ranks, name)()
    network.monitor = ExitMonitor([1 / (len(network.taps) + 1)] * (len(network.taps) + 1), 100)
    counted = torch.zeros(len(network.taps) + 1, dtype=torch.int64)
    x = pipeline_ranks.batch_of(name, 16)
    runner = parallelize(network, x, devices=["cpu"] * 3, balance=balance, exits=exits, batch_sizes=[4, 16])
    for x in pipeline_ranks.requests(name, network, pipeline_ranks.SOME):
        before = network.monitor.counts()
        found = runner(x)
        counted += network.monitor.counts() - before
        with network.monitor.paused():
            wanted = network(x)
        assert_same(found, wanted)
        counted -= wanted.exit_index.bincount(minlength=len(counted))
    assert counted.eq(0).all()


def test_parts_follow_each_other_and_what_they_take_is_copied(monkeypatch):
    network, ran = pipeline_ranks.plain(), []
    runner = parallelize(network, example(), devices=["cpu", "cpu", "cpu"], balance=["0", "3"], batch_sizes=[2])
    assert isinstance(runner, SplitRunner) and runner.devices == (torch.device("cpu"),) * 3
    copied_to = split_runner._copied_to

    def copied(device, x):
        ran.append(tuple(x.shape[1:]))
        return copied_to(device, x)

    monkeypatch.setattr(split_runner, "_copied_to", copied)
    runner(example()[:2])
    assert ran == [(3, 16, 16), (8, 8, 8), (16, 2, 2)]
    assert copied_to(torch.device("cpu"), x := example()).data_ptr() != x.data_ptr()


def test_polled_goes_no_further_than_it_needs(monkeypatch):
    """Nor to the next device; padding is never waited for."""
    network, ran = pipeline_ranks.plain(), []
    copied_to = split_runner._copied_to
    monkeypatch.setattr(split_runner, "_copied_to", lambda device, x: (ran.append(0), copied_to(device, x))[1])
    runner = parallelize(
        network, example(), devices=["cpu"] * 4, balance=["0", "2", "3"], exits="polled", batch_sizes=[4]
    )
    for index in range(4):
        network.set_rules({tap: 0.0 if place == index else 1.0 for place, tap in enumerate(network.taps)})
        ran.clear()
        assert runner(example()[:3]).exit_index.eq(index).all()
        assert len(ran) == index + 1


def test_auto_balances_measured_times(monkeypatch):
    monkeypatch.setattr(front, "eager_times", lambda *_: [1.0, 1.0, 1.0, 4.0])
    runner = parallelize(pipeline_ranks.plain(), example(), devices=["cpu", "cpu"], batch_sizes=[8])
    assert runner.describe().splitlines() == [
        "On CPUs the parts run eagerly, without graphs.",
        "Part 0 on cpu, from the input: 0.003 ms a batch of 8.",
        "Part 1 on cpu, behind 3: 0.004 ms a batch of 8.",
        "The backbone runs as it is.",
    ]


def test_folded_weights_are_taken_over_by_a_refresh():
    network = pipeline_ranks.normed()
    runner = parallelize(network, example(), devices=["cpu", "cpu"], trunk="cudnn", batch_sizes=[4, 8])
    assert "1 batch norm" in runner.describe()
    for refreshed in (False, True):
        with torch.no_grad():
            network.backbone[0][1].weight.mul_(1.5)
        if refreshed:
            runner.refresh()
        for samples in (3, 8):
            found, wanted = runner(example()[:samples]), network(example()[:samples])
            assert torch.allclose(found.probs, wanted.probs, rtol=1e-3, atol=1e-5) == refreshed


def test_parameters_changed_in_place_need_no_refresh_where_they_are_shared():
    network = pipeline_ranks.plain()
    runner = parallelize(network, example(), devices=["cpu", "cpu"])
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(0.9)
    network.set_rules(0.3)
    runner.refresh()
    assert_same(runner(example()), network(example()))


def test_heads_that_were_changed_are_refused_until_they_are_as_they_were():
    network = pipeline_ranks.plain()
    runner = parallelize(network, example(), devices=["cpu", "cpu"])
    wanted, head, linear = runner(example()), network.heads[0], network.heads[0].linear
    network.heads[0] = copy.deepcopy(head)
    with pytest.raises(RuntimeError, match=r"^heads\['0'\] was replaced by another object since the runner was made"):
        runner(example())
    network.heads[0] = head
    head.linear = Adapter(linear)
    with pytest.raises(RuntimeError, match=r"^heads\['0'\]: its linear was replaced by another object"):
        runner(example())
    head.linear = linear
    assert_same(runner(example()), wanted)


def test_closed_and_copied():
    with parallelize(pipeline_ranks.plain(), example(), devices=["cpu", "cpu"]) as runner:
        assert copy.copy(runner) is runner
        with pytest.raises(TypeError, match="holds graphs of this process"):
            copy.deepcopy(runner)
    runner.close()
    for use in (lambda: runner(example()), runner.describe, runner.refresh):
        with pytest.raises(RuntimeError, match="this runner is closed"):
            use()


ARGUMENTS = [
    (dict(network=torch.nn.Linear(1, 1)), TypeError, "network: got Linear, wants an EarlyExitNetwork"),
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


def test_a_network_in_training_and_autocast():
    network = pipeline_ranks.plain().train()
    with pytest.raises(ValueError, match="network: in training mode"):
        parallelize(network, example(), devices=["cpu", "cpu"])
    network.eval()
    with torch.autocast("cpu"), pytest.raises(RuntimeError, match="parallelize: called under autocast"):
        parallelize(network, example(), devices=["cpu", "cpu"])


def test_requests_that_do_not_fit_run_nothing(monkeypatch):
    runner = parallelize(EarlyExitNetwork(SmallNet(), plain_heads()).eval(), torch.zeros(2, 3, 8, 8), devices=["cpu"])
    monkeypatch.setattr(split_runner, "_copied_to", lambda *_: pytest.fail("something ran"))
    for x, error, message in [
        (torch.zeros(2, 3, 8, 9), ValueError, r"x: got shape \[2, 3, 8, 9\], wants \[N, 3, 8, 8\]"),
        (torch.zeros(0, 3, 8, 8), ValueError, "N >= 1"),
        (torch.zeros(2, 3, 8, 8).double(), TypeError, "x: got torch.float64, wants torch.float32"),
        (torch.zeros(2, 3, 8, 8, device="meta"), ValueError, "x: got device meta, wants cpu"),
        ([1.0], TypeError, "x: got list, wants a torch.Tensor"),
    ]:
        with pytest.raises(error, match=message):
            runner(x)
