"""attach_exits and accelerate on a GPU: every runner and trunk answers as the model does, and the report says so."""

from itertools import cycle

import pytest
import torch
from auxhead.model import EarlyExitNetwork, accelerate, attach_exits, make_runner
from support.example_models import SmallNet, plain_heads
from support.multi_exit_models import STYLES, InAList
from torch import Tensor, nn

pytestmark = pytest.mark.gpu
BY_ATTRIBUTE = ("a dataclass", "log-softmax", "a last exit that is a convolution")


@pytest.fixture(autouse=True)
def _seed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # trunks round otherwise than the model there


def on_gpu(style: str) -> nn.Module:
    model = STYLES[style][0]().eval().cuda()
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, nn.Linear):
                part.weight.mul_(20.0)
    return model


def images(samples: int) -> Tensor:
    return torch.randn(samples, 3, 16, 16, device="cuda")


def said(model: nn.Module, style: str, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        answers = model(x)
    picked = [getattr(answers, p) if style in BY_ATTRIBUTE else answers[p] for p in STYLES[style][2]]
    return [y if style in ("softmax layers", "functions") else y.softmax(1) for y in picked]


WAYS = [(trunk, exits) for trunk in ("as_is", "cudnn") for exits in ("overlapped", "polled", "gated")]


@pytest.mark.parametrize(("style", "way"), list(zip(STYLES, cycle(WAYS), strict=False)))
def test_runners_answer_as_the_model(style: str, way: tuple[str, str]) -> None:
    trunk, exits = way
    model, x = on_gpu(style), images(4)
    wanted = said(model, style, x)
    network = attach_exits(model, x)
    with make_runner(network, x, exits=exits, batch_sizes=(4,), trunk=trunk) as runner:
        for place, theirs in enumerate(wanted):
            network.set_rules({tap: float(index != place) for index, tap in enumerate(network.taps)})
            for _ in range(2):
                answer = runner(x)
                assert answer.exit_index.tolist() == [place] * 4
                torch.testing.assert_close(answer.probs, theirs, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(said(model, style, x), wanted, atol=0.0, rtol=0.0)


def test_inductor_takes_a_model_without_its_heads() -> None:
    model, x = on_gpu("hidden layers"), images(4)
    network = attach_exits(model, x, rules=1.0)
    with make_runner(network, x, exits="overlapped", batch_sizes=(4,), trunk="inductor") as runner:
        torch.testing.assert_close(runner(x).probs, said(model, "hidden layers", x)[-1], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("style", ["heads in a list", "functions", "features that branch", "tokens", "hidden layers"])
def test_one_line(style: str) -> None:
    model, x = on_gpu(style), images(8)
    with accelerate(model, x, rules=0.5) as fast:
        answer = fast(x)
        probs = said(model, style, x)
        for row, place in enumerate(answer.exit_index.tolist()):
            confidence = [float(p[row].max()) for p in probs[:-1]]
            if min((abs(c - 0.5) for c in confidence), default=1.0) > 1e-2:
                assert place == [*(c > 0.5 for c in confidence), True].index(True)
                assert answer.label[row] == probs[place][row].argmax()
        assert torch.cuda.get_device_name() in fast.report and "of the 8 samples are what the rules" in fast.report


def test_half_precision() -> None:
    model, x = InAList().eval().cuda().half(), images(4).half()
    with accelerate(model, x, rules=0.5) as fast:
        assert fast(x).label.shape == (4,)


def test_a_network_that_has_its_heads() -> None:
    network = EarlyExitNetwork(SmallNet(), plain_heads(), rules=0.6).eval().cuda()
    x = images(8)
    with accelerate(network, x) as fast:
        assert torch.equal(fast(x).exit_index, network(x).exit_index)


def test_without_heads_a_captured_model_is_no_slower_for_those_taken_out() -> None:
    """Nothing of a silent head is launched: the backbone's kernels are those of the model without its heads."""
    model, x = on_gpu("heads in a list"), images(4)
    backbone = attach_exits(model, x).backbone

    def kernels(run: nn.Module) -> int:
        with torch.no_grad():
            run(x)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                run(x)
                torch.cuda.synchronize()
        return sum(event.count for event in profiler.key_averages() if "Memset" not in event.key)

    alone = nn.Sequential(*model.blocks, model.exits[2])
    assert kernels(backbone) == kernels(alone)
