"""Pipelines on GPUs: a stage as a graph in this process, and stages in processes with a GPU each, by NCCL."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from auxhead.model import pipelined
from support import pipeline_ranks
from support.launched_ranks import launch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("without_interpreter")]


@pytest.fixture(autouse=True)
def exact_convolutions(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("name", ["plain", "tokens"])
@pytest.mark.parametrize("where", ["there", "copied", "channels_last"])
def test_one_stage_is_a_graph(name, where):
    network = getattr(pipeline_ranks, name)().to("cpu" if where == "copied" else "cuda")
    example = pipeline_ranks.batch_of(name, 16).to(network.device)
    if where == "channels_last" and name == "plain":
        network, example = network.to(memory_format=torch.channels_last), example.to(memory_format=torch.channels_last)
    eager = copy.deepcopy(network).cuda()
    with pipelined(network, example, split_size=4, device="cuda") as run:
        for x in pipeline_ranks.requests(name, network, pipeline_ranks.SOME, numbers_alone=True):
            eager.load_state_dict(network.state_dict())
            pipeline_ranks.assert_same(run(x), eager(x.cuda()), rtol=1e-3, atol=1e-4)


def test_requests_whose_memory_holds_something_else():
    """A negative view, of the size of a micro-batch and of others."""
    network = pipeline_ranks.plain().cuda()
    eager = copy.deepcopy(network)
    with pipelined(network, pipeline_ranks.batch_of("plain", 8).cuda(), split_size=4) as run:
        for samples in (4, 8, 3):
            x = pipeline_ranks.batch_of("plain", samples).cuda()
            pipeline_ranks.assert_same(run(torch._neg_view(x)), eager(-x), rtol=1e-3, atol=1e-4)


def test_other_criteria_than_were_captured():
    network = pipeline_ranks.plain().cuda()
    run = pipelined(network, pipeline_ranks.batch_of("plain", 8).cuda(), split_size=4)
    network.set_rules(pipeline_ranks.rules_of(network)[5][0])
    with pytest.raises(Exception, match="were captured with the criteria max_prob"):
        run(pipeline_ranks.batch_of("plain", 8))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_stages_on_gpus(tmp_path):
    ranks = min(torch.cuda.device_count(), 4)
    sizes = ",".join(map(str, range(1, 131)))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
        str(Path(pipeline_ranks.__file__)), "plain", "8", "whole", "auto", sizes, "cuda",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": ":".join(entry for entry in sys.path if entry)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found, *_ = torch.load(tmp_path / "0.pt")
    network = pipeline_ranks.plain().cuda()
    for one, x in zip(found, pipeline_ranks.requests("plain", network, range(1, 131), numbers_alone=True), strict=True):
        pipeline_ranks.assert_same(one, network(x.cuda()), rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_rank_that_raises_while_another_is_elsewhere(tmp_path):
    main = "support.pipeline_failures:raises_while_another_waits_elsewhere"
    seen = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")}  # other tests' ranks see none
    for rank, one in enumerate(launch([tmp_path] * 2, ["cuda"], main=main, variables={0: seen, 1: seen})):
        assert one.status > 0 and "of the user's" in one.errors, f"rank {rank}: {one}"
