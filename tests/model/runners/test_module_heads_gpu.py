"""Heads that are modules of their own on a GPU: runners answer as eager, beside cuBLAS and cuDNN of the trunk."""

import pytest
import torch
from auxhead.model import EarlyExitNetwork, make_runner
from support.example_models import SmallNet, mixed_heads, naive_answers, needs_gpu
from support.graph_runner_cases import assert_same, exits_at, images
from support.one_by_one import one_by_one

pytestmark = [*needs_gpu, pytest.mark.usefixtures("repeatable", "stops_at_every_tap")]


@pytest.fixture
def network() -> EarlyExitNetwork:
    """Thresholds between two samples' confidences, so that rounding decides nothing."""
    torch.manual_seed(0)
    net, x = EarlyExitNetwork(SmallNet(), mixed_heads()).eval().cuda(), images(64, torch.float32)
    net.check_taps(x)
    for head, output in zip(net.heads, naive_answers(net, x), strict=False):
        head.rule.threshold = output.confidence.sort().values[31:33].mean().item()
    return net


@pytest.mark.parametrize("compact", [False, True])
def test_polled_runners_answer_as_eager(network, compact):
    _answers_as_eager(network, exits="polled", compact=compact)


def test_runners_answer_as_eager(network, way):
    _answers_as_eager(network, exits=way)


def test_eager_passes_by_a_plan_answer_as_one_by_one(network):
    torch.manual_seed(1)
    for samples in (1, 8, 33, 8):
        x = images(samples, torch.float32)
        for stop in (False, True):
            assert_same(network(x, stop=stop), one_by_one(network, x), 2e-4)


def _answers_as_eager(network: EarlyExitNetwork, **options: object) -> None:
    torch.manual_seed(1)
    x = images(8, torch.float32)
    with make_runner(network, x, batch_sizes=(1, 4, 8), **options) as runner:
        assert "us alone for a batch of 8." in runner.describe()
        for index in (0, 1, 2, 3, 2, 0):  # of all samples, and never near a threshold
            with exits_at(network, index):
                for samples in (8, 1, 3):
                    beside = torch.full((1 << 22,), float("nan"), device="cuda")
                    found = runner(x[:samples])
                    del beside
                    assert_same(found, one_by_one(network, x[:samples]), 2e-4)
