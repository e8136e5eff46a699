"""Networks on a GPU in other processes: a fork is refused, a spawned process answers, NCCL trains."""

import copy
import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from auxhead.model import ExitResult
from support.example_models import needs_gpu
from support.graph_runner_cases import assert_same, clear_batches, images, made, network
from support.spawned_ranks import answer_on_the_gpu, rules_of, three_steps

pytestmark = [*needs_gpu, pytest.mark.usefixtures("repeatable")]

#: What torch and CUDA say in a forked process: torch where memory is asked for, CUDA where something is launched.
REFUSED = re.compile("this process was forked from one that uses CUDA|Cannot re-initialize CUDA in forked subprocess")


def in_a_fork(call: Callable[[], object], seconds: float = 60.0) -> str:
    """Say what a forked child got: "answered", or its error; one that hangs is killed and fails the test."""
    here, there = multiprocessing.get_context("fork").Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        try:
            call()
            there.send("answered")
        except BaseException as error:
            there.send(f"{type(error).__name__}: {error}")
        finally:
            os._exit(0)  # pytest is the parent's
    there.close()
    try:
        assert here.poll(seconds), "the child hangs"
        return here.recv()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("asked", ["network", "head", "rule"])
def test_a_forked_process_is_refused_and_the_parent_goes_on(asked: str) -> None:
    net = network()
    (x,) = clear_batches(net, [5])
    features, wanted, rules = net.backbone.block0(images(3)), net(x), rules_of(net)
    call = {"network": lambda: net(x), "head": lambda: net.heads[0](features), "rule": lambda: net.set_rules(0.9)}
    assert REFUSED.search(said := in_a_fork(call[asked])), said
    assert_same(net(x), wanted)
    assert rules_of(net) == rules


def test_a_runner_in_a_forked_process_is_refused_and_the_parents_goes_on(way: str) -> None:
    net = network()
    x, y = clear_batches(net, [8, 8])
    runner, wanted = made(net, way), net(x)
    runner(y)
    for call in (lambda: runner(x), lambda: made(net, way), runner.refresh):
        assert REFUSED.search(said := in_a_fork(call)), said
        assert_same(runner(x), wanted)
    in_a_fork(runner.close)  # a child that cleans up neither hangs nor frees anything of the parent's
    assert_same(runner(x), wanted)


def test_a_spawned_process_answers_with_the_weights_of_its_parent(tmp_path: Path) -> None:
    net = network()
    (x,) = clear_batches(net, [6])
    wanted, rules = net(x), rules_of(net)
    torch.multiprocessing.spawn(answer_on_the_gpu, (net, x, str(tmp_path)), nprocs=1)
    found = torch.load(tmp_path / "found.pt")
    for kind in ("eager", "overlapped"):
        assert_same(ExitResult(*(one.cuda() for one in found[kind])), wanted)
    assert_same(net(x), wanted)
    assert rules_of(net) == rules


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs NCCL")
def test_data_parallel_training_of_one_rank_by_nccl(tmp_path: Path) -> None:
    net = network(torch.float32)
    alone, rules, x = copy.deepcopy(net), rules_of(net), images(8, torch.float32)
    labels = torch.arange(8, device="cuda") % 5
    dist.init_process_group("nccl", f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        found = three_steps(net, x, labels)
    finally:
        dist.destroy_process_group()
    wanted = three_steps(alone, x, labels, parallel=False)
    for name in ("gradients", "parameters"):
        for one, other in zip(found[name], wanted[name], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert found["rules"] == rules
    net.eval()
    assert net(x).label.shape == (8,)
