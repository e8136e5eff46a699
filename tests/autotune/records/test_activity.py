"""Long commands say on a terminal what they are doing, on standard error, and nowhere else."""

import os
import pty
import subprocess
import sys
import threading
from contextlib import suppress

from auxhead.plots.records import COMMITTED

HEADS = COMMITTED / "h200/heads.jsonl"


def on_a_terminal(command, cwd):
    """What a command writes to standard output, and to standard error, a terminal."""
    terminal, side = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200"}
    shown = []

    def read():
        with suppress(OSError):  # nobody writes there any more
            while part := os.read(terminal, 65536):
                shown.append(part)

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=side, env=env, cwd=cwd) as process:
        os.close(side)
        reader = threading.Thread(target=read)
        reader.start()
        out = process.stdout.read()
        reader.join()
    os.close(terminal)
    assert process.returncode == 0, shown
    return out.decode(), b"".join(shown).decode()


def test_a_terminal_is_told_what_is_being_done(tmp_path):
    arguments, said = ["autotune", "table", str(HEADS), "--markdown"], f"Reading {HEADS}"
    command = [sys.executable, "-m", f"auxhead.{arguments[0]}", *arguments[1:]]
    out, shown = on_a_terminal(command, tmp_path)
    assert said in shown and said not in out
    plain = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert (plain.stdout, plain.stderr) == (out, "")
