"""``make_runner(network, images)`` without a GPU: trunks, budgets, and where there are no graphs."""

import re
from pathlib import Path

import pytest
import torch
from auxhead.model import EagerRunner, make_runner
from auxhead.model.auto import planner
from auxhead.model.runners.capture import NotCapturable
from auxhead.model.runners.table import RUNNERS, RunnerKind
from support.planner_fakes import AS_MADE, NAMES, PLAIN, FakeGpu, Runner, first_call, images, small_network

pytestmark = pytest.mark.usefixtures("without_interpreter")


# The trunk


def test_the_best_runner_on_the_best_trunk(gpu: FakeGpu) -> None:
    gpu.times_as_long["cudnn"] = 0.8
    gpu.us["gated"] = 50.0
    with first_call() as runner:
        (plan,) = runner.plans.values()
        assert list(runner.plans) == [4] and gpu.open == 1
        assert plan.chosen.name == "gated on cudnn" and plan.plain == PLAIN
        assert list(plan.trunk_times) == ["as_is", "cudnn"]
        assert list(plan.times) == [PLAIN, *(f"{name} on cudnn" for name in NAMES)]
        assert runner.describe().splitlines() == [
            "Batch 4: gated, trunk cudnn.",
            "  40.0 us to the answer: 60.0% less time than the plain graph, overlapped (1 fork), 100.1 us.",
            "  Also measured: serial on cudnn, overlapped (1 fork) on cudnn, overlapped (2 forks) on cudnn, polled on "
            "cudnn. Left out: trunk inductor. Measured now.",
        ]
        assert "The plain graph by trunk: as_is 100.1, cudnn 80.1 us." in plan.describe()
        said = "trunk inductor left out: compiling takes longer than the 10 s of budget='quick'."
        assert said in plan.describe()
        x, network = images(3), small_network()
        assert torch.equal(runner(x).label, network(x).label)
    assert gpu.trunks == {"as_is": 1, "cudnn": 1} and gpu.open == 0


def test_a_trunk_no_faster_beyond_noise_is_not_taken(gpu: FakeGpu) -> None:
    gpu.times_as_long["cudnn"] = 0.995
    plan = first_call().plans[4]
    assert plan.chosen.trunk == "as_is" and list(plan.times) == list(NAMES) and len(plan.trunk_times) == 2
    assert [name for name, _ in gpu.made] == [PLAIN, f"{PLAIN} on cudnn", *AS_MADE[1:]]
    assert gpu.open == 1


def test_trunks_are_compared_by_their_time_on_the_device(gpu: FakeGpu) -> None:
    """The host's part is the same for all trunks, and only adds noise."""
    gpu.on_device = lambda us: 200.0 - us
    gpu.times_as_long["cudnn"] = 0.8
    assert first_call().plans[4].chosen.trunk == "as_is"


def test_inductor_is_measured_within_the_large_budget(gpu: FakeGpu) -> None:
    gpu.times_as_long |= {"cudnn": 0.8, "inductor": 0.7}
    runner = first_call(budget="thorough")
    assert runner.plans[4].chosen.name == "serial on inductor" and not runner.plans[4].left_out
    assert gpu.trunks == {"as_is": 1, "cudnn": 1, "inductor": 1}
    assert gpu.open == 1 and "Also measured: " in runner.describe() and "trunk cudnn. Measured" in runner.describe()


def test_branches_are_measured_side_by_side_where_there_are_some(gpu: FakeGpu) -> None:
    gpu.branches = True
    gpu.times_as_long |= {"cudnn": 0.8, "branched": 0.6, "inductor": 0.7}
    plan = first_call(budget="thorough").plans[4]
    assert plan.chosen.trunk == "branched" and list(plan.trunk_times) == ["as_is", "cudnn", "branched", "inductor"]
    assert gpu.trunks == {"as_is": 1, "cudnn": 1, "inductor": 1}, "it is the trunk cudnn"
    assert not plan.left_out


@pytest.mark.parametrize("kind", ["cudnn", "inductor"])
def test_a_trunk_that_cannot_be_made_is_left_out_with_the_reason(gpu: FakeGpu, kind: str) -> None:
    gpu.fails[kind] = "it failed with NotImplementedError."
    plan = first_call(budget="thorough", batch_sizes=(1, 4)).plans[4]
    assert plan.left_out == {f"trunk {kind}": "it failed with NotImplementedError."}
    assert len(plan.trunk_times) == 2 and gpu.trunks[kind] == 1, "it is tried once"


def test_a_trunk_whose_plain_graph_cannot_be_captured_is_left_out(gpu: FakeGpu) -> None:
    gpu.fails[f"{PLAIN} on cudnn"] = torch.OutOfMemoryError("no memory")
    plan = first_call().plans[4]
    assert plan.left_out["trunk cudnn"] == "no memory" and not plan.trunk_times and plan.chosen.name == PLAIN


def test_trunks_are_shared_by_batch_sizes_and_chosen_for_each(gpu: FakeGpu) -> None:
    gpu.times_as_long["cudnn"] = 0.5
    runner = first_call(batch_sizes=(1, 2))
    assert gpu.trunks == {"as_is": 1, "cudnn": 1} and gpu.open == 2
    assert runner.runners[1].trunk is runner.runners[2].trunk
    assert {plan.chosen.trunk for plan in runner.plans.values()} == {"cudnn"}


@pytest.mark.parametrize("sizes", [None, "on_demand", (1, 4)], ids=str)
def test_a_network_that_no_graph_can_hold_runs_eagerly(gpu: FakeGpu, sizes: object) -> None:
    gpu.fails[PLAIN] = NotCapturable("backbone: layer 'block1' cannot be captured in a CUDA graph")
    given = iter(sizes) if isinstance(sizes, tuple) else sizes  # of which a second look finds nothing
    runner = make_runner(small_network(), x := images(4), batch_sizes=given)
    assert isinstance(runner, EagerRunner)
    assert runner.describe().startswith("Eager: backbone: layer 'block1' cannot be captured in a CUDA graph")
    assert runner(x).label.equal(small_network()(x).label)
    assert gpu.open == 0 and len(gpu.trunks) == 1, "no other trunk is made for nothing"


@pytest.mark.parametrize("error", [RuntimeError("the device is lost"), torch.OutOfMemoryError("CUDA out of memory")])
def test_what_says_nothing_of_the_network_is_raised(gpu: FakeGpu, error: RuntimeError) -> None:
    gpu.fails[PLAIN] = error
    with pytest.raises(type(error), match=str(error)):
        first_call()
    assert gpu.open == 0


def test_what_stops_early_is_not_made_where_no_batch_leaves_early(gpu: FakeGpu) -> None:
    """It could only be slower on the example, whose time decides."""
    gpu.us |= {"polled": 10.0, "gated": 10.0, "polled (compact)": 50.0}
    torch.manual_seed(0)
    network = small_network()
    exits = network(x := images(4)).exit_index
    assert 0 < int((exits == 3).sum()) < 4
    with make_runner(network, x, batch_sizes=(2, 4), trunk="as_is", plan=None) as runner:
        for_all = dict.fromkeys(("polled", "gated"), "no batch of the example leaves early")
        assert runner.plans[4].chosen.name == "polled (compact)" and runner.plans[4].left_out == for_all
        assert "gated left out: no batch of the example leaves early." in runner.plans[4].describe()
    network.set_rules(1.0)
    gpu.made = []
    with make_runner(network, x, batch_sizes=(2, 4), trunk="as_is", plan=None) as runner:
        assert {name for name, _ in gpu.made} == {*NAMES} - {*for_all}
        nobody = {"polled (compact)": "no sample of the example leaves early"}
        assert runner.plans[2].left_out == for_all and runner.plans[4].left_out == for_all | nobody


# The budget

TOO_LATE = "too little was left of the 10 s of budget='quick'"


def test_what_does_not_fit_into_the_budget_is_left_out(gpu: FakeGpu) -> None:
    gpu.making_s = 1.5
    plan = first_call().plans[4]
    assert gpu.seconds == 7.5 and gpu.open == 1
    assert list(plan.times) == ["serial", PLAIN, "polled", "gated"] and len(plan.trunk_times) == 2
    assert plan.left_out["overlapped (2 forks)"] == TOO_LATE


def test_what_compiles_kernels_of_its_own_is_not_begun_too_late(gpu: FakeGpu) -> None:
    """On a new machine: graphs of known kernels take no time, and every other runner seconds."""
    gpu.making_s, gpu.making_s_of = 0.1, {"polled": 2.5, "gated": 3.0, "serial": 3.0, "overlapped (2 forks)": 3.0}
    gpu.first_s = 2.5
    plan = first_call().plans[4]
    assert gpu.seconds <= 10.0 and {"polled", "gated"} < set(plan.times)
    assert {"serial on cudnn", "serial"} & set(plan.left_out)


def test_the_plain_graph_is_measured_however_long_it_takes(gpu: FakeGpu) -> None:
    gpu.making_s = 20.0
    runner = first_call()
    plan = runner.plans[4]
    assert list(plan.times) == [PLAIN] and plan.chosen.name == PLAIN and gpu.open == 1
    assert plan.left_out["trunk cudnn"] == plan.left_out["gated"] == TOO_LATE
    assert set(plan.left_out) == {"trunk cudnn", "trunk inductor", *NAMES} - {PLAIN}
    assert "\n  Left out: trunk cudnn, trunk inductor, polled, gated, serial, overlapped (2 forks). Measured now." in (
        runner.describe()
    )


def test_inductor_is_not_compiled_again_where_that_takes_too_long(gpu: FakeGpu) -> None:
    """For each batch size it is compiled anew."""
    gpu.trunk_s = 14.0
    plans = first_call(batch_sizes=(1, 4), budget="thorough").plans
    assert plans[1].left_out["trunk inductor"] == TOO_LATE.replace("10 s", "60 s").replace("quick", "thorough")
    assert "trunk inductor" not in plans[4].left_out, "it was compiled for the largest"


def test_no_trunk_is_made_once_half_of_the_budget_is_over(gpu: FakeGpu) -> None:
    gpu.trunk_s = 16.0  # as it is, cudnn: then 28 s are left of 60
    plan = first_call(budget="thorough").plans[4]
    assert plan.left_out == {"trunk inductor": TOO_LATE.replace("10 s", "60 s").replace("quick", "thorough")}
    assert list(plan.trunk_times) == ["as_is", "cudnn"]


def test_a_trunk_that_was_made_is_measured_however_long_it_took(gpu: FakeGpu) -> None:
    gpu.times_as_long |= {"cudnn": 0.8, "inductor": 0.5}
    gpu.making_s, gpu.making_s_of = 1.0, {"inductor": 40.0}
    runner = first_call(budget="standard")
    plan = runner.plans[4]
    assert gpu.seconds == 43.0 and list(plan.trunk_times) == ["as_is", "cudnn", "inductor"]
    assert plan.chosen.name == f"{PLAIN} on inductor" and list(plan.times) == [PLAIN, plan.chosen.name]
    assert {*plan.left_out} == {f"{name} on inductor" for name in NAMES} - {plan.chosen.name}


def test_of_several_sizes_each_is_measured_on_the_trunks_that_it_need_not_compile_anew(gpu: FakeGpu) -> None:
    gpu.times_as_long |= {"cudnn": 0.8, "inductor": 0.5}
    gpu.making_s, gpu.making_s_of = 1.0, {"inductor": 40.0}
    plans = first_call(batch_sizes=(1, 4), budget="standard").plans
    assert list(plans[1].trunk_times) == ["as_is", "cudnn"] and plans[1].chosen.trunk == "cudnn"
    assert plans[1].left_out["trunk inductor"] == TOO_LATE.replace("10 s", "30 s").replace("quick", "standard")
    assert list(plans[4].trunk_times) == ["as_is", "cudnn", "inductor"] and plans[4].chosen.trunk == "inductor"


def test_batch_sizes_share_the_budget(gpu: FakeGpu) -> None:
    """And what one does not need the next ones have."""
    gpu.making_s = 0.6
    runner = first_call(batch_sizes=(1, 2, 3, 4), trunk="as_is")
    assert 7.0 < gpu.seconds <= 9.0 and gpu.open == 4, "energy takes a second more"
    assert all(0 < len(plan.left_out) < 5 and PLAIN in plan.times for plan in runner.plans.values())


def test_a_slow_network_is_measured_by_fewer_batches(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    measure = planner.measure
    monkeypatch.setattr(planner, "measure", lambda *given: (seen.append(len(given[1])), measure(*given))[1])
    first_call(32, batch_sizes=(2,), trunk="as_is")
    gpu.request_s = 0.004
    plan = first_call(32, batch_sizes=(2,), trunk="as_is").plans[2]
    gpu.request_s = 0.05
    first_call(32, batch_sizes=(2,), trunk="as_is")
    assert seen[0] == 16 and 1 < seen[1] < 16 and seen[2] == 1
    counted = {round(share * 2 * seen[1], 6) % 1 for share in plan.shares}
    assert counted == {0.0}, "the shares are those of the samples measured with"


# The plan file


def test_the_trunk_is_kept_in_the_file(gpu: FakeGpu, path: Path) -> None:
    gpu.times_as_long["cudnn"] = 0.8
    first = first_call(plan=path)
    second = first_call(plan=path)
    assert gpu.measured == 1 and gpu.made[-1] == ("serial on cudnn", "cudnn") and gpu.trunks["as_is"] == 1
    assert second.plans[4].trunk_times == first.plans[4].trunk_times and second.plans[4].from_file
    assert second.describe().startswith("Batch 4: serial, trunk cudnn.\n")


def test_a_plan_of_the_larger_budget_is_good_for_the_smaller_one(gpu: FakeGpu, path: Path) -> None:
    gpu.times_as_long["inductor"] = 0.5
    first_call(plan=path)
    thorough = first_call(plan=path, budget="thorough")
    assert gpu.measured == 2 and f"Measured now; not as in {path}: budget." in thorough.describe()
    quick = first_call(plan=path)
    assert gpu.measured == 2 and quick.plans[4].chosen.trunk == "inductor"


# Without CUDA


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"exits": "auto"},
        {"batch_sizes": (1, 8)},
        {"batch_sizes": "on_demand"},
        {"trunk": "auto", "budget": "thorough"},
    ],
    ids=str,
)
def test_on_the_cpu_the_eager_runner_answers_and_says_why(path: Path, options: dict[str, object]) -> None:
    network = small_network()
    runner = make_runner(network, images(4), plan=path, **options)
    assert isinstance(runner, EagerRunner) and not list(path.parent.iterdir())
    for samples in (1, 4, 9):
        x = images(samples)
        found, wanted = runner(x), network(x)
        assert torch.equal(found.label, wanted.label) and torch.equal(found.exit_index, wanted.exit_index)
    said = "the network is on cpu, and CUDA graphs need a GPU. A batch leaves it as soon as all samples are sure."
    assert runner.describe().startswith(f"Eager: {said}\n")


def test_a_network_elsewhere_than_the_example_is_refused() -> None:
    with pytest.raises(ValueError, match="network: .* is on meta, wants cpu as the example input"):
        make_runner(small_network().to("meta"), images(4))


BAD = [
    ({"budget": "endless"}, ValueError, "budget: got 'endless', wants one of 'quick', 'standard', 'thorough'"),
    ({"budget": 10}, TypeError, "budget: got int, wants one of 'quick', 'standard', 'thorough'"),
    ({"trunk": "fast"}, ValueError, "trunk: got 'fast', wants one of 'as_is', 'cudnn', 'branched', 'inductor', 'auto'"),
    ({"trunk": 1}, TypeError, "trunk: got int, wants one of 'as_is', 'cudnn', 'branched', 'inductor', 'auto'"),
    ({"batch_sizes": "often"}, ValueError, "batch_sizes: got 'often', wants positive ints; 'on_demand' goes with"),
    ({"batch_sizes": (0,)}, ValueError, "batch_sizes: got [0], wants positive ints"),
    ({"plan": 1}, TypeError, "plan: got int, wants the path of a JSON file"),
    ({"plan": "."}, ValueError, "plan: got '.', a folder, wants"),
    ({"plan": "a\0b"}, ValueError, "plan: got 'a\\x00b', with a null character, wants"),
]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_bad_options(request: pytest.FixtureRequest, on_gpu: bool) -> None:
    if on_gpu:
        request.getfixturevalue("gpu")
    network = small_network()
    for options, kind, message in BAD:
        with pytest.raises(kind, match="^" + re.escape(message)):
            make_runner(network, images(4), **options)


ONLY_AUTO = [
    ({"plan": "plan.json"}, "plan: got 'plan.json' with exits='{}', wants 'auto': only 'auto' has a plan"),
    ({"budget": "thorough"}, "budget: got 'thorough' with exits='{}', wants 'standard': only 'auto' measures"),
    (
        {"trunk": "auto"},
        "trunk: got 'auto' with exits='{}', wants one of ['as_is', 'cudnn', 'branched', 'inductor']: only",
    ),
    ({"batch_sizes": "on_demand"}, "batch_sizes: got 'on_demand', wants positive ints; 'on_demand' goes with"),
]


@pytest.mark.parametrize("exits", RUNNERS)
def test_only_auto_measures_and_adds_sizes(exits: str) -> None:
    for options, message in ONLY_AUTO:
        with pytest.raises(ValueError, match="^" + re.escape(message.format(exits))):
            make_runner(small_network(), images(4), exits=exits, **options)


def test_an_explicit_runner_has_the_backbone_as_it_is_and_the_size_of_the_example(monkeypatch) -> None:
    asked = []

    def overlapped(_network: object, _example: object, **options: object) -> Runner:
        asked.append(options)

    monkeypatch.setattr(RunnerKind, "imported_class", lambda _kind: overlapped)
    make_runner(small_network(), images(4), exits="overlapped")
    assert asked == [{"batch_sizes": [4], "trunk": "as_is"}]
