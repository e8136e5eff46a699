"""Answers of graph runners, with streams and graphs simulated and kernels interpreted; see test_runners_gpu.py."""

import math

import pytest
import torch
from auxhead.kernels import runs_triton
from auxhead.model import CompactingRunner, EarlyExitNetwork, ExitMonitor, FusedAuxHead, make_runner
from auxhead.model.auto.candidates import SharedTrunks
from auxhead.model.auto.pass_times import Deadline, PassTimes
from auxhead.model.auto.planner import Planner
from auxhead.model.runners.graph_runner import GraphRunner
from auxhead.model.runners.table import RUNNERS
from support.example_models import SmallNet
from support.exits_plan_cases import assert_same
from support.simulated_cuda import simulated_cuda
from support.spread_exits import images
from support.spread_exits import network as network_of
from torch import nn

pytestmark = [
    pytest.mark.skipif(not runs_triton(torch.empty(0)), reason="kernels are not interpreted here"),
    pytest.mark.usefixtures("without_interpreter"),  # what the eager runner answers with
]


class HalfStem(nn.Module):
    """Its first convolution has three channels, as pictures have."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        self.fc = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(x).mean((2, 3)))


@pytest.fixture(params=[name for name, kind in RUNNERS.items() if kind.graphs])
def way(request):
    return {"exits": request.param}


@pytest.fixture
def network() -> EarlyExitNetwork:
    return network_of()


def test_a_runner_says_what_it_captured(network, way):
    with simulated_cuda():
        runner = make_runner(network, images(1), batch_sizes=(1, 2), **way)
        said = runner.describe()
    assert "The backbone runs as it is." in said and said.count("Batch ") == 2
    assert {"overlapped": "beside the trunk after block", "polled": "4 graphs, cut after block0, block1, block2."}.get(
        way["exits"], "gated after block0, block1, block2."
    ) in said


@pytest.mark.parametrize(
    ("forks", "said"),
    [
        ((), "beside the trunk after no tap; with the classifier those of block0, block1, block2."),
        (("block0",), "beside the trunk after block0; with the classifier those of block1, block2."),
        (("block2", "block0"), "beside the trunk after block0, block2."),
        (SmallNet.taps, "beside the trunk after block0, block1, block2."),
    ],
    ids=str,
)
def test_heads_leave_the_trunk_where_they_are_told_to(network, forks, said):
    x = images(3)
    with simulated_cuda():
        runner = make_runner(network, x, batch_sizes=(3,), forks=forks, exits="overlapped")
        assert said in runner.describe()
        assert runner.forks == {3: tuple(tap for tap in SmallNet.taps if tap in forks)}
        found = runner(x)
    assert_same(found, make_runner(network, x, exits="eager")(x))


@pytest.mark.parametrize("exits", ["polled", "gated"])
@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ((0.0, 0.0, 0.0, 1.0), {"polled": "1 graph, cut after no tap.", "gated": "gated after no tap."}),
        ((0.0, 0.9, 0.0, 0.1), {"polled": "3 graphs, cut after block1, block2.", "gated": "gated after block1."}),
        (
            (0.5, 0.5, 0.0, 0.0),
            {"polled": "4 graphs, cut after block0, block1, block2.", "gated": "after block0, block1."},
        ),
    ],
    ids=["nobody", "one", "two"],
)
def test_who_can_stop_does_so_where_calibration_has_samples_leave(network, monkeypatch, exits, shares, said):
    """Each segment of the simulated GPU takes 100 us. Whatever is expected, answers are those of the rules."""
    monkeypatch.setattr(GraphRunner, "_segment_times", lambda *_: [100.0] * 4)
    network.monitor = ExitMonitor(shares, 100)
    x, wanted = images(1), []
    for threshold in (0.0, 0.5, 1.0):
        network.set_rules(threshold)
        wanted.append(network(x))
    with simulated_cuda():
        runner = make_runner(network, x, exits=exits)
        assert said[exits] in runner.describe()
        for threshold, one in zip((0.0, 0.5, 1.0), wanted, strict=True):
            network.set_rules(threshold)
            assert_same(runner(x), one)


@pytest.mark.parametrize("trunk", ["as_is", "auto"])
def test_the_planner_can_make_every_candidate_and_each_answers_as_the_plain_graph(network, monkeypatch, trunk):
    def measure(runners, _batches, _deadline):
        times = {name: [len(runners) - index] * 8 for index, name in enumerate(runners)}
        return {name: PassTimes(us, us) for name, us in times.items()}

    monkeypatch.setattr("auxhead.model.auto.planner.measure", measure)
    x = images(2)
    with simulated_cuda():
        planner = Planner(network, x, 2, SharedTrunks(network, x, trunk, {}), Deadline("quick", 600.0, math.inf), print)
        leave = torch.zeros(1, 2, dtype=torch.int64)  # all at the first exit, so that no runner is needless
        plan, runner = planner.plan([x], leave, smaller=(1,), parts=1)
        found = runner(x)
    names = [
        "serial", "overlapped (1 fork)", "overlapped (2 forks)", "overlapped (3 forks)",
        "polled", "gated", "polled (compact)",
    ]  # fmt: skip
    if trunk == "auto":  # the later a runner is measured here, the faster it is
        assert list(plan.times) == [plan.plain, *(f"{name} on cudnn" for name in names)]
        assert plan.chosen.name == "polled (compact) on cudnn" and list(plan.trunk_times) == ["as_is", "cudnn"]
    else:
        assert list(plan.times) == names and plan.chosen.name == "polled (compact)"
    assert plan.left_out.keys() == ({"trunk inductor"} if trunk == "auto" else set())
    assert isinstance(runner, CompactingRunner)
    assert_same(found, make_runner(network, x, exits="eager", trunk=plan.chosen.trunk)(x))


@pytest.mark.parametrize("call", ["close", "refresh", "__call__"])
def test_nothing_is_done_within_a_call_of_the_same_thread(network, call):
    """By a handler of signals, say: it would wait for itself, or free what the call still uses."""
    with simulated_cuda():
        runner = make_runner(network, images(1), exits="overlapped", batch_sizes=(1,))
        ((_, captured),) = runner._captured.items()

        def launch(*_):
            with pytest.raises(RuntimeError, match="^this runner is in"):
                getattr(runner, call)(*[images(1)] * (call == "__call__"))

        captured.graphs = [type("Nothing", (), {"launch": launch})()]
        runner(images(1))
        runner.close()


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_classifier_whose_parameters_are_lazily_negated_stays_in_the_trunk(network, name):
    linear = network.backbone.fc
    setattr(linear, name, torch.nn.Parameter(torch._neg_view(-getattr(linear, name).detach())))
    network.set_rules(1.0)
    x = images(2)
    with simulated_cuda():
        found = make_runner(network, x, batch_sizes=(2,), trunk="cudnn", exits="overlapped")(x)
    assert_same(found, network(x))


@pytest.mark.parametrize("exits", [name for name, kind in RUNNERS.items() if kind.graphs])
def test_what_lies_beside_a_batch_in_its_memory_is_not_read(exits):
    """Graphs read three channels of half precision in four; those of a request may have anything in the fourth."""
    backbone, x = HalfStem().eval(), images(3).half()
    network = EarlyExitNetwork(backbone, {"body": FusedAuxHead(4, 5)}, 0.4).half().eval()
    wanted = make_runner(network, x, exits="eager", trunk="cudnn")(x)
    beside = torch.full((3, 4, *x.shape[2:]), float("nan"), dtype=torch.float16)
    beside = beside.contiguous(memory_format=torch.channels_last)
    beside[:, :3] = x
    with simulated_cuda():
        runner = make_runner(network, x, exits=exits, trunk="cudnn", batch_sizes=(2, 4))
        assert "Graphs read batches in 4 channels" in runner.describe()
        for given in (x, beside[:, :3], x.contiguous(memory_format=torch.channels_last)):
            for samples in (3, 1):
                found = runner(given[:samples])
                assert torch.equal(found.label, wanted.label[:samples])
                torch.testing.assert_close(found.confidence, wanted.confidence[:samples], atol=2e-3, rtol=0.0)
