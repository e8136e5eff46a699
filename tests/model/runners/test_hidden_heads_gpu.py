"""Heads with hidden layers on a GPU: runners and planned passes answer as heads that are launched one by one."""

import pytest
import torch
from auxhead.model import EarlyExitNetwork, make_runner
from support.example_models import needs_gpu
from support.graph_runner_cases import assert_same, exits_at, images
from support.hidden_head_cases import naive_answers, with_hidden_heads
from support.one_by_one import one_by_one

pytestmark = [*needs_gpu, pytest.mark.usefixtures("repeatable", "stops_at_every_tap")]


@pytest.fixture
def network() -> EarlyExitNetwork:
    torch.manual_seed(0)
    return with_hidden_heads(images(64, torch.float32))[0]


def test_heads_answer_as_they_were_written() -> None:
    torch.manual_seed(0)
    x = images(64, torch.float32)
    net, written = with_hidden_heads(x)
    for logits, output in zip(net.logits(x), naive_answers(net, written, x), strict=True):
        torch.testing.assert_close(logits.softmax(1), output.probs, atol=1e-4, rtol=1e-4)
    assert net(x).exit_index.unique().numel() == 4


@pytest.mark.parametrize("compact", [False, True])
def test_polled_runners_answer_as_eager(network: EarlyExitNetwork, compact: bool) -> None:
    _answers_as_eager(network, exits="polled", compact=compact)


def test_runners_answer_as_eager(network: EarlyExitNetwork, way: str) -> None:
    _answers_as_eager(network, exits=way)


def test_eager_passes_by_a_plan_answer_as_one_by_one(network: EarlyExitNetwork) -> None:
    torch.manual_seed(1)
    for samples in (1, 8, 33, 8):
        x = images(samples, torch.float32)
        for stop in (False, True):
            assert_same(network(x, stop=stop), one_by_one(network, x), 2e-4)


def test_parameters_that_change_in_place_are_followed(network: EarlyExitNetwork, way: str) -> None:
    x = images(8, torch.float32)
    with make_runner(network, x, exits=way) as runner:
        runner(x)
        with torch.no_grad():
            for head in network.fused_heads:
                for parameter in head.parameters():
                    parameter.mul_(-1.5)
        torch.cuda.synchronize()
        with exits_at(network, 0):
            assert_same(runner(x), one_by_one(network, x), 2e-4)


def _answers_as_eager(network: EarlyExitNetwork, **options: object) -> None:
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
