"""Times of segments on a GPU: graphs of segments compute what the network does, and the command from end to end."""

import sys

import pytest
import torch
from auxhead.autotune.plan.segment_times import capture_segments, copy_ms, measure_segments
from auxhead.model.parallel.pipeline.cut import cut
from auxhead.model.parallel.segments import run_segments
from support import pipeline_ranks
from support.command_line import tune

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("without_interpreter")]

FACTORY = """
from support import pipeline_ranks

def plain():
    return pipeline_ranks.plain().cuda(), pipeline_ranks.batch_of("plain", 8).cuda()
"""


@pytest.fixture(autouse=True)
def exact_convolutions(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("name", ["plain", "skipping"])
def test_graphs_of_segments_one_behind_another(name):
    network, x = getattr(pipeline_ranks, name)().cuda(), pipeline_ranks.batch_of(name, 8).cuda()
    segments = cut(network, x, x.device, "as_is")[0].segments
    with torch.no_grad():
        wanted = run_segments(segments, x)
        launches = capture_segments(segments, network.exit_heads, x)
        assert len(launches) == len(segments)
        for _ in range(2):
            for launch, (read, handed) in zip(launches, wanted, strict=True):
                _, held = launch()
                torch.cuda.synchronize()
                place = 3 * launches.index(launch)
                torch.testing.assert_close(held[place], read, rtol=1e-2, atol=1e-3)
                torch.testing.assert_close(tuple(held[place + 1]), handed, rtol=1e-2, atol=1e-3)


def test_all_is_measured():
    network, x = pipeline_ranks.plain().cuda(), pipeline_ranks.batch_of("plain", 8).cuda()
    found = measure_segments(network, x, 4, lambda size: size / 1e6)
    assert len(found.segment_ms) == 4 and min(found.segment_ms) > 0 and found.turn_ms >= 0
    assert len(found.handing_ms) == len(found.gathering_ms) == 3 and min(found.handing_ms) > 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_link_is_measured():
    assert copy_ms(1 << 20, torch.device("cuda", 0), torch.device("cuda", 1)) > 0


def test_the_command_on_a_network_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "factory_of_plan.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    result = tune("plan", "factory_of_plan:plain", "--devices", "4", "--exits", "never", "--exits", "0")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("4 GPUs, predicted") == 2 and "Best: " in result.stdout
