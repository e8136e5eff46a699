"""``exits="auto"`` on a GPU: every candidate is made, checked and measured, one answers, and a file keeps the plan."""

import threading
from pathlib import Path

import pytest
import torch
from auxhead.model import EagerRunner, make_runner, make_trunk
from support.command_line import tune
from support.example_models import SmallNet, needs_gpu
from support.graph_runner_cases import assert_same, clear_batches, exits_at, images, network

pytestmark = [*needs_gpu, pytest.mark.usefixtures("repeatable", "stops_at_every_tap")]


@pytest.mark.parametrize("trunk", ["as_is", "cudnn"])
def test_a_plan_is_measured_and_kept(trunk: str, tmp_path: Path) -> None:
    net = network()
    eager_trunk = make_trunk(net.backbone, net.taps, images(2), trunk)
    eager = EagerRunner(net, trunk=eager_trunk)
    example, *batches = clear_batches(net, [64, 8, 1, 5, 17], eager_trunk)
    options = {"exits": "auto", "batch_sizes": (2, 8), "trunk": trunk, "plan": tmp_path / "plan.json"}
    found = []
    for from_file in (False, True):
        with make_runner(net, example, **options) as runner:
            for x in batches:
                assert_same(runner(x), eager(x))
            found.append(runner.plans)
            assert runner.describe().count("measured on 20") == 2 * from_file
            assert all(plan.from_file == from_file for plan in runner.plans.values())
    first, second = found
    assert not first[2].left_out and not first[8].left_out, first
    assert {"serial", "overlapped (1 fork)", "polled", "gated"} <= set(first[2].times)
    assert "polled (compact)" in first[8].times and "polled (compact)" not in first[2].times
    assert [plan.chosen for plan in first.values()] == [plan.chosen for plan in second.values()]
    assert all(0 < us < 1e5 for times in first[8].times.values() for us in (*times.host, *times.device))


def test_a_plan_is_measured_while_another_thread_captures() -> None:
    """And its capture is not broken, though it forbids all threads to wait for the device."""
    net, example = network(), images(8)
    make_runner(net, example, exits="auto").close()  # all kernels are loaded
    graph, y = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    begun, ended, errors = threading.Event(), threading.Event(), []

    def capture() -> None:
        try:
            with torch.cuda.graph(graph, capture_error_mode="global"):
                y.add_(1)
                begun.set()
                ended.wait(60)
                y.add_(1)
        except Exception as error:
            errors.append(error)
            begun.set()

    thread = threading.Thread(target=capture)
    thread.start()
    begun.wait(20)
    try:
        with make_runner(net, example, exits="auto") as runner:
            assert not runner.plans[1].left_out
    finally:
        ended.set()
        thread.join()
    assert not errors, errors
    graph.replay()
    torch.cuda.synchronize()
    assert (y == 2).all()


def test_other_rules_are_measured_anew(tmp_path: Path) -> None:
    net, example = network(), images(16)
    for index in (0, 3):
        with exits_at(net, index), make_runner(net, example, exits="auto", plan=tmp_path / "plan.json") as runner:
            assert not runner.plans[1].from_file and runner.plans[1].shares[index] == 1.0
            assert runner(example[:1]).exit_index.item() == index
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("forks", [(), ("block1",), SmallNet.taps], ids=str)
@pytest.mark.parametrize("trunk", ["as_is", "cudnn"])
def test_heads_answer_wherever_they_leave_the_trunk(forks: tuple[str, ...], trunk: str) -> None:
    net = network()
    eager_trunk = make_trunk(net.backbone, net.taps, images(2), trunk)
    with make_runner(net, images(2), batch_sizes=(1, 8), trunk=trunk, forks=forks) as runner:
        assert runner.forks == {1: forks, 8: forks}
        for x in clear_batches(net, [8, 1, 5, 17], eager_trunk):
            assert_same(runner(x), EagerRunner(net, trunk=eager_trunk)(x))


FACTORY = """
import torch
from support.graph_runner_cases import images, network

def factory():
    torch.manual_seed(1)
    return network(), images(16)
"""


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "network_to_plan.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = ["plan", "network_to_plan:factory", "--batch", "1", "--batch", "4", "--plan", "plan.json"]
    first, second = (tune(*arguments) for _ in range(2))
    assert first.exit_code == 0, first.output
    assert first.stdout.count("Measured now.") == 2 and first.stdout.count("chosen") == 2
    assert second.exit_code == 0 and second.stdout.count("From the plan file, measured at 20") == 2, second.output
