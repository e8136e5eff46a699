"""The energy of calls without a GPU: by a counter of the driver that a test moves."""

import pytest
import torch
from auxhead.model.basics.energy import energy_counter, joules_a_call
from support.device_clock import pretended_energy_counter

GPU = torch.device("cuda", 0)


def test_the_energy_of_a_call_is_that_of_some_seconds_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = pretended_energy_counter(monkeypatch)
    taken = []

    def call(x: torch.Tensor) -> None:
        taken.append(x)
        counter.joules += 0.02

    read = energy_counter(GPU)
    inputs = [torch.zeros(1), torch.ones(1)]
    assert joules_a_call(call, inputs, 5000.0, read, seconds=1.0) == pytest.approx(0.02)
    assert len(taken) == 200 and taken[:3] == [inputs[0], inputs[1], inputs[0]]
    assert joules_a_call(call, inputs, 5e6, read, seconds=1.0) == pytest.approx(0.02), "one at least"
    assert counter.waits == 4, "before each reading, for the caller's stream: another thread may be capturing"


def test_the_counter_is_that_of_the_device_in_joules(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = pretended_energy_counter(monkeypatch)
    counter.joules = 3.5
    read = energy_counter(GPU)
    assert read is not None and read() == 3.5 and counter.asked == ["GPU-0123"]


def test_a_device_without_a_counter_has_no_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert energy_counter(torch.device("cpu")) is None

    def refuse(_gpu: object) -> int:
        raise RuntimeError("Not Supported")

    counter = pretended_energy_counter(monkeypatch)
    monkeypatch.setattr(counter, "device_get_total_energy_consumption", refuse)
    assert energy_counter(GPU) is None
