"""``auxhead-tune profile``: bad options, and the whole way with runners that need no GPU."""

import importlib
import json
from io import StringIO

import pytest
import torch
import torchvision
from auxhead.autotune.measuring.cuda_calls import ALLOCATIONS, SYNCHRONISATIONS
from auxhead.autotune.measuring.profiled_requests import request_profile
from auxhead.autotune.measuring.subject import own_cell
from auxhead.autotune.measuring.timers import Samples
from auxhead.autotune.profile import run as before_and_after
from auxhead.autotune.profile.run import compare, profile_records, repeated, saved_model
from auxhead.autotune.profile.tables import print_comparison
from auxhead.autotune.records.record import read_records
from auxhead.model import EagerRunner, EarlyExitNetwork, FusedAuxHead, save_checkpoint
from auxhead.model.basics.bad_input import BadInput
from auxhead.model.commands.small_resnet import BACKBONE, small_early_exit_network
from PIL import Image
from rich.console import Console
from support.command_line import tune
from support.example_models import SmallNet, needs_gpu, plain_heads
from support.example_traces import request, runtime, trace_of, two_unequal_requests
from support.pictures import whole
from support.pretended_gpu import NAME, compute_on_the_cpu
from support.simulated_cuda import simulated_events
from support.written_records import written

pytestmark = pytest.mark.usefixtures("without_interpreter")
running = importlib.import_module("auxhead.autotune.profile.run")


class FakeRunner(EagerRunner):
    """Answers eagerly, whatever kind was wanted, and remembers that it was closed."""

    made: list = []

    def __init__(self, network, arguments):
        super().__init__(network)
        self.arguments, self.closed = arguments, False
        self.made.append(self)

    def close(self):
        self.closed = True


@pytest.fixture
def fake_runners(monkeypatch):
    """Fakes in place of ``make_runner``; returns those made."""

    def make_runner(network, example_input, *, exits, batch_sizes, trunk):
        return FakeRunner(network, (exits, batch_sizes, trunk))

    monkeypatch.setattr(FakeRunner, "made", [])
    monkeypatch.setattr(before_and_after, "make_runner", make_runner)
    return FakeRunner.made


@pytest.fixture
def runners(monkeypatch, fake_runners):
    """Fakes in place of ``make_runner``, and of the GPU's timers."""
    simulated_events(monkeypatch)
    return fake_runners


@pytest.fixture
def network():
    network = EarlyExitNetwork(SmallNet(), plain_heads(), rules=0.6).eval()
    network.check_taps(torch.zeros(1, 3, 16, 16))
    return network


def test_before_and_after_on_the_cpu(tmp_path, runners, network):
    x = torch.randn(4, 3, 16, 16)
    found = compare(network, x, exits="polled", trunk="cudnn", requests=3, out=tmp_path)
    assert [runner.arguments for runner in runners] == [("polled", (4,), "cudnn")] and runners[0].closed
    for counts in found.counts.values():
        assert counts["samples"] == 4 and counts["differing"] == 0
    assert list(found.samples_by_exit) == [*SmallNet.taps, "classifier"]
    exits = network(x).exit_index
    assert list(found.samples_by_exit.values()) == [int((exits == place).sum()) for place in range(4)]
    for name in ("before", "after"):
        assert len(found.times[name].host[0]) == found.profiles[name].requests == 3
        events = json.loads((tmp_path / f"{name}.json").read_text())["traceEvents"]
        assert any(event.get("name") == "aten::conv2d" for event in events)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after.json", "before.json"]


def test_nothing_is_timed_that_answers_wrongly(tmp_path, runners, network, monkeypatch):
    right = before_and_after.with_item
    monkeypatch.setattr(before_and_after, "with_item", lambda *arguments: right(*arguments[:-1], arguments[-1].flip(0)))
    x = torch.cat([torch.randn(1, 3, 16, 16), torch.zeros(1, 3, 16, 16)])
    with pytest.raises(
        RuntimeError, match="before: .* differ from the eager network's: [12] of 2 samples.*; not timed"
    ):
        compare(network, x, exits="gated", trunk="as_is", requests=3, out=tmp_path)
    assert runners[0].closed and not list(tmp_path.iterdir())


def test_a_network_that_cannot_run_is_bad_input(tmp_path, network, monkeypatch):
    def make_runner(*_, **__):
        raise ValueError("trunk: 'cudnn' does not apply\nto float64")

    monkeypatch.setattr(before_and_after, "make_runner", make_runner)
    with pytest.raises(BadInput, match="profile: trunk: 'cudnn' does not apply to float64"):
        compare(network, torch.zeros(1, 3, 16, 16), exits="gated", trunk="cudnn", requests=3, out=tmp_path)


@pytest.fixture
def kept(tmp_path, network):
    """What records say of what was found, once written and read again."""

    def kept(found, runner="polled@as_is"):
        path = tmp_path / "records" / "profile.jsonl"
        cell = own_cell("a:b", network, torch.zeros(2, 3, 16, 16))
        written(path, *profile_records(found, cell, runner, {"gpu": "G"}))
        return read_records(path)[-2:]

    return kept


def printed(records):
    console = Console(width=80, file=StringIO())
    print_comparison(console, records)
    return console.file.getvalue()


def cells_of(text, name):
    (row,) = (line for line in text.splitlines() if line.startswith(f"│ {name} "))
    return [cell.strip() for cell in row.strip("│").split("│")][1:]


def test_the_tables_say_what_was_found(tmp_path, runners, network, kept):
    found = compare(network, torch.randn(2, 3, 16, 16), exits="polled", trunk="as_is", requests=2, out=tmp_path)
    found.profiles["before"] = request_profile(two_unequal_requests())
    steady = trace_of(
        *(event for at in (0.0, 50.0) for event in (request(at, 9.0), runtime("cudaGraphLaunch", at, 6.0)))
    )
    found.profiles["after"] = request_profile(steady)
    found.times["before"] = Samples(device=[[]], host=[[1234.0, 1234.0]], call=[[1000.0, 1000.0]])
    text = printed(kept(found))
    assert cells_of(text, "host, until the answer is there")[:2] == ["us", "1,234"]
    assert cells_of(text, "host, until the call returns")[:2] == ["us", "1,000"]
    assert "(1,234-1,234)" in text and "(1,000-1,000)" in text
    assert cells_of(text, "device, sum of kernel times") == ["us", "25.0", "0.0"]
    assert cells_of(text, "device, busy (union of kernels)") == ["us", "20.5", "0.0"]
    assert cells_of(text, "launches by the host") == ["calls", "3.50", "1"]
    assert cells_of(text, "  CUDA graphs among them") == ["calls", "1", "1"]
    assert cells_of(text, "kernels that ran") == ["kernels", "2.50", "0"]
    assert cells_of(text, "copies that ran") == ["copies", "0.50", "0"]
    assert cells_of(text, "memsets that ran") == ["memsets", "0.50", "0"]
    assert cells_of(text, "allocations, 2 requests") == ["calls", "1", "0"]
    assert cells_of(text, "waits, 2 requests") == ["calls", "1", "0"]
    assert cells_of(text, "cudaMalloc") == ["0.50", "15.0", "-", "-"]
    assert cells_of(text, "cudaGraphLaunch") == ["1", "12.0", "1", "6.0"]
    assert cells_of(text, "all") == ["5", "53.5", "1", "6.0"]
    assert "eager runner, before: 2 of 2 samples." in text
    assert "After is in a steady state" in text and not found.problems
    found.profiles["after"] = found.profiles["before"]
    text = printed(kept(found))
    assert "After is not in a steady state:" in text and "cudaMalloc allocates or frees: got 1 calls" in text
    assert len(found.problems) == 3


def test_two_records_of_one_run_are_kept(tmp_path, runners, network, kept):
    found = compare(network, torch.randn(2, 3, 16, 16), exits="gated", trunk="cudnn", requests=2, out=tmp_path)
    found.profiles["before"] = request_profile(two_unequal_requests())
    for name, us in (("before", 50.0), ("after", 5.0)):
        found.times[name] = Samples(device=[[]], host=[[2 * us, 2 * us]], call=[[us, us]])
    before, after = kept(found, "gated@cudnn")
    assert before.run == after.run and (before.kind, before.exits) == ("profile", "own")
    assert (before.variant, after.variant) == ("eager-naive-item@as_is", "gated@cudnn")
    assert (before.cell["model"], before.cell["batch"], before.cell["taps"]) == ("a:b", 2, list(SmallNet.taps))
    assert before.host_us == {"median": 100.0, "p20": 100.0, "p80": 100.0, "captures": [100.0]}
    assert before.paired == [] and before.notes == []
    assert after.paired == [{"role": "before", "variant": before.variant, "host_us": 100.0, "host_ratio": 0.1}]
    assert before.measured["call_us"] == {"median": 50.0, "p20": 50.0, "p80": 50.0}
    assert (before.measured["launches"], before.measured["allocations"]) == (3.5, 1)
    malloc = {"name": "cudaMalloc", "calls": 0.5, "host_us": 15.0}
    assert malloc in before.measured["api"] and before.correctness["samples"] == 2
    assert sum(after.protocol["samples_by_exit"].values()) == 2 and after.protocol["requests"] == 2


def test_a_checkpoint_comes_with_what_the_demo_left(tmp_path):
    network = small_early_exit_network(4)
    network.preprocessing = whole(16)
    save_checkpoint(tmp_path, network, backbone=BACKBONE, classes=tuple("abcd"))
    (tmp_path / "examples").mkdir()
    for number in range(3):
        Image.new("L", (16, 16), 255 * number // 2).save(tmp_path / "examples" / f"{number}.png")
    (network, x), made_of = saved_model(tmp_path, 5)
    assert x.shape == (5, 3, 16, 16) and network(x).label.shape == (5,)
    assert x[:, 0, 0, 0].tolist() == pytest.approx([-1, 0, 1, -1, 0], abs=0.01) and "examples" in made_of


def test_a_checkpoint_of_another_backbone_comes_as_it_is_loaded(tmp_path):
    backbone = torchvision.models.shufflenet_v2_x0_5(num_classes=3)
    network = EarlyExitNetwork(backbone, {"maxpool": FusedAuxHead(24, 3)}, example_input=torch.zeros(2, 3, 32, 32))
    network.preprocessing = whole(32)
    save_checkpoint(tmp_path, network.eval(), classes=tuple("abc"))
    (loaded, x), made_of = saved_model(tmp_path, 2, "shufflenet_v2_x0_5")
    assert len(x.unique()) > 5 and made_of == "random numbers"
    torch.testing.assert_close(loaded.logits(x), network.logits(x))
    with pytest.raises(BadInput, match="does not name a backbone of torchvision"):
        saved_model(tmp_path, 2)
    network.preprocessing = None
    save_checkpoint(tmp_path, network, classes=tuple("abc"))
    with pytest.raises(BadInput, match="was saved without preprocessing, wants to be told"):
        saved_model(tmp_path, 2, "shufflenet_v2_x0_5")


def test_a_batch_of_any_size_from_one():
    x = torch.randn(3, 4, 5, 5).to(memory_format=torch.channels_last)
    for batch in (1, 3, 7):
        y = repeated(x, batch)
        assert all(torch.equal(y[row], x[row % 3]) for row in range(batch)) and len(y) == batch
        assert y.is_contiguous(memory_format=torch.channels_last)


def test_numbers_that_are_too_small_are_told():
    for arguments in (["--requests", "1"], ["--batch", "0"]):
        result = tune("profile", "--model", "a:b", *arguments)
        assert result.exit_code == 2 and f"Invalid value for '{arguments[0]}'" in result.stderr


@pytest.fixture
def users_model(users_folder):
    """A factory in the current directory; returns how it is named."""
    (users_folder / "a_users_model.py").write_text(
        "import torch\n"
        "from auxhead.model import EarlyExitNetwork\n"
        "from support.example_models import SmallNet, plain_heads\n"
        "def factory():\n"
        "    return EarlyExitNetwork(SmallNet(), plain_heads(), rules=0.999), torch.randn(2, 3, 16, 16)\n"
    )
    return "a_users_model:factory"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device(users_model, tmp_path):
    result = tune("profile", "--model", users_model)
    assert result.exit_code == 2 and result.stdout == "" and not list(tmp_path.glob("auxhead-*"))
    assert result.stderr == (
        "Error: profile: torch sees no CUDA device here, wants one: launches and CUDA API calls are counted there\n"
    )


@pytest.mark.parametrize(
    ("problems", "status"), [([], 0), (["cudaMalloc allocates."], 1)], ids=["steady", "not steady"]
)
def test_the_command_with_the_cpu_for_a_device(tmp_path, users_model, monkeypatch, runners, problems, status):
    compute_on_the_cpu(monkeypatch, running)
    monkeypatch.setattr(before_and_after, "steady_state_problems", lambda profile: problems)
    result = tune("profile", "--model", users_model, "--exits", "gated", "--requests", 2)
    assert result.exit_code == status, result.output
    assert runners[0].arguments == ("gated", (2,), "as_is") and not runners[0].network.training
    assert result.output.startswith(f"{NAME}, torch {torch.__version__}; batches of 2, the factory's batch\n")
    assert "after: gated, trunk as_is" in result.output and "Saved in auxhead-profile:" in result.output
    records = read_records(tmp_path / "auxhead-profile" / "profile.jsonl")
    assert [record.variant for record in records] == ["eager-naive-item@as_is", "gated@as_is"]
    assert records[1].notes == problems and records[0].cell["model"] == users_model
    assert all(problem in result.output for problem in problems)


def test_exits_of_a_model_are_printed(users_model, tmp_path, monkeypatch, runners):
    compute_on_the_cpu(monkeypatch, running)
    with (tmp_path / "a_users_model.py").open("a") as file:
        file.write(
            "from support.multi_exit_models import Hidden, InAList, pool_head\n"
            "def with_exits():\n"
            "    return InAList(pool_head(8), Hidden(12), pool_head(16)), torch.randn(2, 3, 16, 16)\n"
        )
    result = tune("profile", "--model", "a_users_model:with_exits", "--requests", 2)
    assert result.exit_code == 0, result.output
    assert "Exits of the model" in result.output and "model.blocks.0" in result.output
    assert list(runners[0].network.taps) == ["model.blocks.0", "model.exits.1.norm"]
    assert "Label and exit as from the eager runner, after: 2 of 2 samples" in result.output


class TestOnAGpu:
    pytestmark = needs_gpu

    def test_the_command(self, tmp_path, users_model, fake_runners):
        result = tune("profile", "--model", users_model, "--batch", 3, "--requests", 4, "--out", "deep/er")
        assert result.exit_code == 0, result.output
        traces = sorted((tmp_path / "deep" / "er").iterdir())
        assert [path.name for path in traces] == ["after.json", "before.json", "profile.jsonl"]
        after, before = (request_profile(json.loads(path.read_text())) for path in traces[:2])
        assert before.requests == after.requests == 4
        waits = sum(before.calls_by_request(SYNCHRONISATIONS))
        assert waits >= 4 and not any(after.calls_by_request(SYNCHRONISATIONS | ALLOCATIONS))
        assert "batches of 3, the factory's batch" in result.output and "After is in a steady state" in result.output
        assert cells_of(result.output, "waits, 4 requests")[1:] == [f"{waits}", "0"]
