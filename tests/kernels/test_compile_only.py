"""What compiles for a GPU compiles anywhere; so CI sees it without one."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

#: How often a head of each kind waits for what others send.
WAITS = {
    "one program a sample": 0,
    "split, the last to arrive adds up": 0,
    "split, the last one waits": 1,
    "tiles of a sample": 2,
    "tiles of 16 samples": 2,
    "tiles of 16 samples, weight in shared memory": 2,
    "tiles that share the features": 2,
    "few programs for all": 2,
    "tiles of 16 samples, maps in 4 parts": 3,
}


def printed(script, folder, *arguments):
    """What a script prints that has Triton's compiler, and an empty cache of it in ``folder``."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    path = Path(__file__).parents[1] / "support" / script
    done = subprocess.run(
        [sys.executable, path, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


#: Kilobytes of shared memory that a program may have, by compute capability: of A100, RTX 3090, L4 and RTX 4090, B200,
#: RTX 5090 (CUDA C++ Programming Guide, technical specifications per compute capability).
SHARED_KB = {"80": 163, "86": 99, "89": 99, "100": 227, "120": 99}


@pytest.mark.parametrize("capability", SHARED_KB)
def test_heads_compile_for_gpus_they_were_not_measured_on(capability, tmp_path):
    """As the rule launches them, which knows an H200 alone."""
    made = printed("compiled_elsewhere_offline.py", tmp_path, capability)
    assert len(made) == 8 and 0 < max(made.values()) <= 1024 * SHARED_KB[capability]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return printed("compiled_offline.py", tmp_path_factory.mktemp("cubin"))


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("way", WAITS)
def test_every_way_to_launch_a_head(kernels, way, heads):
    """Triton may repeat a wait for each layout that its numbers are used in: right, but several times as slow."""
    made = kernels[f"{way}, {heads} of them"]
    assert made["waits"] == heads * WAITS[way]
    assert made["REG"] <= 128 and made["STACK"] <= 64, "or two programs of 8 warps would not fit on a multiprocessor"


@pytest.mark.parametrize("heads", [1, 2])
def test_the_weight_is_read_ahead_into_shared_memory(kernels, heads):
    copies = [
        kernels[f"tiles of 16 samples{more}, {heads} of them"]["copies"] for more in ("", ", weight in shared memory")
    ]
    assert copies[1] >= copies[0] + 3 * heads, "for two steps before the loop and one in it"


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("way", WAITS)
def test_no_warp_is_left_in_pieces(kernels, way, heads):
    assert kernels[f"{way}, {heads} of them"]["torn warps"] == 0


def test_every_way_is_compiled(kernels):
    named = {name for name in kernels if "recorded" not in name}
    assert named == {f"{way}, {heads} of them" for way in WAITS for heads in (1, 2)}


def test_only_what_is_recorded_reads_the_clock(kernels):
    """At its start and end, and the multiprocessor: nobody pays for residency who has not asked for it."""
    recorded = {name for name in kernels if "recorded" in name}
    assert len(recorded) == 2
    assert {name: made["clocks"] for name, made in kernels.items()} == {
        name: 3 * (name in recorded) for name in kernels
    }


def test_what_another_process_compiled_is_found(tmp_path):
    """Two heads alone, one of them begun twice, and the last launch of a network; others where they are launched."""
    assert printed("compile_ahead_offline.py", tmp_path) == [0, 3, 3, 4, 5]


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
            printed, complaints = begun.communicate(timeout=60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(begun.pid, signal.SIGKILL)
    assert (begun.returncode, printed, complaints) == (0, "interrupted\n", "")


INTERRUPTED = """
import os
import time
from auxhead.autotune.heads.compile_ahead import CompileAhead

os.sched_getaffinity = lambda _process: range(8)
if __name__ == "__main__":
    try:
        with CompileAhead(90) as ahead:
            for ended in [ahead._pool.submit(time.sleep, 0.1) for _ in range(JOBS)]:
                ended.result()
            print("begun", flush=True)
            time.sleep(1000)
    except KeyboardInterrupt:
        print("interrupted")
"""


def descendants(pid):
    """Return the processes that a process made, those that these made, and so on."""
    made = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return made + [one for child in made for one in descendants(child)]


ENDLESS = """
import time
from auxhead.autotune.heads.compile_ahead import CompileAhead

if __name__ == "__main__":
    with CompileAhead(90) as ahead:
        ahead._pool.submit(time.sleep, 0).result()
        print("begun", flush=True)
        time.sleep(1000)
"""


def test_processes_that_end_at_once_stop_nobody(tmp_path):
    """Killed for lack of memory, say, while the others start; what launches compiles then."""
    pytest.importorskip("triton")
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    assert subprocess.run([sys.executable, script], env=environment).returncode == 0


BROKEN = """
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from auxhead.autotune.heads.compile_ahead import CompileAhead

def submit(*_):
    raise BrokenExecutor("a process in the pool was terminated")

ProcessPoolExecutor.submit = submit
with CompileAhead(90) as ahead:
    ahead.begin(["a launch"])
    ahead.finish(["a launch"])
"""
