"""arrival_counters.py: zeroed counters are shared on a stream and in a capture, and by nothing else."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from auxhead.kernels.arrival_counters import ArrivalCounters, arrival_counters


def test_counters_grow_and_are_shared_on_a_stream(device):
    counters = ArrivalCounters(device)
    small = counters.take(3)
    assert (small.numel(), small.dtype, small.device) == (3, torch.int32, device)
    assert counters.take(1).data_ptr() == small.data_ptr()
    large = counters.take(5000)
    assert large.numel() == 5000 and not large.any()
    assert counters.take(1).data_ptr() == large.data_ptr()


def test_counters_of_captures_are_their_own_and_aligned(device):
    """No two captures share a counter.

    Each block starts at a cache line, so that no two share one, and lies in it as those of other captures do. Triton
    would also compile a kernel anew for a pointer that is no multiple of 16, and a capture is no place to compile.
    """
    counters = ArrivalCounters(device)
    counters._reserve = torch.zeros(1 << 12, dtype=torch.int32, device=device)
    start, seen = counters._reserve.data_ptr(), set()
    for capture, count in enumerate((1, 1, 3, 5, 2, 100, 1)):
        block = counters._take_for_capture(count, stream=0, capture=capture)
        places = set(range(block.data_ptr(), block.data_ptr() + 4 * count, 4))
        assert block.numel() >= count and not places & seen
        assert (block.data_ptr() - start) % 128 == 0, f"block of {count} at {block.data_ptr() - start} bytes"
        seen |= places


def test_counters_are_shared_on_a_stream_of_one_capture(device):
    counters = ArrivalCounters(device)
    counters._reserve = torch.zeros(1 << 12, dtype=torch.int32, device=device)
    first = counters._take_for_capture(100, stream=1, capture=1)
    assert counters._take_for_capture(30, stream=1, capture=1).data_ptr() == first.data_ptr()
    others = [counters._take_for_capture(100, stream, capture) for stream, capture in ((2, 1), (1, 2), (2, 3))]
    large = counters._take_for_capture(200, stream=1, capture=2)
    assert counters._take_for_capture(100, stream=1, capture=2).data_ptr() == large.data_ptr()
    assert len({block.data_ptr() for block in (first, large, *others)}) == 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_reserve_that_is_used_up_stays_with_the_graphs():
    """Graphs hold addresses: no later reserve may have them."""
    device = torch.device("cuda", torch.cuda.current_device())
    counters, taken = ArrivalCounters(device), []
    for capture in range(6):
        counters.take(1)  # makes a new reserve where half of one is gone
        block = counters._take_for_capture(3 << 19, stream=1, capture=capture)
        taken.append((block.data_ptr(), block.data_ptr() + block.nbytes))
        del block
    taken.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(taken))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_reserve_is_zero_before_any_stream_can_read_it():
    device = torch.device("cuda", torch.cuda.current_device())
    counters, other = ArrivalCounters(device), torch.cuda.Stream()
    counters._zeros(1 << 22).fill_(1)  # is freed: the reserve's memory
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)  # some 10 ms
    counters.take(1)
    with torch.cuda.stream(other):
        assert not counters._take_for_capture(1 << 20, stream=1, capture=1).any()


def test_two_devices_share_no_counters():
    assert arrival_counters(torch.device("cpu")) is arrival_counters(torch.device("cpu"))
    assert arrival_counters(torch.device("cpu")) is not arrival_counters(torch.device("meta"))


def test_a_capture_that_asks_for_more_than_the_reserve_gets_zeros_of_its_own(device):
    counters = ArrivalCounters(device)
    counters._reserve = torch.zeros(64, dtype=torch.int32, device=device)
    large = counters._take_for_capture(100, stream=1, capture=1)
    small = counters._take_for_capture(64, stream=1, capture=1)
    assert large.shape == (100,) and not large.any() and small.shape == (64,)


class Reserve:
    """Places of counters, which take a while to be handed out."""

    def __init__(self, places):
        self.places = places

    def numel(self):
        return len(self.places)

    def __getitem__(self, part):
        time.sleep(0.01)
        return Reserve(self.places[part])


def test_captures_of_two_threads_share_no_counters(monkeypatch):
    module = sys.modules[ArrivalCounters.__module__]
    monkeypatch.setattr(module, "is_capturing", lambda _device: True)
    stream = SimpleNamespace(cuda_stream=7, stream_id=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: stream)
    counters, ids = ArrivalCounters(torch.device("cuda", 0)), iter(range(100))
    monkeypatch.setattr(module, "capture_id", lambda _handle: next(ids))
    counters._reserve = Reserve(range(256))
    with ThreadPoolExecutor(4) as pool:
        taken = [one.places for one in pool.map(lambda _: counters.take(8), range(4))]
    assert len({place for places in taken for place in places}) == 4 * 8


def test_streams_share_no_counters(monkeypatch):
    module = sys.modules[ArrivalCounters.__module__]
    monkeypatch.setattr(module, "is_capturing", lambda _device: False)
    counters = ArrivalCounters(torch.device("cuda", 0))
    monkeypatch.setattr(counters, "_zeros", lambda count: torch.zeros(count, dtype=torch.int32))
    counters._reserve = torch.zeros(module._RESERVED, dtype=torch.int32)

    def take(handle, number):
        stream = SimpleNamespace(cuda_stream=handle, stream_id=-1)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: stream)
        return counters.take(number).data_ptr()

    first, second, default = take(11, 3), take(22, 3), take(0, 3)
    assert len({first, second, default}) == 3
    assert (take(11, 5), take(22, 1), take(0, 3)) == (first, second, default)


def test_a_reserve_whose_clearing_nobody_has_waited_for_is_not_handed_out(monkeypatch):
    class Stream:
        cuda_stream, stream_id = 0, 0
        interrupts = [KeyboardInterrupt]

        def synchronize(self):
            if self.interrupts:
                raise self.interrupts.pop()

    module = sys.modules[ArrivalCounters.__module__]
    monkeypatch.setattr(module, "is_capturing", lambda _device: False)
    monkeypatch.setattr(module, "beside_captures", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: Stream())
    counters = ArrivalCounters(torch.device("cuda", 0))
    monkeypatch.setattr(counters, "_zeros", lambda count: torch.zeros(count, dtype=torch.int32))
    with pytest.raises(KeyboardInterrupt):
        counters.take(8)
    assert counters._reserve.numel() == 0
    counters.take(8)
    assert counters._reserve.numel() > 0
