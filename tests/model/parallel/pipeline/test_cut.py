"""Networks cut behind their taps: the segments are the backbone."""

import gc
import weakref

import pytest
import torch
from auxhead.model.basics.bad_input import BadInput
from auxhead.model.parallel.pipeline.answered import cut
from auxhead.model.parallel.pipeline.stage import Stage
from auxhead.model.parallel.segments import NETWORK, run_segments
from support import pipeline_ranks
from torch import nn


@pytest.mark.parametrize("name", ["plain", "skipping"])
def test_segments_are_the_backbone(name):
    network, x = getattr(pipeline_ranks, name)(), pipeline_ranks.batch_of(name, 4)
    segments = cut(network, x, x.device, "as_is")[0].segments
    with torch.no_grad():
        found = run_segments(segments, x)
        wanted = network.logits(x)
        for (read, _), head, logits in zip(found, network.exit_heads, wanted, strict=False):
            assert torch.equal(head.logits(read), logits)
        assert torch.equal(found[-1][0], wanted[-1]) and not found[-1][1]
    names = {name for name, _ in network.named_parameters()}
    shared = {parameter.data_ptr() for parameter in network.backbone.parameters()}
    for segment in segments:
        assert {each.data_ptr() for each in segment.module.parameters()} <= shared
        assert {name.removeprefix(NETWORK) for name, _ in segment.module.named_parameters()} <= names


def test_a_stage_keeps_no_memory_of_other_segments():
    """Their copies on its device are freed once it is made: a GPU has its own part of the network then."""
    network, x = pipeline_ranks.plain(), pipeline_ranks.batch_of("plain", 4)
    meta = torch.device("meta")
    made, _ = cut(network, x, meta, "as_is")
    parameters = [[weakref.ref(each) for each in segment.module.parameters()] for segment in made.segments]
    heads = [weakref.ref(head) for head in made.heads]
    assert all(each().device == meta for some in parameters for each in some)
    kept = Stage(made, 1, 2, 4, meta, name="")
    del made
    gc.collect()
    there = [all(each() is not None for each in some) for some in parameters]
    assert there == [index == 1 for index in range(len(parameters))]
    assert [head() is not None for head in heads] == [index == 1 for index in range(len(heads))]
    assert len(kept.modules_run) == 2


class _Counting(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x):
        self.runs += 1
        return self.layer(x)


def test_a_network_with_a_state_is_refused():
    network, x = pipeline_ranks.plain(), pipeline_ranks.batch_of("plain", 4)
    network.backbone[1] = _Counting(network.backbone[1])
    with pytest.raises(BadInput, match="network: a forward writes to 'backbone.1.runs', wants none that does"):
        cut(network, x, x.device, "as_is")
