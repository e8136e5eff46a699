"""What ``make_runner(network, images)`` remembers, and shows while it measures; without a GPU."""

import os
from pathlib import Path

import pytest
import torch
from auxhead.model import AutoRunner, make_runner
from auxhead.model.auto import candidates
from auxhead.model.trunk import timed_convolutions
from auxhead.model.trunk.timed_convolutions import asked_once
from support.example_models import SmallNet
from support.planner_fakes import FakeGpu, first_call, images, small_network

pytestmark = pytest.mark.usefixtures("without_interpreter")


def default(
    samples: int = 4, dtype: torch.dtype = torch.float32, threshold: float = 0.5, **options: object
) -> AutoRunner:
    """Make a runner as people first do, of the same network each time."""
    torch.manual_seed(0)
    return make_runner(small_network(threshold=threshold).to(dtype), images(samples).to(dtype), **options)


def plans_remembered() -> list[Path]:
    return [*Path(os.environ["XDG_CACHE_HOME"]).rglob("*.json")]


def test_by_default_half_a_minute_is_taken_once_and_what_was_chosen_is_remembered(gpu: FakeGpu) -> None:
    gpu.times_as_long["inductor"] = 0.5
    first = default()
    assert first.plans[4].chosen.trunk == "inductor" and gpu.measured == 1
    (path,) = plans_remembered()
    assert path.parent.parts[-2:] == ("auxhead", "plans")
    second = default()
    assert gpu.measured == 1 and second.plans[4].from_file and f"From {path}, measured on " in second.describe()


@pytest.mark.parametrize("always", [False, True], ids=["in time at last", "never in time"])
def test_a_plan_made_in_a_hurry_is_looked_at_once_more(gpu: FakeGpu, always: bool) -> None:
    gpu.times_as_long["inductor"] = 0.5
    gpu.making_s_of["cudnn"] = 20.0  # half of the time has to be left for compiling
    first = default()
    assert first.plans[4].hurried and "trunk inductor" in first.plans[4].left_out
    assert "Measured now, in a hurry: the next process looks once more; " in first.describe()
    gpu.making_s_of["cudnn"] = 20.0 if always else 0.0
    second = default()
    assert gpu.measured == 2 and not second.plans[4].hurried and "hurry" not in second.describe()
    assert (second.plans[4].chosen.trunk == "inductor") != always
    assert default().plans[4].from_file and gpu.measured == 2


@pytest.mark.parametrize("hurried", [False, True])
def test_the_next_process_chooses_layers_as_the_first(gpu: FakeGpu, monkeypatch, hurried: bool) -> None:
    asked, layers = [], ["layer"]
    gpu.making_s_of["cudnn"] = 20.0 if hurried else 0.0
    begin = candidates.begin_trunk

    def begin_and_ask(*given):
        assert asked_once(layers[0], lambda: asked.append(given) is None, torch.device("cpu"))
        return begin(*given)

    monkeypatch.setattr(candidates, "begin_trunk", begin_and_ask)
    for measured in (1, 1 + hurried, 1 + hurried):
        monkeypatch.setattr(timed_convolutions, "_is_sooner", {})  # as a new process has it
        (plan,) = default().plans.values()
        assert [*plan.sooner.values()] == [True] and len(asked) == 1 and gpu.measured == measured
    for layers[0] in ("another layer", "layer", "another layer"):  # which was not asked before: it is kept, too
        monkeypatch.setattr(timed_convolutions, "_is_sooner", {})
        (plan,) = default().plans.values()
        assert len(plan.sooner) == 2 and len(asked) == 2 and plan.from_file and gpu.measured == 1 + hurried


def test_who_has_less_time_does_not_look_once_more(gpu: FakeGpu) -> None:
    """It would find less, and put that in the place of the plan."""
    gpu.times_as_long["inductor"] = 0.5
    gpu.making_s_of["cudnn"] = 20.0
    first = default()
    assert first.plans[4].hurried
    gpu.making_s_of["cudnn"] = 0.0
    assert default(budget="quick").plans[4].from_file and gpu.measured == 1
    assert default().plans[4].chosen.trunk == "inductor" and gpu.measured == 2


def test_each_network_and_batch_has_a_plan_of_its_own(gpu: FakeGpu) -> None:
    default()
    default(samples=2)
    default(dtype=torch.float64)
    assert gpu.measured == 3 and len(plans_remembered()) == 3
    default()
    assert gpu.measured == 3
    default(threshold=0.7)
    assert gpu.measured == 4 and len(plans_remembered()) == 3, "of other rules: measured anew, in the same file"


@pytest.mark.parametrize("change", ["stride", "forward"])
def test_another_network_of_the_same_layers_and_parameters_has_a_plan_of_its_own(gpu: FakeGpu, change: str) -> None:
    class Other(SmallNet):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1.0

    Other.__qualname__, Other.__module__ = SmallNet.__qualname__, SmallNet.__module__
    torch.manual_seed(0)
    network = small_network()
    make_runner(network, images(4))
    if change == "stride":
        network.backbone.block2[0].stride = (3, 3)
    else:
        network.backbone.__class__ = Other
    torch.manual_seed(0)
    assert not make_runner(network, images(4)).plans[4].from_file and gpu.measured == 2


def test_what_lies_where_plans_are_kept_ends_no_call(gpu: FakeGpu, tmp_path: Path, monkeypatch) -> None:
    default(budget="quick")
    (path,) = plans_remembered()
    path.unlink()
    path.mkdir()
    assert default(budget="quick").describe().endswith("Measured now.") and path.is_dir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert default(budget="quick").describe().endswith("Measured now.") and not [*tmp_path.iterdir()]


def test_nothing_is_remembered_if_not_wanted_or_where_nothing_can_be(gpu: FakeGpu, tmp_path: Path, monkeypatch) -> None:
    default(plan=None)
    assert not plans_remembered()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for measured in (2, 3):
        assert default().describe().endswith("Measured now.")
        assert gpu.measured == measured


def test_the_cache_folder_is_that_of_the_user(gpu: FakeGpu, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    default()
    assert len([*(tmp_path / ".cache" / "auxhead" / "plans").iterdir()]) == 1


def test_a_terminal_shows_what_is_under_way_and_nothing_else_does(gpu: FakeGpu, monkeypatch, capsys) -> None:
    first_call()
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # a console takes it for a terminal
    first_call(budget="standard")
    shown = capsys.readouterr().err
    assert "make_runner: batch 4: compiling the trunk 'inductor'; " in shown and " s left of the 30 s of" in shown
    assert "measuring 6 runners" in shown or "measuring 5 runners" in shown
