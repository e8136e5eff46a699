"""Faults of one of several processes, and what makes a test wait less for them; each is called before the command."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from auxhead.model.commands import calibrate_run as calibration_run
from auxhead.model.commands import processes
from auxhead.model.commands import train_run as training_run
from auxhead.model.processes import process_group, rank_failures
from auxhead.model.saving.checkpoint import Checkpoint


def _on_second_call(act):
    """Let the second batch of images that this process reads be its last."""
    original, calls = Checkpoint.read_images, []

    def read_images(self, paths):
        calls.append(paths)
        if len(calls) == 2:
            act()
        return original(self, paths)

    Checkpoint.read_images = read_images


def _die():
    Path("died").touch()  # at this time
    os.kill(os.getpid(), signal.SIGKILL)


def dies():
    _on_second_call(_die)


def dies_in_training():
    training_run.show_steps = lambda *_: lambda step: _die()


def stops():
    """As a process does that hangs for good, with all its threads."""
    _on_second_call(lambda: os.kill(os.getpid(), signal.SIGSTOP))


def looks_out_for_2_seconds():
    rank_failures._SILENT_S = 2.0


def hurries():
    looks_out_for_2_seconds()
    leaves_after_2_seconds()


def cannot_connect():
    """Nor does it say so: as where packets to its port are dropped."""
    torch.distributed.init_process_group = lambda *_, **options: time.sleep(60)


def connects_within_2_seconds():
    process_group._CONNECT_S = 2.0
    leaves_after_2_seconds()


def raises():
    _on_second_call(lambda: 1 // 0)


def leaves_after_2_seconds():
    """Having failed, where another one cannot leave or has never come; else after 6 s."""
    rank_failures._LEAVE_S = 2.0


def raises_in_training():
    leaves_after_2_seconds()

    def raise_in_step(step):
        raise ZeroDivisionError("in a step")

    training_run.show_steps = lambda *_: raise_in_step


def other_version():
    processes.package_version = lambda name: "0.0.9"


def one_gpu():
    """Pretend that torch sees one."""
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda index: None
    torch.cuda.current_device = lambda: 0


def other_arguments():
    sys.argv += ["--batch", "3"]


def waits_2_seconds():
    """For the other processes to come."""
    process_group.COME_S = 2.0
    leaves_after_2_seconds()


def disk_is_full():
    def save_checkpoint(*arguments, **options):
        raise OSError(28, "no space", "model.json")

    calibration_run.save_checkpoint = save_checkpoint


if __name__ == "__main__":  # under torchrun itself: a fault of the last rank, and the command
    fault = globals()[sys.argv.pop(1)]
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        fault()
    from auxhead.model.__main__ import app

    app()
