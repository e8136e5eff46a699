"""attach_exits and accelerate on a GPU: every runner and trunk answers as the model does."""

from itertools import cycle

import pytest
import torch
from auxhead.model import accelerate, attach_exits, make_runner
from support.multi_exit_models import STYLES, InAList, confident, probabilities
from torch import Tensor, nn

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # trunks round otherwise than the model there


def images() -> Tensor:
    return torch.randn(4, 3, 16, 16, device="cuda")


WAYS = [(trunk, exits) for trunk in ("as_is", "cudnn") for exits in ("overlapped", "polled", "gated")]


@pytest.mark.parametrize(("style", "way"), list(zip(STYLES, cycle(WAYS), strict=False)))
def test_runners_answer_as_the_model(style: str, way: tuple[str, str]) -> None:
    trunk, exits = way
    model, x = confident(STYLES[style][0]()).cuda(), images()
    wanted = probabilities(model, style, x)
    network = attach_exits(model, x)
    with make_runner(network, x, exits=exits, batch_sizes=(4,), trunk=trunk) as runner:
        for place, theirs in enumerate(wanted):
            network.set_rules({tap: float(index != place) for index, tap in enumerate(network.taps)})
            for _ in range(2):
                answer = runner(x)
                assert answer.exit_index.tolist() == [place] * 4
                torch.testing.assert_close(answer.probs, theirs, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(probabilities(model, style, x), wanted, atol=0.0, rtol=0.0)


def test_inductor_takes_a_model_without_its_heads() -> None:
    model, x = confident(STYLES["hidden layers"][0]()).cuda(), images()
    network = attach_exits(model, x, rules=1.0)
    with make_runner(network, x, exits="overlapped", batch_sizes=(4,), trunk="inductor") as runner:
        torch.testing.assert_close(runner(x).probs, probabilities(model, "hidden layers", x)[-1], atol=2e-3, rtol=2e-3)


def test_half_precision() -> None:
    model, x = InAList().eval().cuda().half(), images().half()
    with accelerate(model, x, rules=0.5) as fast:
        assert fast(x).label.shape == (4,)


def test_without_heads_a_captured_model_is_no_slower_for_those_taken_out() -> None:
    """Nothing of a silent head is launched: the backbone's kernels are those of the model without its heads."""
    model, x = confident(InAList()).cuda(), images()
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
