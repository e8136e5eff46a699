"""The eager runner on the CPU: errors, detours and threads; test_eager_gpu.py has its streams."""

import copy
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from auxhead.model import EarlyExitNetwork, ExitResult, make_runner
from support.example_models import SmallNet, plain_heads
from support.exits_plan_cases import assert_same
from torch import Tensor


def images(samples: int) -> Tensor:
    return torch.randn(samples, 3, 8, 8)


def network(rules: object, **options: object) -> EarlyExitNetwork:
    return EarlyExitNetwork(SmallNet(), plain_heads(), rules, **options).eval()


def test_heads_see_what_the_owners_hooks_make_of_a_layer() -> None:
    net, x = network(0.0), images(2)
    net.backbone.block0.register_forward_hook(lambda module, inputs, output: output * 2)
    with torch.no_grad():
        wanted = net.heads[0](net.backbone.block0(x))
    assert torch.equal(net(x).probs, wanted.probs)


def test_a_network_within_a_network() -> None:
    """Runs of two networks in one thread, one inside the other's forward, do not hear each other's taps."""
    net, x = network(0.0), images(2)
    inner = network(0.0)
    wanted = net(x)
    net.backbone.block1.register_forward_pre_hook(lambda *_: inner(x, stop=True) and None)
    assert all(torch.equal(a, b) for a, b in zip(net(x), wanted, strict=True))
    assert not any(part._forward_hooks for part in [*net.modules(), *inner.modules()])


@pytest.mark.parametrize("trunk", ["as_is", "cudnn"])
def test_on_a_cpu_a_runner_stops_once_all_samples_are_sure(trunk: str) -> None:
    """And says the same as the whole network; who wants that run asks for it, and where samples stay open it is."""
    net, x, ran = network({"block0": 0.0, "block1": 1.0, "block2": 1.0}), images(3), []
    runner = make_runner(net, x, exits="eager", trunk=trunk)
    wanted = net(x)
    runner.trunk.module.get_submodule("block1").register_forward_hook(lambda *_: ran.append("block1"))
    assert_same(runner(x), wanted)
    assert ran == []
    assert_same(runner(x, stop=False), wanted)
    assert ran == ["block1"]
    net.set_rules(1.0)
    assert_same(runner(x), net(x))
    assert "block1" in ran[1:]
    measured = make_runner(net, x)
    assert "A batch leaves it as soon as all samples are sure." in measured.describe()


class Detour(SmallNet):
    """Runs its blocks as it is told to, as data-dependent and layer-dropping networks do."""

    route = SmallNet.taps

    def forward(self, x: Tensor) -> Tensor:
        for name in SmallNet.taps:
            block = self.get_submodule(name)
            for _ in range(self.route.count(name) - 1):
                block(x)
            x = block(x) if name in self.route else block[2](block[1](block[0](x)))
        return self.fc(x.mean((2, 3)))


@pytest.mark.parametrize(
    "route", [("block1", "block2"), ("block0", "block0", "block1", "block2")], ids=["skip", "twice"]
)
@pytest.mark.parametrize("method", ["forward", "logits"])
def test_a_forward_that_takes_another_way_than_the_dry_run_is_no_silent_answer(route: tuple, method: str) -> None:
    net = EarlyExitNetwork(Detour(), {tap: copy.deepcopy(h) for tap, h in plain_heads().items()}, 1.0)
    net.eval().check_taps(images(1))
    net.heads[2].rule.threshold = 0.0
    net.backbone.route = route
    with pytest.raises((ValueError, RuntimeError), match="block0"):
        getattr(net, method)(images(2))


@pytest.fixture(params=[False, True], ids=["checked", "first run"])
def threaded(request: pytest.FixtureRequest) -> EarlyExitNetwork:
    """A network whose forwards wait for each other, so that two of them overlap."""
    meeting = threading.Barrier(2)

    def meet(*_: object) -> None:
        try:
            meeting.wait(timeout=1)
        except threading.BrokenBarrierError:  # one at a time: as good
            meeting.reset()

    net = network({"block0": 0.8, "block1": 0.8, "block2": 0.8})
    if not request.param:
        net.check_taps(images(1))
    net.backbone.block0.register_forward_hook(meet)
    return net


def test_two_threads_run_one_network_at_once(threaded: EarlyExitNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    # Triton's interpreter, unlike the reference, holds the grid in a global
    monkeypatch.setattr(sys.modules["auxhead.kernels.fused_head"], "runs_triton", lambda x: False)
    threaded.backbone.fc.train()  # a flag that must survive
    batches = [images(3), images(5)]
    twin = copy.deepcopy(threaded)
    twin.backbone.block0._forward_hooks.clear()
    wanted = [twin(x) for x in batches]
    found: dict[int, object] = {}

    def run(i: int) -> None:
        try:
            found[i] = threaded(batches[i])
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        assert isinstance(found[i], ExitResult), found[i]
        assert all(torch.equal(a, b) for a, b in zip(found[i], wanted[i], strict=True))
    assert threaded.backbone.fc.training and not threaded.backbone.block1.training


DAEMON = """
import threading, torch
from auxhead.model import EarlyExitNetwork, make_runner
from support.example_models import SmallNet, plain_heads

x = torch.randn(64, 3, 32, 32)
runner = make_runner(EarlyExitNetwork(SmallNet(), plain_heads(), 0.5).eval(), x)
asked = threading.Event()

def ask(*, for_ever):
    while True:
        runner(x).label.sum().item()
        asked.set()
        if not for_ever:
            return threading.Event().wait()

for for_ever in (True, True, False):
    threading.Thread(target=ask, kwargs={"for_ever": for_ever}, daemon=True).start()
asked.wait()
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_lifetimes_gpu.py does more")
def test_a_process_that_leaves_a_daemon_ends_without_a_word() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", DAEMON], capture_output=True, text=True, timeout=300, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
