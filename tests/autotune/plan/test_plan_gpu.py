"""Advice on several GPUs by what a real one measures: a ResNet that fits, and a network that has no room."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from auxhead.autotune.plan.advice import advise
from auxhead.autotune.plan.devices import measure_facts
from auxhead.model import EarlyExitNetwork, FusedAuxHead
from support.command_line import tune
from support.example_models import needs_gpu
from torchvision.models import resnet18

pytestmark = needs_gpu

#: 768 MiB in four stages, of vectors.
FACTORY = """
import torch
from auxhead.model import EarlyExitNetwork, FusedAuxHead
from torch import nn

def large():
    torch.manual_seed(0)
    stages = [nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(3)], nn.ReLU()) for _ in range(4)]
    heads = {str(place): FusedAuxHead(None, 10) for place in range(3)}
    x = torch.randn(4, 4096)
    return EarlyExitNetwork(nn.Sequential(*stages, nn.Linear(4096, 10)), heads, 0.9, example_input=x).eval(), x
"""


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("trunk", ["as_is", "cudnn"])
def test_segments_of_a_resnet(device: torch.device, trunk: str) -> None:
    torch.manual_seed(0)
    images = torch.randn(8, 3, 64, 64, device=device)
    heads = {layer: FusedAuxHead(None, num_classes=10) for layer in ("layer1", "layer2", "layer3")}
    network = EarlyExitNetwork(resnet18(num_classes=10).to(device).eval(), heads, example_input=images)
    network = network.to(device).eval()
    facts = measure_facts(network, images, device, 16, trunk)
    assert sorted(facts.us) == sorted(facts.at_work) == [1, 8, 16, 64] and facts.ends == ["layer1", "layer2", "layer3"]
    assert all(len(us) == 4 and min(us) > 0 for us in facts.us.values()) and sum(facts.us[64]) > sum(facts.us[1])
    assert sum(facts.held) == sum(each.nbytes for each in (*network.parameters(), *network.buffers()))
    assert min(map(min, facts.at_work.values())) > 0 and facts.at_work[64][0] > facts.at_work[1][0]
    assert facts.free is not None and sum(facts.held) < facts.free <= torch.cuda.mem_get_info(device)[1]
    assert facts.handed == [4 * 64 * 16 * 16, 4 * 128 * 8 * 8, 4 * 256 * 4 * 4]
    advice = advise(facts._replace(best={16: ("serial", 2.0 * sum(facts.us[16]))}), 2, [16])
    assert [row.way.partition(",")[0] for row in advice.rows] == ["one GPU", "replicas", "parallelize", "pipelined"]


@pytest.fixture
def small_gpu(device: torch.device) -> Iterator[None]:
    """Of the GPU this process may take 640 MiB more than it has."""
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved(device) + 640 * 2**20
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.mem_get_info(device)[1], device)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, device)


def test_a_network_without_room(small_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large_network_of_tests.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    result = tune("plan", "large_network_of_tests:large", "--gpus", "2")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "768." in text and "It does not fit on one GPU, which ran out of memory" in text
    assert "4 parallelize 2 " in text and "4 pipelined, split_size " in text and "measured" not in text
