"""``exits="auto"`` on a GPU: every candidate is made, checked and measured, one answers, and a file keeps the plan."""

import gc
import re
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from auxhead.model import AutoRunner, EagerRunner, ExitResult, make_runner, make_trunk
from auxhead.model.auto.plan import Plan
from auxhead.model.basics.energy import energy_counter
from support.example_models import SmallNet, needs_gpu
from support.graph_runner_cases import assert_same, captured_elsewhere, clear_batches, images, network
from support.one_by_one import one_by_one
from torch import Tensor

pytestmark = [*needs_gpu, pytest.mark.usefixtures("repeatable", "stops_at_every_tap")]


@pytest.mark.parametrize("trunk", ["as_is", "cudnn"])
def test_a_plan_is_measured_and_kept(trunk: str, tmp_path: Path) -> None:
    net = network()
    eager_trunk = make_trunk(net.backbone, net.taps, images(2), trunk)
    eager = partial(one_by_one, net, trunk=eager_trunk)
    example, *batches = clear_batches(net, [64, 8, 1, 5, 17], eager_trunk)
    example = example[eager(example).exit_index.argsort()]  # some batches leave early, of either size
    # "thorough", and with kernels that are compiled already, so that nothing is left out for lack of time.
    options = {"batch_sizes": (2, 8), "trunk": trunk, "budget": "thorough", "plan": None}
    make_runner(net, example, **options).close()
    options["plan"] = tmp_path / "plan.json"
    found = []
    for from_file in (False, True):
        with make_runner(net, example, **options) as runner:
            for x in batches:
                assert_same(runner(x), eager(x))
            found.append(runner.plans)
            assert runner.describe().count("measured on 20") == 2 * from_file
            assert len(runner.describe().splitlines()) == 6
            assert all(plan.from_file == from_file for plan in runner.plans.values())
    first, second = found
    assert not first[2].left_out and not first[8].left_out, first
    on = "" if trunk == "as_is" else f" on {trunk}"
    assert {f"{name}{on}" for name in ("serial", "overlapped (1 fork)", "polled", "gated")} <= set(first[2].times)
    assert f"polled (compact){on}" in first[8].times and f"polled (compact){on}" not in first[2].times
    assert [plan.chosen for plan in first.values()] == [plan.chosen for plan in second.values()]
    counted = energy_counter(example.device) is not None
    for plan in first.values():
        assert {*plan.joules} == ({plan.chosen.name, plan.plain} if counted else set())
        assert all(0.0 < joules < 10.0 for joules in plan.joules.values()) and (" mJ " in plan.reason()) == counted
    assert second[8].joules == first[8].joules
    assert all(0 < us < 1e5 for times in first[8].times.values() for us in (*times.host, *times.device))


def test_a_plan_is_measured_while_another_thread_captures() -> None:
    """And its capture is not broken, though it forbids all threads to wait for the device."""
    net, example = network(), images(8)
    options = {"batch_sizes": (1,), "trunk": "as_is", "budget": "thorough", "plan": None}
    make_runner(net, example, **options).close()  # all kernels are loaded
    y = torch.zeros(8, device="cuda")
    with captured_elsewhere(lambda: y.add_(1)), make_runner(net, example, **options) as runner:
        assert not runner.plans[1].left_out
    assert (y == 2).all()


def eager_on_the_trunk_of(runner: AutoRunner, size: int) -> Callable[[Tensor], ExitResult]:
    return partial(one_by_one, runner.network, trunk=runner.runners[size].trunk)


def assert_never_slower(plan: Plan) -> None:
    us = {name: statistics.median(times.host) for name, times in plan.times.items()}
    assert us[plan.chosen.name] <= us[plan.plain], plan.describe()
    assert plan.chosen.trunk in (plan.trunk_times or ["as_is"])


def test_without_options() -> None:
    net, example = network(), images(8)
    with make_runner(net, example) as runner:
        assert isinstance(runner, AutoRunner)
        (plan,) = runner.plans.values()
        assert list(runner.plans) == [8] and not plan.from_file
        assert plan.plain in plan.times and "polled" not in plan.plain and " on " not in plan.plain
        assert_never_slower(plan)
        assert len(runner.describe().splitlines()) == 3
        eager = eager_on_the_trunk_of(runner, 8)
        for x in clear_batches(net, [8, 1, 5, 17], runner.runners[8].trunk):
            # on the trunk "inductor" another size is compiled for itself, and rounded otherwise
            assert_same(runner(x), eager(x), 1e-2)
            assert_same(runner(x.cpu()), eager(x), 1e-2)
    with make_runner(net, example) as again:
        assert again.plans[8].from_file and again.plans[8].chosen == plan.chosen


def test_every_trunk_is_measured_within_the_large_budget() -> None:
    net = network()
    with make_runner(net, images(8), budget="thorough", plan=None) as runner:
        plan = runner.plans[8]
        # Inductor may be refused, but for a reason of its own: on this network it takes a few seconds.
        assert {"as_is", "cudnn"} <= plan.trunk_times.keys()
        assert ("inductor" in plan.trunk_times) != ("trunk inductor" in plan.left_out)
        assert "budget" not in plan.left_out.get("trunk inductor", "")
        assert_never_slower(plan)
        for x in clear_batches(net, [8, 3], runner.runners[8].trunk):
            assert_same(runner(x), eager_on_the_trunk_of(runner, 8)(x), 1e-2)


def test_sizes_on_demand(tmp_path: Path) -> None:
    net = network()
    options = {"batch_sizes": "on_demand", "plan": tmp_path / "plan.json"}
    example = images(8)
    with make_runner(net, example, **options) as runner:
        assert list(runner.plans) == [8]
        for samples in (3, 16, 3, 8, 16):
            with torch.autocast("cuda"):  # which was not captured, and is not for what is added
                runner(images(samples))
            for x in clear_batches(net, [samples], runner.runners[samples].trunk):
                assert_same(runner(x), eager_on_the_trunk_of(runner, samples)(x), 1e-2)
        assert list(runner.plans) == [8, 3, 16] and len(runner.describe().splitlines()) == 9
        chosen = {size: plan.chosen for size, plan in runner.plans.items()}
        for plan in runner.plans.values():
            assert_never_slower(plan)
    with make_runner(net, example, **options) as runner:
        for samples in (3, 16):
            runner(images(samples))
        assert all(plan.from_file for plan in runner.plans.values())
        assert {size: plan.chosen for size, plan in runner.plans.items()} == chosen


def test_runners_that_were_not_chosen_hold_no_memory() -> None:
    net, example = network(), images(8)
    for _ in range(2):  # the first compiles, and makes fewer runners in its time
        make_runner(net, example, budget="quick", plan=None).close()  # kernels, workspaces and what cuDNN keeps
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with make_runner(net, example, budget="quick", plan=None) as runner:
        kind, chosen = type(runner.runners[8]), runner.plans[8].chosen
        gc.collect()
        held = torch.cuda.memory_allocated() - before
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
    options = {"forks": chosen.forks} if chosen.exits == "overlapped" else {}
    with kind(net, example, batch_sizes=(8,), trunk=chosen.trunk, **options):
        gc.collect()
        alone = torch.cuda.memory_allocated() - before
    assert held <= alone * 1.1 + (1 << 20), (held, alone, chosen)


class Waits(SmallNet):
    def forward(self, x: Tensor) -> Tensor:
        y = self.block2(self.block1(self.block0(x)))
        if y.sum().item() > 1e30:
            return self.fc(y.amax((2, 3)))
        return self.fc(y.mean((2, 3)))


class CopiesFromTheHost(SmallNet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.tensor([1.0, 2.0, 3.0])[:, None, None].to(x.device, x.dtype))


class JoinsLater(SmallNet):
    """Computes on a stream beside the one that a tap is on."""

    def forward(self, x: Tensor) -> Tensor:
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        y = self.block0(x)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            scale = 1.0 + 0.0 * y.mean()
        y = self.block1(y)
        main.wait_stream(side)
        y = self.block2(y * scale)
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return self.fc(y.mean((2, 3)))


@pytest.mark.parametrize("backbone", [Waits, CopiesFromTheHost, JoinsLater])
def test_what_cannot_be_captured_runs_eagerly_and_is_named(backbone: type[SmallNet]) -> None:
    net, x = network(backbone=backbone()), images(8)
    with make_runner(net, x) as runner:
        assert isinstance(runner, EagerRunner)
        assert re.match("Eager: backbone: .* cannot be captured", runner.describe())
        assert runner(x).label.equal(net(x).label)
    with pytest.raises(RuntimeError, match="cannot be captured"):
        make_runner(net, x, exits="polled")
    assert not torch.cuda.is_current_stream_capturing()
