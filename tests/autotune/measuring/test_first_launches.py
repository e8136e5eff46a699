"""First launches of many variants: waiting for them ends, and so does a process with one that does not."""

import importlib
import subprocess
import sys
import textwrap
from types import SimpleNamespace

first_launches = importlib.import_module("auxhead.autotune.measuring.head_timing")


def test_waiting_for_a_launch_comes_to_an_end(monkeypatch):
    answers = iter([False, False, True])
    assert first_launches._ends(SimpleNamespace(query=lambda: next(answers)))
    monkeypatch.setattr(first_launches, "ENDS_S", 0.01)
    assert not first_launches._ends(SimpleNamespace(query=lambda: False))


def test_a_process_with_an_endless_launch_ends_at_once():
    """What was printed is not lost; what would take CUDA down does not run."""
    script = """
        import atexit
        from auxhead.autotune.measuring.head_timing import _leave
        atexit.register(print, "never")
        atexit.register(_leave)
        print("told")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "told\n", "")
