"""Plans in a file, which come back as they were, under the same conditions alone; and plans in words."""

import dataclasses
import json
import math
import random
import types
import warnings
from pathlib import Path

import pytest
import torch
from auxhead.model import EarlyExitNetwork
from auxhead.model.auto import plan as plan_module
from auxhead.model.auto.candidates import Candidate
from auxhead.model.auto.pass_times import PassTimes
from auxhead.model.auto.plan import FORMAT, Plan, PlanFile, conditions_of
from support.damaged import assert_short, damaged_bytes, damaged_json
from support.example_models import SmallNet, plain_heads
from support.planner_fakes import images, small_network
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("without_interpreter")
CONDITIONS = {"GPU": "H200", "batch sizes": [8], "exit shares": {"8": [[0.5, 0.5], [0.5, 0.5]]}}
TIMES = PassTimes([100.0, 99.5], [90.0, 89.0])
PLAN = Plan(
    chosen=Candidate("overlapped", ("layer1", "layer3")),
    plain="overlapped (1 fork)",
    times={"serial": TIMES, "overlapped (1 fork)": TIMES, "overlapped (2 forks)": TIMES},
    trunk_times={"as_is": TIMES, "cudnn": TIMES},
    left_out={"gated": "no conditional nodes"},
    shares=(0.25, 0.75),
    utc="2026-01-02T03:04:05+00:00",
    joules={"overlapped (2 forks)": 0.182, "overlapped (1 fork)": 0.2},
    sooner={"0123456789abcdef": True, "f": False},
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of PLAN."""
    path = tmp_path / "plan.json"
    PlanFile(path, CONDITIONS).write({8: PLAN})
    return path


@pytest.mark.parametrize("chosen", [PLAN.chosen, Candidate("overlapped"), Candidate("polled", compact=True)], ids=str)
def test_plans_come_back_as_they_were(tmp_path: Path, chosen: Candidate) -> None:
    plan = dataclasses.replace(PLAN, chosen=chosen, times={**PLAN.times, chosen.name: TIMES})
    file = PlanFile(tmp_path / "plan.json", CONDITIONS)
    assert file.read() == {}
    file.write({8: plan, 1: PLAN})
    assert file.read() == {8: dataclasses.replace(plan, from_file=True), 1: dataclasses.replace(PLAN, from_file=True)}
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"], "nothing unfinished is left"


@pytest.mark.parametrize(
    ("conditions", "differing"),
    [
        ({**CONDITIONS, "GPU": "H100"}, ["GPU"]),
        ({**CONDITIONS, "GPU": None, "batch sizes": [1]}, ["GPU", "batch sizes"]),
        ({"GPU": "H200", "batch sizes": [8]}, ["exit shares"]),
        ({**CONDITIONS, "driver": "600"}, ["driver"]),
    ],
)
def test_other_conditions_are_named(path: Path, conditions: dict[str, object], differing: list[str]) -> None:
    file = PlanFile(path, conditions)
    assert file.read() == {} and file.differing == differing


def changed(name: str, value: object) -> str:
    content = {"format": FORMAT, "conditions": CONDITIONS, "plans": {"8": PLAN.as_json()}}
    owner, _, field = name.rpartition(".")
    (content["plans"]["8"] if owner else content)[field] = value
    return json.dumps(content)


#: Contents that are no plan.
NONE = [
    "",
    "{",
    "[]",
    "null",
    "{}",
    "\0" * 100,
    changed("format", FORMAT + 1),
    changed("conditions", None),
    changed("conditions", []),
    changed("plans", None),
    changed("plans", {"eight": PLAN.as_json()}),
    changed("plans", {"8": None}),
    changed("plan.times", {}),
    changed("plan.times", {"serial": {"host_us": [1.0]}}),
    changed("plan.times", {"serial": {"host_us": [], "device_us": []}}),
    changed("plan.plain", "polled"),
    changed("plan.chosen", {"exits": "sometimes", "forks": [], "compact": False}),
    changed("plan.chosen", {"exits": "overlapped", "forks": 1}),
    changed("plan.chosen", {"exits": "overlapped", "forks": [], "speed": 1}),
    changed("plan.chosen", {"exits": "polled", "forks": [], "compact": False}),
    changed("plan.shares", [None]),
    changed("plan.left_out", []),
    changed("plan.joules", []),
    changed("plan.joules", {"serial": None}),
    changed("plan.joules", {"serial": -0.1}),
    changed("plan.joules", {"serial": float("nan")}),
    changed("plan.hurried", 0),
    changed("plan.sooner", None),
    changed("plan.sooner", {"f": 1}),
]


def test_what_is_no_plan_is_told_of_and_written_over(path: Path) -> None:
    for text in NONE:
        path.write_text(text)
        file = PlanFile(path, CONDITIONS)
        with pytest.warns(UserWarning, match="plan.json holds no plan .*; measuring anew"):
            assert file.read() == {}, text
        file.write({8: PLAN})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert file.read()


def test_a_plan_of_an_older_format_is_measured_anew(path: Path) -> None:
    path.write_text(changed("format", FORMAT - 1))
    file = PlanFile(path, CONDITIONS)
    assert file.read() == {} and file.differing == ["format"]


def test_where_nothing_can_be_written_a_warning_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: object, _content: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plan_module, "write_json", refuse)
    file = PlanFile(path, CONDITIONS)
    with pytest.warns(UserWarning, match="plan.json: the plan is not kept .No space left on device"):
        file.write({1: PLAN})
    assert list(file.read()) == [8], "the file that was there is as it was"


def plans_in(path: Path) -> tuple[dict[int, Plan], bool]:
    """The plans, and whether a damaged file was told of."""
    file = PlanFile(path, CONDITIONS)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        plans = file.read()
    assert len(told) <= 1 and not (told and plans)
    for one in told:
        assert_short(str(one.message), path, "measuring anew")
    return plans, bool(told)


def test_any_damage(path: Path) -> None:
    whole = path.read_bytes()
    told = used = 0
    for seed in range(400):
        dice = random.Random(seed)
        path.write_bytes(damaged_bytes(whole, dice) if seed % 3 else damaged_json(json.loads(whole), dice))
        plans, of_damage = plans_in(path)
        told, used = told + of_damage, used + bool(plans)
        for plan in plans.values():
            assert plan.describe()
            times = [us for passes in plan.times.values() for us in (*passes.host, *passes.device)]
            assert all(math.isfinite(us) and us > 0 for us in times) and all(0 <= one <= 1 for one in plan.shares)
            assert all(math.isfinite(joules) and joules >= 0 for joules in plan.joules.values())
            assert isinstance(plan.chosen.compact, bool) and all(isinstance(fork, str) for fork in plan.chosen.forks)
    assert told > 200 and used > 12


# The conditions

ASKED = {"trunk": "cudnn", "budget": "quick", "batch sizes": [2]}
EXITS = {2: torch.tensor([[0, 3], [1, 3], [3, 3], [2, 0]])}


def conditions(network: EarlyExitNetwork | None = None, x: Tensor | None = None, **other: object) -> dict[str, object]:
    options = {"asked": ASKED, "exits": EXITS, **other}
    return conditions_of(network or small_network(), images(8) if x is None else x, **options)


def differing(**other: object) -> set[str]:
    before, after = conditions(), conditions(**other)
    return {name for name in before if before[name] != after[name]}


def test_they_are_the_same_for_what_is_the_same_but_for_values() -> None:
    """Another network of that structure, in JSON and back."""
    assert conditions() == conditions(small_network(seed=1))
    assert json.loads(json.dumps(conditions())) == conditions()
    network = small_network()
    network(images(3))
    network.heads[0].rule.threshold = 0.2
    network.heads[0].rule.threshold = 0.6
    assert conditions() == conditions(network)


VERSIONS = [
    ("torch.__version__", "3.0", {"torch"}),
    ("torch.version.cuda", "14.0", {"CUDA"}),
    ("torch.backends.cudnn.version", lambda: 99999, {"cuDNN"}),
    ("auxhead.model.auto.plan.package_version", lambda package: "9.9", {"triton", "auxhead"}),
    ("auxhead.model.auto.plan.driver_version", lambda: "600.1", {"driver"}),
    ("auxhead.model.auto.plan.processor_name", lambda: "a Z80", {"processor"}),
]


def test_device_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    before = conditions()
    for name, value, parts in VERSIONS:
        with monkeypatch.context() as patch:
            patch.setattr(name, value)
            after = conditions()
        assert {each for each in before if before[each] != after[each]} == parts


def test_another_gpu_or_a_part_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name, count in (("NVIDIA H200", 132), ("NVIDIA H100", 132), ("NVIDIA H200", 66)):
        properties = types.SimpleNamespace(name=name, multi_processor_count=count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device, properties=properties: properties)
        found.append(plan_module._device_conditions(torch.device("cuda", 0))["GPU"])
    assert len({*found}) == 3 and found[0] == "NVIDIA H200, 132 SMs"


def test_shares_are_told_apart_in_steps() -> None:
    """Five samples in a hundred, and the batches that they hold up."""
    few, some, many = (torch.tensor([0] * (100 - count) + [3] * count).view(1, 100) for count in (40, 41, 46))
    of_few = conditions(exits={100: few})
    assert of_few == conditions(exits={100: some}) != conditions(exits={100: many})
    in_turn, apart = (conditions(exits={2: its}) for its in (few.view(50, 2), few.view(2, 50).T))
    assert in_turn != apart, "the same samples, and fewer batches that stop"


def ruled(name: str, value: object) -> EarlyExitNetwork:
    network = small_network()
    setattr(network.heads[1].rule, name, value)
    return network


def fewer_taps() -> EarlyExitNetwork:
    heads = {tap: head for tap, head in plain_heads().items() if tap != "block1"}
    return EarlyExitNetwork(SmallNet(), heads, 0.6, example_input=images(2)).eval()


def with_another_activation() -> EarlyExitNetwork:
    network = small_network()
    network.backbone.block1[2] = nn.ReLU6(inplace=True)
    return network


def test_what_is_run() -> None:
    for other, parts in (
        ({"asked": {**ASKED, "trunk": "as_is"}}, {"trunk"}),
        ({"x": images(8)[:, :, :4]}, {"samples"}),
        ({"x": images(8).half()}, {"samples"}),
        ({"x": images(8).to(memory_format=torch.channels_last)}, {"samples"}),
        ({"exits": {4: EXITS[2]}}, {"exit shares"}),
        ({"exits": {1: EXITS[2], **EXITS}}, {"exit shares"}),
        ({"exits": {2: torch.tensor([[0, 3], [1, 3], [3, 3], [2, 3]])}}, {"exit shares"}),
        ({"exits": {2: torch.tensor([[0, 0], [1, 3], [3, 3], [2, 3]])}}, {"exit shares"}),
        *(({"network": ruled(*rule)}, {"rules"}) for rule in [("threshold", 0.61), ("temperature", 1.5)]),
        *(({"network": ruled(*rule)}, {"rules"}) for rule in [("criterion", "margin"), ("enabled", False)]),
        ({"network": fewer_taps()}, {"taps", "layers", "parameters", "rules"}),
        ({"network": small_network().bfloat16()}, {"parameters"}),
        ({"network": with_another_activation()}, {"layers", "code"}),
    ):
        assert differing(**other) == parts


# In words

PLAIN = "overlapped (1 fork)"
CANDIDATES = {
    "serial": Candidate("overlapped"),
    PLAIN: Candidate("overlapped", ("a",)),
    "polled": Candidate("polled"),
    "gated": Candidate("gated"),
}


def measured(chosen: str, **rest: float) -> Plan:
    """A plan measured with median host times in microseconds; on the device other runners are faster."""
    us = {PLAIN if name == "plain" else name: time for name, time in rest.items()}
    times = {
        name: PassTimes([time, 3 * time, time / 2], [1000 - time] * 3)  # the median is the time
        for name, time in us.items()
    }
    return Plan(CANDIDATES[chosen], PLAIN, times, {}, {}, (0.5, 0.5), "2026-01-02T03:04:05+00:00")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            measured(PLAIN, serial=100.0, plain=90.0, polled=1234.5),
            "overlapped (1 fork), measured 90.0 us to the answer: nothing is faster than this plain graph. "
            "The others: serial 100.0, polled 1,234.5 us.",
        ),
        (
            measured(PLAIN, plain=90.0, polled=89.9),
            "overlapped (1 fork), measured 90.0 us to the answer: this is the plain graph; polled, 89.9, is no faster "
            "beyond the noise.",
        ),
        (
            measured("polled", serial=101.0, plain=100.0, polled=75.0),
            "polled, measured 75.0 us to the answer: 25.0% less time than the plain graph, overlapped (1 fork), 100.0 "
            "us. The others: serial 101.0 us.",
        ),
        (
            measured("polled", plain=100.0, polled=75.0, gated=74.9),
            "polled, measured 75.0 us to the answer: 25.0% less time than the plain graph, overlapped (1 fork), 100.0 "
            "us; gated, 74.9, is no faster beyond the noise, and less simple.",
        ),
    ],
)
def test_it_says_what_was_chosen_and_why(found: Plan, said: str) -> None:
    assert found.describe() == said
    read = dataclasses.replace(found, from_file=True, left_out={"gated": "no conditional nodes."})
    assert (
        read.describe() == said.replace("measured", "measured on 2026-01-02") + " gated left out: no conditional nodes."
    )
    assert (
        found.reason() == said[said.index("measured ") + 9 : said.index(". The others")] if "others" in said else True
    )


def test_it_says_what_a_request_takes_of_energy() -> None:
    found = dataclasses.replace(measured("polled", plain=100.0, polled=75.0), joules={"polled": 0.1824, PLAIN: 1.2345})
    assert found.reason() == (
        "75.0 us and 182 mJ to the answer: 25.0% less time than the plain graph, overlapped (1 fork), "
        "100.0 us and 1,234 mJ"
    )
    found = dataclasses.replace(measured(PLAIN, plain=90.0), joules={PLAIN: 0.00764})
    assert found.reason() == "90.0 us and 7.6 mJ to the answer: nothing is faster than this plain graph"
