"""Nsight Compute's tier without a GPU: what ncu lists is read and given to launches, and what goes wrong is said."""

import csv
import importlib
import io
import json
import os
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from auxhead.autotune.footprint.nsight_compute import METRIC, count_active, read_percent
from auxhead.autotune.measuring.cells import NEVER, Cell
from auxhead.autotune.measuring.occupancy import Active
from support.footprint_fakes import CELL, FORKS, measured, shapes

counting = importlib.import_module("auxhead.autotune.footprint.nsight_compute")
launching = importlib.import_module("auxhead.autotune.footprint.launches")

DEVICE = torch.device("cuda", 0)
COLUMNS = ("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size",
           "Grid Size", "Device", "CC", METRIC)  # fmt: skip
PERMISSION = """==PROF== Connected to process 4243 (/usr/bin/python3.12)
==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the target \
device 0.
==PROF== Disconnected from process 4243
==WARNING== No kernels were profiled.
"""
CRASHED = "Traceback (most recent call last):\n  File ...\ntorch.OutOfMemoryError: CUDA out of memory.\n\n"


def listing(cells, unit="%"):
    """What ncu writes of launches, with the percent of each."""
    launch = ("4243", "python3.12", "127.0.0.1", "exit_kernel", "1", "7", "(128, 1, 1)", "(48, 1, 1)", "0", "9.0")
    said = io.StringIO()
    said.write("==PROF== Connected to process 4243 (/usr/bin/python3.12)\n")
    said.writelines(f'==PROF== Profiling "exit_kernel" - {n}: 0%....50%....100% - 1 pass\n' for n in range(len(cells)))
    said.write("==PROF== Disconnected from process 4243\n")
    table = csv.writer(said, quoting=csv.QUOTE_ALL, lineterminator="\n")
    table.writerow(COLUMNS)
    table.writerow([""] * (len(COLUMNS) - 1) + [unit])
    table.writerows((place, *launch, cell) for place, cell in enumerate(cells))
    return said.getvalue()


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Install an ncu that writes ``said``, if anything, prints and exits as told; returns how it was called."""

    def install(said=None, printed="", status=0, then=""):
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "said").write_text(said or "")
        (folder / "printed").write_text(printed)
        program = folder / "ncu"
        writes = "" if said is None else f'cp "{folder}/said" "$2"'
        program.write_text(
            f'#!/bin/sh\nprintf "%s\\n" "$@" > "{folder}/called"\nwhile [ "$1" != --log-file ]; do shift; done\n'
            f'{writes}\ncat "{folder}/printed"\nshift 2\n{then}\nexit {status}\n'
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
        return folder / "called"

    return install


def test_every_launch_gets_its_own_percent(ncu):
    found = measured(fails="64 registers")
    footprints = list(found.occupied)
    percent = [0.25 * place for place in range(2 * len(footprints))]
    called = ncu(listing(percent))
    counted = count_active(CELL, found, DEVICE)
    assert counted.absent is None and list(counted.active) == footprints
    assert counted.active[footprints[3]] == [Active(1.5), Active(1.75)], "two launches of each, in order"
    *options, python, _, module, asked = called.read_text().splitlines()
    for option, value in (("--clock-control", "none"), ("--profile-from-start", "off"), ("--metrics", METRIC)):
        assert options[options.index(option) + 1] == value
    assert (python, module) == (sys.executable, "auxhead.autotune.footprint.launches")
    asked = json.loads(asked)
    assert Cell.from_json(asked["cell"]) == CELL and asked["forks"] == list(FORKS) and asked["device"] == "cuda:0"
    assert asked["names"] == [one.name for one in footprints] and "64 registers" not in asked["names"]


ALL = 2 * len(measured().occupied)


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ({"said": PERMISSION}, "counted 0 of {} launches: ERR_NVGPUCTRPERM - The user does not have permission to"),
        (
            {"said": "==ERROR== The application returned an error code (1).\n", "printed": CRASHED, "status": 1},
            "counted 0 of {} launches: The application returned an error code (1). torch.OutOfMemoryError: CUDA out of",
        ),
        (
            {"printed": "==ERROR== unrecognised option '--csv'.\n", "status": 1},
            "launches: unrecognised option '--csv'.",
        ),
        ({"said": listing([6.25] * ALL), "status": 3}, "counted {0} of {0} launches: exit status 3"),
        ({"said": listing([6.25] * (ALL - 1))}, f"counted {ALL - 1} of {{}} launches"),
        ({"said": listing([6.25] * (ALL + 1))}, f"counted {ALL + 1} of {{}} launches"),
        ({"said": listing(["n/a", *[6.25] * (ALL - 1)])}, f"counted {ALL - 1} of {{}} launches"),
    ],
    ids=["no permission", "crashed", "another ncu", "exit status", "too few", "too many", "not a number"],
)
def test_what_goes_wrong_is_said_in_one_line(ncu, does, says):
    ncu(**does)
    counted = count_active(CELL, measured(), DEVICE)
    assert counted.active == {} and counted.absent.startswith("Nsight Compute's tier is absent: ncu ")
    assert says.format(ALL) in counted.absent and "\n" not in counted.absent


def test_no_ncu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert count_active(CELL, measured(), DEVICE) == (
        {},
        "Nsight Compute's tier is absent: there is no ncu on the PATH.",
    )


def test_an_ncu_that_does_not_start(ncu):
    program = ncu().parent / "ncu"
    program.write_text("#!/no/such/shell\n")
    assert count_active(CELL, measured(), DEVICE).absent.endswith("does not start (No such file or directory).")


def test_an_ncu_that_hangs_ends_with_what_it_has_started(ncu, monkeypatch, tmp_path):
    monkeypatch.setattr(counting, "TIMEOUT_S", 1)
    ncu(listing([6.25] * ALL), then=f"sleep 600 &\necho $! > {tmp_path}/pid\nwait")
    assert count_active(CELL, measured(), DEVICE).absent.endswith("ncu took more than 1 s.")
    state = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    ends_by = time.monotonic() + 10
    while state.exists() and ") Z " not in state.read_text():
        assert time.monotonic() < ends_by, "what ncu has started runs on"
        time.sleep(0.01)


def test_a_factory_is_found_where_the_command_is_run(ncu, monkeypatch, tmp_path):
    (tmp_path / "factory_of_footprints.py").write_text("def make():\n    raise RuntimeError('called in ' + __name__)\n")
    monkeypatch.chdir(tmp_path)
    ncu("", then='exec "$@"')
    cell = Cell("factory_of_footprints:make", "float16", 1, 10, "own", tuple(shapes()))
    assert count_active(cell, measured(), DEVICE).absent.endswith("RuntimeError: called in factory_of_footprints")


@pytest.mark.parametrize(
    ("said", "percent"),
    [
        (listing([6.25, 0, 100]), [6.25, 0.0, 100.0]),
        (listing([0.0625], unit="inst"), []),
        (listing(["nan", "100.5", "-1", ""]), []),
        (listing([]), []),
        (PERMISSION, []),
        ("", []),
        (",".join(COLUMNS), []),
    ],
    ids=["percent", "another unit", "no percent", "no launches", "no results", "nothing", "names only"],
)
def test_what_ncu_lists(said, percent):
    assert read_percent(said) == percent


@pytest.mark.parametrize("model", ["resnet18", "mine.module:make"])
def test_the_launches_that_are_counted(monkeypatch, model):
    done = []
    subject = SimpleNamespace(
        example=torch.zeros(1),
        exits=lambda pattern: done.append(pattern) or nullcontext(),
        network=SimpleNamespace(taps=tuple(shapes())),
    )

    class Network:
        heads = [SimpleNamespace(shape=shape) for shape in shapes().values()]

        def __init__(self, of, trunk):
            self.subject = of

        def launch(self, configs, point, which):
            done.append((configs, point, which))

    @contextmanager
    def profile():
        done.append("counts")
        yield
        done.append("ends")

    monkeypatch.setattr(launching, "HeadsInSitu", Network)
    monkeypatch.setattr(launching, "build_subject", lambda cell, device: done.append((cell, device)) or subject)
    monkeypatch.setattr(launching, "load_subject", lambda spec: done.append(spec) or subject)
    monkeypatch.setattr(torch.cuda.profiler, "profile", profile)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: done.append("waits"))
    cell = {**CELL.as_json(), "model": model}
    launching.launch_counted(cell, "cuda:1", FORKS, ("16 SMs", "same priority"))
    by_name = {one.name: one for one in measured().footprints}
    expected = [
        (dict(by_name[name].configs), by_name[name].point, tuple(shapes())[:3]) for name in ("16 SMs", "same priority")
    ]
    made = (CELL, torch.device("cuda", 1)) if model == "resnet18" else model
    assert done == [made, NEVER, *expected, "waits", "counts", *expected, "waits", "ends"]
