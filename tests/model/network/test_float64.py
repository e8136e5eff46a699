"""A network in float64 on the CPU: answers, runners, training, calibration and checkpoints are float64 throughout."""

import copy
from pathlib import Path

import pytest
import torch
from auxhead.kernels import fused_head
from auxhead.model import (
    EarlyExitNetwork,
    ExitMonitor,
    FusedAuxHead,
    TrainingPlan,
    accuracy_of_exits,
    attach,
    attach_exits,
    calibrate_network,
    load_checkpoint,
    make_runner,
    save_checkpoint,
    train,
)
from support.example_models import SmallNet, plain_head, plain_heads
from support.trainable import Blocks, digits, trainable
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

X = torch.randn(7, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def network() -> EarlyExitNetwork:
    """Two samples or three leave at each head."""
    torch.manual_seed(0)
    net = EarlyExitNetwork(SmallNet(), plain_heads()).double().eval()
    with torch.no_grad():
        sure = [logits.softmax(1).amax(1).sort().values for logits in net.logits(X)]
    net.set_rules({tap: float((one[4] + one[5]) / 2) for tap, one in zip(net.taps, sure, strict=False)})
    return net


def by_hand(net: EarlyExitNetwork, x: Tensor) -> tuple[list[int], Tensor]:
    """Exits of the samples, and their probabilities."""
    exits, probs = [], []
    for said in zip(*(logits.softmax(1) for logits in net.logits(x)), strict=True):
        place = next((i for i, one in enumerate(said[:-1]) if one.max() > net.fused_heads[i].rule.threshold_tensor), 3)
        exits.append(place)
        probs.append(said[place])
    return exits, torch.stack(probs)


@pytest.mark.parametrize("stop", [False, True])
@torch.no_grad()
def test_answers_are_those_of_plain_pytorch(stop: bool) -> None:
    net = network()
    exits, probs = by_hand(net, X)
    assert len(set(exits)) > 2
    net.monitor = ExitMonitor([0.25] * 4, samples=100)
    for _ in range(2):  # by a plan, too
        result = net(X, stop=stop)
        assert result.exit_index.tolist() == exits
        assert result.probs.dtype == result.confidence.dtype == torch.float64
        torch.testing.assert_close(result.probs, probs, rtol=1e-12, atol=1e-15)
        assert torch.equal(result.confidence, result.probs.amax(1))
    assert net.monitor.counts().tolist() == (2 * torch.bincount(torch.tensor(exits), minlength=4)).tolist()


def test_a_head_answers_differentiably_by_plans_too() -> None:
    head = FusedAuxHead(8, 5, rule=0.3).double()
    x = torch.randn(3, 8, 4, 4, dtype=torch.float64, requires_grad=True)
    wanted = head.logits(x).softmax(1)
    loss = wanted.square().sum()
    gradients = torch.autograd.grad(loss, [x, head.linear.weight])
    for _ in range(2):
        out = head(x)
        torch.testing.assert_close(out.probs, wanted, rtol=1e-12, atol=1e-15)
        found = torch.autograd.grad(out.probs.square().sum(), [x, head.linear.weight])
        torch.testing.assert_close(found, gradients, rtol=1e-11, atol=1e-14)
    head.float()
    assert head(x.detach().float()).probs.dtype == torch.float32


def test_heads_that_are_placed_and_those_that_are_found(without_interpreter: None) -> None:
    placed = attach(SmallNet().double().eval(), example_input=X)
    assert placed(X).probs.dtype == torch.float64

    class InAList(SmallNet):
        def __init__(self) -> None:
            super().__init__()
            self.exit = plain_head(8)

        def forward(self, x: Tensor) -> list[Tensor]:
            y = self.block0(x)
            return [self.exit(y), self.fc(self.block2(self.block1(y)).mean((2, 3)))]

    model = InAList().double().eval()
    found = attach_exits(model, X)
    with torch.no_grad():
        torch.testing.assert_close(found.logits(X), [*model(X)], rtol=1e-12, atol=1e-14)


def test_runners_and_checkpoints(tmp_path: Path) -> None:
    net = network()
    save_checkpoint(tmp_path / "saved", net)
    loaded = load_checkpoint(tmp_path / "saved", SmallNet().double()).network
    with make_runner(net, X) as runner:
        for answer in (runner(X), loaded(X)):
            for one, other in zip(answer, net(X), strict=True):
                assert torch.equal(one, other) and one.dtype == other.dtype


def batches(split: int, size: int = 100) -> list[tuple[Tensor, Tensor]]:
    part = digits()[split]
    pixels = part.pixels.double() / 127.5 - 1.0
    return list(zip(pixels.split(size), part.labels.split(size), strict=True))


def test_training_refuses_what_autocast_would_pass_over() -> None:
    with pytest.raises(TypeError, match="^network: has parameters of torch.float64 .* 'bfloat16', wants torch.float32"):
        train(trainable().double(), batches(0), TrainingPlan(precision="bfloat16"))
    mixed = trainable()
    mixed.heads.double()
    with pytest.raises(TypeError, match="^network: has parameters of torch.float32 and torch.float64"):
        train(mixed, batches(0))


def test_training_and_calibration(without_interpreter: None) -> None:
    net = trainable().double()
    seen, unseen = batches(1)[:2], batches(1)[2:]
    before = accuracy_of_exits(net, seen)
    done = train(net, batches(0), TrainingPlan(epochs=4, learning_rate=2e-2), validation=seen)
    assert {value.dtype for value in net.parameters()} == {torch.float64}
    assert done.epochs[done.best].accuracy == tuple(found := accuracy_of_exits(net, seen))
    assert found[1] > before[1] + 0.2
    report = calibrate_network(net, unseen, max_accuracy_drop=0.2, confidence=0.9)
    assert report.bound.reachable
    narrow = EarlyExitNetwork(
        Blocks(), {tap: copy.deepcopy(head) for tap, head in zip(net.taps, net.heads, strict=True)}
    )
    narrow.load_state_dict(net.state_dict())
    narrow.float().eval()
    images = torch.cat([x for x, _ in batches(1)])
    with torch.no_grad():
        answer, single = net(images), narrow(images.float())
    assert answer.confidence.dtype == torch.float64 and single.confidence.dtype == torch.float32
    assert (answer.exit_index == single.exit_index).double().mean() > 0.99
    assert 0.0 < (answer.exit_index < 2).double().mean() <= 1.0


def test_a_launch_on_a_gpu_is_refused_however_the_network_got_there() -> None:
    """Its taps may have been checked on the CPU."""
    with FakeTensorMode():
        head = FusedAuxHead(8, 5)
        head.linear = nn.Linear(8, 5, device="cuda", dtype=torch.float64)
        with pytest.raises(ValueError, match="^linear.weight: got torch.float64 on cuda.*, wants .* on the CPU alone"):
            head.as_exit_head()
        with pytest.raises(TypeError, match="^x: got torch.float64 on cuda.*, wants .* on the CPU alone"):
            fused_head(torch.empty(2, 8, 3, 3, dtype=torch.float64, device="cuda"), head.linear.weight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("exits", ["eager", "overlapped"])
def test_a_network_that_moves_to_a_gpu_is_refused_there(exits: str) -> None:
    net = network()
    net(X)
    net.cuda()
    with pytest.raises((ValueError, TypeError), match="torch.float64 .* wants .* on the CPU alone"):
        make_runner(net, X.cuda(), exits=exits)(X.cuda())
