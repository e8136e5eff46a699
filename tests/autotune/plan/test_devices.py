"""What is measured of segments without a GPU, and what follows from that for other batches."""

import pytest
import torch
from auxhead.autotune.plan import devices
from auxhead.autotune.plan.devices import Facts, Splits, measure_facts
from auxhead.model import EarlyExitNetwork, FusedAuxHead
from support import pipeline_ranks
from support.example_models import Counting, SmallNet

pytestmark = pytest.mark.usefixtures("without_interpreter")
CPU = torch.device("cpu")


def facts_of(us: dict[int, list[float]]) -> Facts:
    return Facts({}, None, [0, 0], us, {size: [0, 0] for size in us}, [0.0], ["a"], {}, {}, "as_is")


@pytest.mark.parametrize("batch, us", [(1, 10.0), (2, 20.0), (8, 80.0), (36, 115.0), (64, 150.0), (120, 220.0)])
def test_times_are_in_line(batch: int, us: float):
    assert facts_of({1: [10.0, 5.0], 8: [80.0, 5.0], 64: [150.0, 5.0]}).costs(batch).us == {batch: [us, 5.0]}


def test_times_do_not_fall_beyond_what_was_measured():
    assert facts_of({1: [10.0, 5.0], 8: [9.0, 5.0]}).costs(4096).us == {4096: [9.0, 5.0]}
    assert facts_of({2: [10.0, 5.0]}).costs(4).us == {4: [20.0, 10.0]}


def test_a_pipeline_takes_the_turns_of_its_slowest_part(monkeypatch: pytest.MonkeyPatch):
    splits = Splits(facts_of({1: [10.0, 30.0], 64: [640.0, 1920.0]}), 2)
    whole = splits.parallelize(64)
    assert whole is not None and whole == (640 + 1920 + devices.LINK_US, 64, ["a"])
    monkeypatch.setattr(devices, "HOST_US", 0.0)
    assert splits.pipelined(64) == (65 * 30.0, 1, ["a"]), "the smaller the sooner, but for the hosts"
    monkeypatch.setattr(devices, "HOST_US", 1e6)
    assert splits.pipelined(64) == (2 * 1920.0 + 1e6, 64, ["a"])
    monkeypatch.setattr(devices, "HOST_US", 90.0)
    found = splits.pipelined(3)
    assert found is not None and found == (2 * (2 * 30 + 30.0) + 90.0, 3, ["a"])


def test_segments_of_a_network():
    network, x = pipeline_ranks.plain(), pipeline_ranks.batch_of("plain", 4)
    facts = measure_facts(network, x, CPU, 4, "as_is")
    assert sorted(facts.us) == sorted(facts.at_work) == [1, 4, 8, 64]
    assert all(len(us) == 4 and min(us) > 0 for us in facts.us.values())
    assert sum(facts.held) == sum(each.nbytes for each in (*network.parameters(), *network.buffers()))
    assert facts.handed == [4 * 8 * 8 * 8, 4 * 8 * 4 * 4, 4 * 16 * 2 * 2] and facts.ends == ["0", "2", "3"]
    assert (facts.best, facts.free, facts.uncuttable, facts.shared, facts.trunk) == ({}, None, {}, {}, "as_is")
    split = Splits(facts, 4).parallelize(4)
    assert split is not None and split.ends == ["0", "2", "3"] and split.us > sum(facts.us[4])


def test_larger_batches_than_there_is_room_for_are_left_out(monkeypatch: pytest.MonkeyPatch):
    real = devices.measure

    def measure(cut, batches, trunk):
        if max(batches) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(cut, batches, trunk)

    monkeypatch.setattr(devices, "measure", measure)
    facts = measure_facts(pipeline_ranks.plain(), pipeline_ranks.batch_of("plain", 4), CPU, 4, "as_is")
    assert sorted(facts.us) == [1, 4, 8]


def test_what_cannot_be_cut_says_why():
    facts = measure_facts(pipeline_ranks.skipping(), pipeline_ranks.batch_of("skipping", 2), CPU, 2, "as_is")
    assert facts.uncuttable and all("goes past it" in why for why in facts.uncuttable.values())
    backbone = SmallNet()
    backbone.block0 = Counting(backbone.block0)
    x = torch.randn(2, 3, 8, 8)
    network = EarlyExitNetwork(backbone, {"block1": FusedAuxHead(None, 5)}, example_input=x).eval()
    facts = measure_facts(network, x, CPU, 2, "as_is")
    assert not facts.us and len(facts.held) == 1
    assert "a forward writes to 'block0.calls'" in facts.uncuttable["any tap"]
