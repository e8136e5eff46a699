"""compile_ahead.py: launches find what other processes compiled, and those end with the one that started them."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path

import pytest
from auxhead.autotune.measuring.compile_ahead import CompileAhead
from support.compiler_process import printed


def test_what_another_process_compiled_is_found(tmp_path):
    """Two heads alone, one of them begun twice, and the last launch of a network; others where they are launched."""
    found = printed("compile_ahead_and_launch.py", tmp_path, from_server=False)  # it starts a server of its own
    assert found == [0, 3, 3, 4, 5]


def test_nobody_goes_on_compiling_for_a_process_that_was_killed(tmp_path):
    """Not even those who have nothing to do: they would keep their memory for good."""
    pytest.importorskip("triton")
    if not Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists():
        pytest.skip("this system does not tell a process's children")
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as begun:
        assert begun.stdout.readline() == "begun\n"
        workers = descendants(begun.pid)
        begun.kill()
    assert len(workers) > 1
    until = time.monotonic() + 20
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < until, "they go on"
        time.sleep(0.1)


@pytest.mark.parametrize("jobs", [0, 16], ids=["while they import", "while they wait for work"])
def test_an_interrupt_ends_all_and_is_told_once(jobs, tmp_path):
    """A terminal interrupts (Ctrl-C) all processes, which are not to die of it one by one."""
    pytest.importorskip("triton")
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED.replace("JOBS", str(jobs)))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, script], start_new_session=True, **pipes) as begun:
        assert begun.stdout.readline() == "begun\n"
        os.killpg(begun.pid, signal.SIGINT)
        try:
            said, complaints = begun.communicate(timeout=60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(begun.pid, signal.SIGKILL)
    assert (begun.returncode, said, complaints) == (0, "interrupted\n", "")


INTERRUPTED = """
import os
import signal
import time
from auxhead.autotune.measuring.compile_ahead import CompileAhead

os.sched_getaffinity = lambda _process: range(8)
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
    try:
        with CompileAhead(90) as ahead:
            for ended in [ahead._pool.submit(time.sleep, 0.1) for _ in range(JOBS)]:
                ended.result()
            print("begun", flush=True)
            while True:  # Python 3.14 may go from print to one long sleep without looking for signals
                time.sleep(0.1)
    except KeyboardInterrupt:
        print("interrupted")
"""


def descendants(pid):
    """Return the processes that a process made, those that these made, and so on."""
    made = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return made + [one for child in made for one in descendants(child)]


ENDLESS = """
import time
from auxhead.autotune.measuring.compile_ahead import CompileAhead

if __name__ == "__main__":
    with CompileAhead(90) as ahead:
        ahead._pool.submit(time.sleep, 0).result()
        print("begun", flush=True)
        time.sleep(1000)
"""


def test_processes_that_end_at_once_stop_nobody(monkeypatch):
    """Killed for lack of memory, say, while the others start; what launches compiles then."""
    pytest.importorskip("triton")

    def submit(*_):
        raise BrokenExecutor("a process in the pool was terminated")

    monkeypatch.setattr(forkserver, "ensure_running", lambda: None)
    monkeypatch.setattr(ProcessPoolExecutor, "submit", submit)
    with CompileAhead(90) as ahead:
        ahead.begin(["a launch"])
        ahead.finish(["a launch"])
