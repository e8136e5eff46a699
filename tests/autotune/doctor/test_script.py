"""Scripts as targets: when their requests begin, and when enough was seen; no GPU, and a profiler of no effect."""

import contextlib
import sys
import threading

import pytest
import torch
from auxhead.autotune.doctor import script
from auxhead.autotune.doctor.user_code import UserCodeError
from auxhead.model.basics.bad_input import BadInput

PROGRAM = """
import sys
import torch

setup, net, loss = torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Identity()
setup(torch.ones(1, 2))
for step in range(int(sys.argv[1])):
    loss(net(torch.ones(1, 2)))
    open("steps", "a").write(f"{step} ")
sys.exit(int(sys.argv[2]))
"""


class Profiler(contextlib.nullcontext):
    """Notes what is asked of it."""

    def __init__(self):
        super().__init__(self)
        self.steps = 0

    def step(self):
        self.steps += 1


@pytest.fixture
def written(monkeypatch, tmp_path):
    """What is written at the end, by name."""
    found = {}

    def write(profiler, watched, file):
        found.update(profiler=profiler, watched=watched, file=file)

    monkeypatch.setattr(script, "profiler", Profiler)
    monkeypatch.setattr(script, "write_trace", write)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    return found


def test_a_script_is_ended_once_enough_was_seen(written, tmp_path):
    before = list(sys.argv), list(sys.path)
    name = script.profile_script(tmp_path / "program.py", ["1000", "0"], tmp_path / "trace.json")
    assert name == "Sequential"  # the setup ran once, and the loss after it
    assert len((tmp_path / "steps").read_text().split()) == script.CALLS - 1
    assert written["profiler"].steps == 1 and written["file"] == tmp_path / "trace.json"
    watched = written["watched"]
    assert watched.requests == script.WATCHED and watched.back_to_back
    assert len(watched.samples_us) == script.TIMED and min(watched.samples_us) > 0
    assert (sys.argv, sys.path) == before


def test_garbage_collected_in_timed_requests_is_noted_with_its_line(written, tmp_path):
    collecting = PROGRAM.replace("import sys\n", "import gc, sys\n").replace("    loss(", "    gc.collect()\n    loss(")
    (tmp_path / "program.py").write_text(collecting)
    line = collecting.splitlines().index("    gc.collect()") + 1
    script.profile_script(tmp_path / "program.py", ["1000", "0"], tmp_path / "trace.json")
    seen = [one for one in written["watched"].collections if one.line == f"program.py:{line}"]
    assert [one.request for one in seen] == [*range(script.TIMED)] and {one.generation for one in seen} == {2}


SERVED = """
import queue
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
import torch

net, inbox, answers = torch.nn.Sequential(torch.nn.Linear(2, 2)), queue.Queue(), queue.Queue()

def serve():
    while True:
        x = inbox.get()
        SERVE

BEGIN
other = torch.nn.Identity()
for step in range(int(sys.argv[1])):
    ASK
    open("steps", "a").write(f"{step} ")
"""


def served(serve, begin, ask):
    return SERVED.replace("SERVE", serve).replace("BEGIN", begin).replace("ASK", ask)


THREAD = "threading.Thread(target=serve, daemon=True).start()"
IN_A_THREAD = {
    "waited for": served("answers.put(net(x))", THREAD, "inbox.put(torch.ones(1, 2)); other(answers.get())"),
    "of a pool": served("pass", "pool = ThreadPoolExecutor(1)", "other(pool.submit(net, torch.ones(1, 2)).result())"),
    "whose end is an error": served(
        "answers.put(net(x))",
        "worker = threading.Thread(target=serve, daemon=True); worker.start()",
        "inbox.put(torch.ones(1, 2))\n    while answers.empty(): assert worker.is_alive()\n    other(answers.get())",
    ),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", IN_A_THREAD)
def test_a_script_whose_module_runs_in_a_thread_is_ended_too(written, tmp_path, kind):
    (tmp_path / "program.py").write_text(IN_A_THREAD[kind])
    before = threading.enumerate()
    assert script.profile_script(tmp_path / "program.py", ["1000"], tmp_path / "trace.json") == "Sequential"
    assert len((tmp_path / "steps").read_text().split()) == script.CALLS - 1
    assert written["watched"].requests == script.WATCHED
    torch.nn.Linear(2, 2)(torch.ones(1, 2))  # no hook is left
    for thread in threading.enumerate():
        if thread.daemon and thread not in before:
            thread.join(10)


def test_too_few_requests_of_a_thread_are_told(written, tmp_path):
    (tmp_path / "program.py").write_text(IN_A_THREAD["waited for"])
    with pytest.raises(BadInput, match=rf"called Sequential {script.CALLS - 1} times"):
        script.profile_script(tmp_path / "program.py", [str(script.CALLS - 1)], tmp_path / "trace.json")
    assert not written


def test_calls_that_are_captured_begin_no_request(written, tmp_path, monkeypatch):
    """Every other call is: of 2 a step only one counts."""
    (tmp_path / "program.py").write_text(PROGRAM.replace("    loss(net", "    net(torch.ones(1, 2))\n    loss(net"))
    calls = iter(range(1_000_000))
    monkeypatch.setattr(script, "is_captured", lambda: next(calls) % 3 == 2)  # net, net, loss
    with pytest.raises(BadInput, match=rf"called Sequential {script.CALLS - 1} times"):
        script.profile_script(tmp_path / "program.py", [str(script.CALLS - 1), "0"], tmp_path / "trace.json")


@pytest.mark.parametrize("steps", [0, 1, script.CALLS - 1])
def test_too_few_requests_are_told(written, steps, tmp_path):
    with pytest.raises(BadInput, match=rf"program.py: called .*wants {script.CALLS} calls at least"):
        script.profile_script(tmp_path / "program.py", [str(steps), "0"], tmp_path / "trace.json")
    assert not written
    torch.nn.Linear(2, 2)(torch.ones(1, 2))  # no hook is left


def test_a_script_that_fails_is_told_with_its_line(written, tmp_path):
    with pytest.raises(UserCodeError, match=r"program.py raised SystemExit: 3 \(program.py:10\)$"):
        script.profile_script(tmp_path / "program.py", ["2", "3"], tmp_path / "trace.json")
    with pytest.raises(UserCodeError, match=r"raised IndexError: list index out of range \(program.py:7\)$"):
        script.profile_script(tmp_path / "program.py", [], tmp_path / "trace.json")
