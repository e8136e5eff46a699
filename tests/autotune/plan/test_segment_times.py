"""Times of segments: what is measured, and how it adds up; the timers and the GPU are fakes."""

import pytest
from auxhead.autotune.plan import segment_times
from auxhead.autotune.plan.segment_times import measure_segments
from support import pipeline_ranks

pytestmark = pytest.mark.usefixtures("without_interpreter")


@pytest.mark.parametrize(("whole_ms", "turn_ms"), [(12.5, 2.5), (8.0, 0.0)])
def test_times_of_a_network(monkeypatch, whole_ms, turn_ms):
    """What is handed over is float32 of 8 x 8 x 8, 8 x 4 x 4 and 16 x 2 x 2 a sample, with rows of 24 bytes."""
    network, samples = pipeline_ranks.plain(), pipeline_ranks.batch_of("plain", 6)
    called, waited = [], []

    def capture(segments, heads, micro_batch):
        assert len(segments) == 4 and list(heads) == list(network.exit_heads) and len(micro_batch) == 4
        return [lambda: called.append("segment")] * 4

    def time_rounds(calls, device, *, rounds, repeat):
        for [call] in calls.values():
            call()
        return {name: [[9e9, 1e3 * (name + 1.0), 0.0]] for name in calls}

    def median_ms(run, devices):
        waited.append(run())
        return whole_ms

    monkeypatch.setattr(segment_times, "capture_segments", capture)
    monkeypatch.setattr(segment_times, "time_rounds", time_rounds)
    monkeypatch.setattr(segment_times, "_median_ms", median_ms)
    monkeypatch.setattr(segment_times, "merging_ms", lambda segments, x: [0.1, None, 0.3, None])
    found = measure_segments(network, samples, 4, lambda size: float(size))
    assert called == ["segment"] * 4
    assert (found.split_size, found.segment_ms, found.turn_ms) == (4, [1.0, 2.0, 3.0, 4.0], turn_ms)
    assert (found.handing_ms, found.gathering_ms) == ([5.0, 6.0, 7.0], [0.1, None, 0.3])
    assert found.link_ms == [4 * (4 * 8 * 8 * 8 + 24), 4 * (4 * 8 * 4 * 4 + 24), 4 * (4 * 16 * 2 * 2 + 24)]
    assert len(waited) == 1


def test_a_larger_micro_batch_than_there_are_samples(monkeypatch):
    monkeypatch.setattr(segment_times, "capture_segments", lambda segments, heads, x: [lambda: None] * len(segments))
    monkeypatch.setattr(segment_times, "time_rounds", lambda calls, *_, **__: {name: [[1e3]] for name in calls})
    found = measure_segments(pipeline_ranks.skipping(), pipeline_ranks.batch_of("skipping", 3), 7, lambda size: 0.0)
    assert found.split_size == 7 and found.gathering_ms == [None, None] and len(found.segment_ms) == 3
