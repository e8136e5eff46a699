"""Pipelines over several hosts, each an agent of torchrun with its own directory: answers, and failures of a host."""

import time
from itertools import count

import pytest
import torch
import torch.distributed as dist
from auxhead.model.commands import processes
from auxhead.model.commands.options import Device
from auxhead.model.parallel.pipeline import pipelined as set_up
from auxhead.model.processes import process_group
from support import pipeline_ranks
from support.launched_ranks import LIMIT_S
from support.several_hosts import launch_hosts

pytestmark = [
    pytest.mark.usefixtures("server"),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"),
]


@pytest.fixture
def hosts(tmp_path):
    folders = [tmp_path / f"host{host}" for host in range(2)]
    for folder in folders:
        folder.mkdir()
    return folders


def test_answers_are_the_eager_networks(hosts):
    """Rank 0 has them, on the first host; all that the second one gets and sends goes through the network."""
    sizes, ranks = (5, 9, 1, 33), (2, 1)  # static ones answer in test_replicas
    arguments = ["plain", 4, "merged", "0,2", ",".join(map(str, sizes)), "cpu"]
    ended = launch_hosts(hosts, arguments, way="c10d", ranks=ranks, main="support.pipeline_ranks:answer")
    assert [one.status for one in ended] == [0, 0], ended
    found, *_ = torch.load(hosts[0] / "0.pt")
    network = pipeline_ranks.plain()
    for (label, confidence, _, exit_index), x in zip(
        found, pipeline_ranks.requests("plain", network, sizes), strict=True
    ):
        wanted = network(x)
        assert torch.equal(label, wanted.label) and torch.equal(exit_index, wanted.exit_index)
        torch.testing.assert_close(confidence, wanted.confidence, equal_nan=True)
    assert torch.load(hosts[1] / f"{sum(ranks) - 1}.pt")[0] == []


@pytest.mark.parametrize(
    "function, faults, survivor, cause",
    [
        ("fails_in_a_layer", {}, 0, "rank 1 failed: StageFailed: stage 1 of 2: RuntimeError: "),
        ("first_host_freezes", {1: "hurries"}, 1, "the store of the processes does not answer"),
    ],
)
def test_a_host_that_fails_ends_the_other(hosts, function, faults, survivor, cause):
    began = time.monotonic()
    ended = launch_hosts(hosts, [], faults=faults, main=f"support.pipeline_ranks:{function}")
    assert time.monotonic() - began < LIMIT_S
    assert ended[survivor].status == 1 and cause in " ".join(ended[survivor].errors.split()), ended
    assert ended[1 - survivor].status != 0 and not ended[0].output + ended[1].output, ended


@pytest.mark.parametrize(
    "own_device",
    [lambda: set_up._own_device("cuda", None), lambda: processes.torch_device(Device.cuda, 1)],
    ids=["pipelined", "commands"],
)
def test_cuda_is_the_gpu_of_the_local_rank(monkeypatch, own_device):
    """On the second of two hosts with two GPUs each."""
    chosen = []
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[-1])
    assert own_device() == torch.device("cuda", 1) and chosen == [1]


def test_a_second_try_hears_nothing_of_the_first(monkeypatch):
    """torchrun keeps its store when it starts all processes once more, and the failure stands there."""
    store, tries = dist.HashStore(), []
    monkeypatch.setattr(process_group, "_parts", None)  # of a new process
    for number in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", number)
        process_group._parts = count()
        tries.append(process_group.unused_part(store, "auxhead"))
    tries[0].set("failure", "of the first")
    assert tries[0].check(["failure"]) and not tries[1].check(["failure"])
