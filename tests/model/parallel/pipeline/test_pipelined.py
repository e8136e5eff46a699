"""Pipelines of two to four processes on the CPU: their answers are the eager network's, sample by sample."""

import pytest
import torch
import torch.distributed as dist
from auxhead.model import ExitResult
from auxhead.model.parallel.pipeline import pipelined as set_up
from auxhead.model.parallel.pipeline.answered import cut
from auxhead.model.parallel.segments import balanced
from support import pipeline_ranks
from support.launched_ranks import launch

pytestmark = [
    pytest.mark.usefixtures("server"),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"),
]


def ran(folder, ranks, function, *arguments):
    """What each rank has saved."""
    ended = launch([folder] * ranks, arguments, main=f"support.pipeline_ranks:{function}")
    for rank, one in enumerate(ended):
        assert one.status == 0, f"rank {rank}: {one}"
    return [torch.load(file) if (file := folder / f"{rank}.pt").exists() else None for rank in range(ranks)]


def assert_same(found, wanted):
    label, confidence, probs, exit_index = found
    assert torch.equal(label, wanted.label) and torch.equal(exit_index, wanted.exit_index)
    torch.testing.assert_close(confidence, wanted.confidence, equal_nan=True)
    torch.testing.assert_close(probs, wanted.probs)


@pytest.mark.parametrize(
    "name, ranks, size, how, stages, sizes",
    [
        ("plain", 2, 16, "whole", "2", range(1, 131)),
        ("plain", 3, 4, "in parts", "0,2", pipeline_ranks.SOME),
        ("skipping", 3, 3, "whole", "auto", pipeline_ranks.SOME),
    ],
    ids=lambda value: "every_size" if len(str(value)) > 20 and isinstance(value, range) else None,
)
def test_answers_are_the_eager_networks(tmp_path, name, ranks, size, how, stages, sizes):
    """Of 1 to 130 samples, whoever leaves where, by which rules; each stage computes each micro-batch once."""
    saved = ran(tmp_path, ranks, "answer", name, size, how, stages, ",".join(map(str, sizes)), "cpu")
    network = getattr(pipeline_ranks, name)()
    found, _, said, counted = saved[0]
    exits = []
    for place, x in enumerate(pipeline_ranks.requests(name, network, sizes)):
        wanted = network(x)
        assert_same(found[place], wanted)
        exits.append(wanted.exit_index)
        assert [computed[place] for _, computed, _, _ in saved] == [-(-len(x) // size)] * ranks
    by_exit = torch.cat(exits).bincount(minlength=len(network.taps) + 1)
    assert by_exit.min() > 0 and torch.equal(counted, by_exit)
    assert [line.split(",")[0] for line in said.splitlines()[:-1]] == [f"Stage {rank}" for rank in range(ranks)]


def test_stages_are_balanced_by_the_times_of_their_segments(monkeypatch):
    """However many samples leave: a micro-batch goes through all stages."""
    network, x = pipeline_ranks.plain(), pipeline_ranks.batch_of("plain", 4)
    times = iter([2.0, 1.0, 1.0, 2.0])
    monkeypatch.setattr(set_up, "median_ms", lambda run: run() or next(times))
    made, x = cut(network, x, x.device, "as_is")
    ms = set_up.segment_ms(made, x)
    assert ms == [2.0, 1.0, 1.0, 2.0] and balanced(ms, 2) == [0, 2] and balanced(ms, 3) == [0, 1, 3]


def test_answers_as_they_come(tmp_path):
    """Each sample once, with its place; who stops early and who asks wrongly disturbs nobody.

    An answer waits for no stage that has nothing to say.
    """
    (refused, parts, *last), _ = ran(tmp_path, 2, "stream_and_serve")
    assert [text.split(",")[0] for text in refused] == [
        "x: got shape [3", "x: got shape [0", "x: got torch.float64", "x: got list",
    ]  # fmt: skip
    network = pipeline_ranks.plain()
    network.set_rules(dict(zip(network.taps, pipeline_ranks.rules_of(network)[2], strict=True)))
    wanted = network(pipeline_ranks.batch_of("plain", 37))
    assert len(parts) > 5
    assert torch.cat([places for places, _ in parts]).sort().values.tolist() == list(range(37))
    for places, answered in parts:
        assert_same(answered, ExitResult(part[places] for part in wanted))
    for threshold, found in zip((0.0, 1.0), last, strict=True):
        network.set_rules(threshold)
        assert_same(found, network(pipeline_ranks.batch_of("plain", 9)))


def test_pipelines_one_after_another(tmp_path):
    """That join by themselves, and in a group of the caller's."""
    (found, other) = ran(tmp_path, 2, "one_after_another")
    network = pipeline_ranks.plain()
    network.set_rules(0.4)
    for one in found:
        assert_same(one, network(pipeline_ranks.batch_of("plain", 11)))
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
