"""What "auto" compiles beside all else: the trunk "inductor", and the backbone alone, to compare with."""

import json
import math
from types import SimpleNamespace

import pytest
from auxhead.model.auto import candidates
from auxhead.model.auto.candidates import SharedTrunks
from auxhead.model.auto.compiled_backbone import COMPILED
from auxhead.model.auto.plan import Plan
from support.planner_fakes import PLAIN, FakeGpu, first_call

pytestmark = pytest.mark.usefixtures("without_interpreter")


@pytest.mark.parametrize(
    ("compiled_s", "compiles", "left_out"),
    [(20.0, True, False), (20.0, False, True), (3.0, False, False), (90.0, False, True)],
    ids=["in time", "failed late", "failed soon", "too late"],
)
def test_what_workers_compile_meanwhile(gpu: FakeGpu, monkeypatch, compiled_s, compiles, left_out) -> None:
    """They begin before all else, are waited for as long as what follows fits, and this process compiles in a hurry."""

    class Workers:
        def __init__(self, _count: int, patient: bool = False) -> None:
            pass

        def take(self) -> None:
            raise AssertionError("of what the fakes make nothing is compiled")

        def wait(self, until: float = math.inf) -> bool:
            assert f"{PLAIN} on cudnn" in dict(gpu.made), "while they compile"
            gpu.seconds = max(gpu.seconds, min(until, compiled_s))
            return compiles and gpu.seconds <= until

        def close(self) -> None:
            pass

    monkeypatch.setattr(candidates, "workers_for", lambda _device: 1)
    monkeypatch.setattr(candidates, "CompileWorkers", Workers)
    monkeypatch.setattr(candidates, "_import_compiler", lambda: None)
    gpu.times_as_long["inductor"] = 0.5
    plan = first_call(budget="standard").plans[4]
    assert list(gpu.trunks) == ["inductor", "as_is", "cudnn"] and gpu.trunks["inductor"] == 1
    assert ("trunk inductor" in plan.left_out) == left_out == (plan.chosen.trunk != "inductor")
    assert gpu.seconds <= 26.0


class Compiled:
    """The backbone alone, compiled, for the fakes."""

    candidate = SimpleNamespace(name=COMPILED, runner=COMPILED, trunk="as_is")
    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(("us", "said"), [(120.0, "37.5% less"), (60.0, "25.0% more")])
def test_it_says_what_it_gains_over_torch_compile(gpu: FakeGpu, monkeypatch, us: float, said: str) -> None:
    compiled = Compiled()
    monkeypatch.setattr(SharedTrunks, "compiled_backbone", lambda *_: compiled)
    gpu.us |= {COMPILED: us, "serial": 75.0}
    runner = first_call()
    plan = runner.plans[4]
    assert compiled.closed and list(plan.compiled) == ["serial", COMPILED]
    measured = f"75.1 us for {us * 1.001:.1f}, measured beside each other"
    assert f"; {said} than torch.compile of the backbone alone, in a graph ({measured})" in runner.describe()
    content = json.loads(json.dumps(plan.as_json()))
    assert Plan.from_json(content) == plan
    content["compiled"].pop(COMPILED)
    with pytest.raises(ValueError, match="^compiled: got "):
        Plan.from_json(content)


def test_there_is_no_time_left_to_compare(gpu: FakeGpu, monkeypatch) -> None:
    monkeypatch.setattr(SharedTrunks, "compiled_backbone", lambda *_: Compiled())
    gpu.us[COMPILED], gpu.first_s = 100.0, 28.0
    assert not first_call(budget="standard").plans[4].compiled


def test_what_is_compared_is_waited_for_while_there_is_time_to(gpu: FakeGpu, monkeypatch) -> None:
    def late(_self: object, _example: object, until: float) -> None:
        gpu.seconds = max(gpu.seconds, until)

    monkeypatch.setattr(SharedTrunks, "compiled_backbone", late)
    assert not first_call(budget="standard").plans[4].compiled and gpu.seconds == 25.0


def test_a_backbone_that_cannot_be_captured_compiled_is_no_matter(gpu: FakeGpu, monkeypatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(SharedTrunks, "compiled_backbone", fails)
    runner = first_call()
    assert not runner.plans[4].compiled and "torch.compile" not in runner.describe() and gpu.open == 1
