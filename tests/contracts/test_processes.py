"""Networks in other processes: spawned ones share weights and train together; forked ones answer on the CPU."""

import copy
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from auxhead.model import EarlyExitNetwork, ExitRule
from support.example_models import SmallNet, plain_heads
from support.spawned_ranks import RANKS, Logits, answer_and_train, loss_of, rules_of, trained
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

pytestmark = pytest.mark.usefixtures("without_interpreter")


def network() -> EarlyExitNetwork:
    torch.manual_seed(0)
    net = EarlyExitNetwork(SmallNet(), plain_heads(), ExitRule(0.75, temperature=1.5)).eval()
    net.check_taps(torch.randn(2, 3, 8, 8))
    return net


class Spawned:
    """A spawned process and this one have trained together, once for all tests."""

    def __init__(self, folder: Path) -> None:
        self.network = network()
        self.x, self.labels = torch.randn(8, 3, 8, 8), torch.arange(8) % 5
        self.answer = tuple(self.network(self.x))
        self.rules = rules_of(self.network)
        arguments = (self.network, self.x, self.labels, str(folder))
        mine = copy.deepcopy(self.network)
        child = torch.multiprocessing.spawn(answer_and_train, arguments, join=False)
        self.here: dict[str, Any] = trained(0, mine, self.x, self.labels, str(folder))
        while not child.join(timeout=120):
            pass
        self.there: dict[str, Any] = torch.load(folder / "found.pt")


@pytest.fixture(scope="module")
def spawned(tmp_path_factory: pytest.TempPathFactory, without_interpreter: None) -> Spawned:
    if not dist.is_gloo_available():
        pytest.skip("needs gloo")
    return Spawned(tmp_path_factory.mktemp("ranks"))


def test_a_spawned_process_answers_with_the_shared_weights(spawned: Spawned) -> None:
    assert spawned.there["shared"]
    for one, other in zip(spawned.there["answer"], spawned.answer, strict=True):
        torch.testing.assert_close(one, other)  # threads of a process may sum in another order


def test_a_rule_changed_in_a_spawned_process_is_changed_there_alone(spawned: Spawned) -> None:
    assert rules_of(spawned.network) == spawned.rules


def test_data_parallel_training_averages_gradients_and_keeps_parameters_equal(spawned: Spawned) -> None:
    for name in ("gradients", "parameters"):
        pairs = zip(spawned.here[name], spawned.there[name], strict=True)
        assert all(torch.equal(one, other) for one, other in pairs), name
    alone = Logits(copy.deepcopy(spawned.network)).train()
    parts = []
    for rank in range(RANKS):
        alone.zero_grad()
        loss_of(alone(spawned.x[rank::RANKS]), spawned.labels[rank::RANKS]).backward()
        parts.append([parameter.grad.clone() for parameter in alone.parameters()])
    for found, *by_rank in zip(spawned.here["gradients"], *parts, strict=True):
        assert found.any()
        torch.testing.assert_close(found, torch.stack(by_rank).mean(0))
    before = spawned.network.parameters()
    assert not any(torch.equal(one, other) for one, other in zip(spawned.here["parameters"], before, strict=True))


def test_data_parallel_training_leaves_the_rules_alone(spawned: Spawned) -> None:
    assert spawned.here["rules"] == spawned.there["rules"] == spawned.rules


class Answered(Dataset):
    """Answers in the worker, one sample at a time."""

    def __init__(self, network: EarlyExitNetwork, x: Tensor) -> None:
        self.network, self.x = network, x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(one[0] for one in self.network(self.x[index : index + 1]))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="cannot fork")
def test_workers_that_fork_beside_a_network_answer_as_it_does() -> None:
    net, x = network(), torch.randn(6, 3, 8, 8)
    wanted = net(x)
    loader = DataLoader(Answered(net, x), batch_size=3, num_workers=1, multiprocessing_context="fork", timeout=60)
    for found, *parts in zip(loader, *(one.split(3) for one in wanted), strict=True):
        for one, other in zip(found, parts, strict=True):
            torch.testing.assert_close(one, other)
    assert all(torch.equal(one, other) for one, other in zip(net(x), wanted, strict=True))
