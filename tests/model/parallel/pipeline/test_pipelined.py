"""Pipelines of processes on the CPU, on one host and on several: answers are the eager network's; all end if one fails.

A host is an agent of torchrun with a directory of its own.
"""

import time
from itertools import count

import pytest
import torch
import torch.distributed as dist
from auxhead.model import pipelined, save_checkpoint
from auxhead.model.basics.bad_input import BadInput
from auxhead.model.commands import processes
from auxhead.model.parallel.pipeline import pipelined as set_up
from auxhead.model.processes import process_group
from support import pipeline_ranks
from support.launched_ranks import LIMIT_S, launch
from support.replica_cases import serve
from support.several_hosts import launch_hosts

pytestmark = [
    pytest.mark.usefixtures("server"),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"),
]


@pytest.fixture(scope="module")
def server(without_interpreter):
    """The server that ranks are forked from, with PyTorch imported."""
    serve()


def ran(folder, ranks, function, *arguments):
    """What each rank has saved."""
    ended = launch([folder] * ranks, arguments, main=f"support.pipeline_ranks:{function}")
    for rank, one in enumerate(ended):
        assert one.status == 0, f"rank {rank}: {one}"
    return [torch.load(file) if (file := folder / f"{rank}.pt").exists() else None for rank in range(ranks)]


@pytest.mark.parametrize(
    "name, ranks, size, how, stages, sizes",
    [
        ("plain", 2, 16, "whole", "2", (*range(1, 130, 4), 130)),
        ("plain", 3, 4, "in parts", "0,2", pipeline_ranks.SOME),
        ("tokens", 3, 3, "whole", "auto", pipeline_ranks.SOME),
    ],
    ids=lambda value: "sizes" if isinstance(value, tuple) else None,
)
def test_answers_are_the_eager_networks(tmp_path, name, ranks, size, how, stages, sizes):
    """Of 1 to 130 samples, whoever leaves where, by which rules; each stage computes each micro-batch once."""
    saved = ran(tmp_path, ranks, "answer", name, size, how, stages, ",".join(map(str, sizes)), "cpu")
    network = getattr(pipeline_ranks, name)()
    found, _, said, counted = saved[0]
    exits = []
    for place, x in enumerate(pipeline_ranks.requests(name, network, sizes)):
        wanted = network(x)
        pipeline_ranks.assert_same(found[place], wanted)
        exits.append(wanted.exit_index)
        assert [computed[place] for _, computed, _, _ in saved] == [-(-len(x) // size)] * ranks
    by_exit = torch.cat(exits).bincount(minlength=len(network.taps) + 1)
    assert by_exit.min() > 0 and torch.equal(counted, by_exit)
    assert [line.split(",")[0] for line in said.splitlines()[:-1]] == [
        f"Part {rank} on rank {rank}" for rank in range(ranks)
    ]


def test_answers_of_the_first_stage_wait_for_no_other(tmp_path):
    """Where it answers for all, the others are at it still; who asks wrongly disturbs nobody."""
    (refused, *last), _ = ran(tmp_path, 2, "answers_early")
    assert [text.split(",")[0] for text in refused] == [
        "x: got shape [3", "x: got shape [0", "x: got torch.float64", "x: got list",
    ]  # fmt: skip
    network = pipeline_ranks.plain()
    for threshold, found in zip((0.0, 1.0), last, strict=True):
        network.set_rules(threshold)
        pipeline_ranks.assert_same(found, network(pipeline_ranks.batch_of("plain", 9)))


def test_each_rank_reads_its_part_alone(tmp_path):
    """Of a network on ``meta``, whose checkpoint all have."""
    network = pipeline_ranks.plain()
    network.set_rules(0.4)
    save_checkpoint(tmp_path / "saved", network)
    found, other = ran(tmp_path, 2, "from_a_checkpoint")
    pipeline_ranks.assert_same(found[0], network(pipeline_ranks.batch_of("plain", 11)))
    names = [name for name, _ in network.backbone.named_parameters()]
    assert found[1] + other[1] == names and found[1] == names[:4]


def test_pipelines_one_after_another(tmp_path):
    """That join by themselves, and in a group of the caller's."""
    (found, other) = ran(tmp_path, 2, "one_after_another")
    network = pipeline_ranks.plain()
    network.set_rules(0.4)
    for one in found:
        pipeline_ranks.assert_same(one, network(pipeline_ranks.batch_of("plain", 11)))
    assert other == [None, None]


def test_a_folded_trunk(tmp_path):
    """Its stages answer as the network does, and follow weights that are changed, once they are refreshed."""
    found, _ = ran(tmp_path, 2, "folded")
    network, x = pipeline_ranks.normed(), pipeline_ranks.batch_of("plain", 7)
    for one in found:
        wanted = network(x)
        for part, like in zip(one, wanted, strict=True):
            torch.testing.assert_close(part, like, rtol=1e-3, atol=1e-5)
        with torch.no_grad():
            network.backbone[0][1].weight.mul_(1.5)


@pytest.mark.parametrize(
    "function, cause",
    [
        ("dies", "rank 1 of 2 has died"),
        ("hangs_in_a_layer", "stage 1 of 2: a micro-batch took longer than 2 s"),
        ("other_parameters", "network: heads.0.linear.bias: rank 0 has torch.float32 [5]"),
        ("no_such_device", "device: got cuda:7, but torch sees 0 CUDA devices here"),
        ("reads_a_number", "network: its forward reads a number on the host at pipeline_failures.py:"),
        ("other_heads", "stage 1 of 2: heads['0']: its linear was given other hooks since the runner was made"),
        ("raises_while_another_waits_elsewhere", "of the user's"),
        ("is_elsewhere", "some other rank does not take part in the request"),
        ("ends_before_the_others", "this runner is closed on the first rank"),
    ],
)
def test_all_end_with_the_cause(tmp_path, function, cause):
    faults = dict.fromkeys(range(2), "leaves_after_2_seconds")
    ended = launch([tmp_path] * 2, [], faults=faults, main=f"support.pipeline_failures:{function}")
    for rank, one in enumerate(ended):
        assert one.status != 0 and not one.output, f"rank {rank}: {one}"
        if one.status > 0:
            assert cause in " ".join(one.errors.split()), f"rank {rank}: {one}"
    killed = [rank for rank, one in enumerate(ended) if one.status < 0]
    assert killed == ([1] if function == "dies" else []), ended


@pytest.fixture
def hosts(tmp_path):
    folders = [tmp_path / f"host{host}" for host in range(2)]
    for folder in folders:
        folder.mkdir()
    return folders


def test_answers_of_several_hosts_are_the_eager_networks(hosts):
    """Rank 0 has them, on the first host; all that the second one gets and sends goes through the network."""
    sizes, ranks = (5, 9, 1, 33), (2, 1)  # static ones answer in test_replicas
    arguments = ["plain", 4, "merged", "0,2", ",".join(map(str, sizes)), "cpu"]
    ended = launch_hosts(hosts, arguments, way="c10d", ranks=ranks, main="support.pipeline_ranks:answer")
    assert [one.status for one in ended] == [0, 0], ended
    found, *_ = torch.load(hosts[0] / "0.pt")
    network = pipeline_ranks.plain()
    for one, x in zip(found, pipeline_ranks.requests("plain", network, sizes), strict=True):
        pipeline_ranks.assert_same(one, network(x))
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
    ended = launch_hosts(hosts, [], faults=faults, main=f"support.pipeline_failures:{function}")
    assert time.monotonic() - began < LIMIT_S
    assert ended[survivor].status == 1 and cause in " ".join(ended[survivor].errors.split()), ended
    assert ended[1 - survivor].status != 0 and not ended[0].output + ended[1].output, ended


@pytest.mark.parametrize(
    "own_device",
    [lambda: set_up._own_device("cuda", None), lambda: processes.torch_device("cuda", 1)],
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


def alone(network, x, **options):
    return pipelined(network, x, **{"split_size": 2, **options})


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(device="gpu"), ValueError, "device: got 'gpu', wants 'cuda'"),
        (dict(device="meta"), ValueError, "device: got meta, wants a CUDA device or the CPU"),
        (dict(max_memory=7), ValueError, "max_memory: got 7, wants bytes by a rank below 1"),
        (dict(max_memory={3: 7}), ValueError, "max_memory: got {3: 7}, wants bytes by a rank below 1"),
        (dict(stages=3), ValueError, "stages: got 3, wants 'auto' or a list of taps"),
        (dict(split_size=0), ValueError, "split_size: got 0, wants a positive int"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit(options, error, message):
    network = pipeline_ranks.plain()
    with pytest.raises(error, match=message):
        alone(network, pipeline_ranks.batch_of("plain", 4), **options)
    assert not any(each.is_meta for each in network.parameters())


def test_samples_that_depend_on_others_are_refused():
    network = pipeline_ranks.normed()
    network.backbone[2].forward = lambda x: (x - x.mean(0)).mean((2, 3), keepdim=True)
    with pytest.raises(BadInput, match="what it says of a sample depends on the others of a batch"):
        alone(network, pipeline_ranks.batch_of("plain", 4))


@pytest.mark.parametrize("unlike", ["buffer", "number", "probs"])
def test_ranks_with_unlike_networks_are_told(tmp_path, unlike):
    ended = launch([tmp_path] * 2, [unlike], main="support.pipeline_failures:unlike")
    causes = {"buffer": "network: backbone.2.shift", "number": "operations of its forward", "probs": "of its answers"}
    for one in ended:
        assert one.status == 1 and causes[unlike] in " ".join(one.errors.split()), one
