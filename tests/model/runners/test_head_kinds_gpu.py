"""Runners and eager passes of all kinds of heads on a GPU: as heads that are launched one by one."""

import pytest
import torch
from auxhead.model import EarlyExitNetwork, make_runner
from support.every_runner import EVERY
from support.example_models import SmallNet, mixed_heads, naive_answers, needs_gpu
from support.graph_runner_cases import assert_same, exits_at, images
from support.graph_runner_cases import network as fused_network
from support.hidden_head_cases import with_hidden_heads
from support.one_by_one import one_by_one
from support.patience_cases import RULES, set_rules

pytestmark = [*needs_gpu, pytest.mark.usefixtures("repeatable", "stops_at_every_tap")]


@pytest.fixture(params=["hidden layers", "modules"])
def network(request: pytest.FixtureRequest) -> EarlyExitNetwork:
    """Thresholds between two samples' confidences, so that rounding decides nothing."""
    torch.manual_seed(0)
    x = images(64, torch.float32)
    if request.param == "hidden layers":
        return with_hidden_heads(x)[0]
    net = EarlyExitNetwork(SmallNet(), mixed_heads()).eval().cuda()
    net.check_taps(x)
    for head, output in zip(net.heads, naive_answers(net, x), strict=False):
        head.rule.threshold = output.confidence.sort().values[31:33].mean().item()
    return net


@pytest.mark.parametrize("options", [one for name, one in EVERY.items() if name != "eager"], ids=str)
def test_runners_answer_as_eager_and_follow_parameters(network: EarlyExitNetwork, options: dict[str, object]) -> None:
    torch.manual_seed(1)
    x = images(8, torch.float32)
    with make_runner(network, x, batch_sizes=(1, 4, 8), **options) as runner:
        for index in (0, 1, 2, 3, 2, 0):  # of all samples, and never near a threshold
            with exits_at(network, index):
                for samples in (8, 1, 3):
                    beside = torch.full((1 << 22,), float("nan"), device="cuda")
                    found = runner(x[:samples])
                    del beside
                    assert_same(found, one_by_one(network, x[:samples]), 2e-4)
            with torch.no_grad():
                for parameter in network.heads.parameters():
                    parameter.mul_(-1.5 if index % 2 else -0.7)
            torch.cuda.synchronize()


def test_eager_passes_by_a_plan_answer_as_one_by_one(network: EarlyExitNetwork) -> None:
    torch.manual_seed(1)
    for samples in (1, 8, 33, 8):
        x = images(samples, torch.float32)
        for stop in (False, True):
            assert_same(network(x, stop=stop), one_by_one(network, x), 2e-4)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("options", EVERY.values(), ids=EVERY)
def test_patience(options: dict[str, object], rules: list) -> None:
    net = fused_network(torch.float32)
    set_rules(net, rules)
    x = images(64, torch.float32)
    # by half a percent of the samples at most two labels or a threshold are so near that rounding decides
    with make_runner(net, x[:2], batch_sizes=(1, 8, 32), **options) as runner:
        for samples in (1, 3, 8, 20, 32, 64):
            wanted, found = one_by_one(net, x[:samples]), runner(x[:samples])
            same = (found.exit_index == wanted.exit_index) & (found.label == wanted.label)
            assert (~same).sum() <= 1
            torch.testing.assert_close(found.confidence[same], wanted.confidence[same], rtol=0, atol=2e-3)
