"""Networks, pictures and folders for several processes that answer, calibrate and train together."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from auxhead.model import EarlyExitNetwork, FusedAuxHead, calibrate_network, save_checkpoint
from PIL import Image
from support.launched_ranks import start_server
from support.pictures import whole, write_image_folder
from torch import nn

OWN = """
import torch
from torch import nn
from auxhead.model import EarlyExitNetwork, FusedAuxHead

def make():
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU())
    return nn.Sequential(first, nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()), nn.Flatten(), nn.Linear(8 * 25, 2))

def make_network():
    return EarlyExitNetwork(make(), {"0": FusedAuxHead(8, 2)}), torch.zeros(2, 3, 16, 16)
"""
#: Modules that commands import when they run, seconds each.
IMPORTED_LATE = (
    "auxhead.plots.figures.calibration", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg",
    "auxhead.model.commands.train_run", "torchvision.datasets",
)  # fmt: skip
#: Of each command, those of every test; the pictures are 16 pixels wide, of two classes.
INFER = ("infer", "net", "pictures", "--backbone", "own:make", "--device", "cpu", "--batch", 4)
CALIBRATE = ("calibrate", "net", "--backbone", "own:make", "--device", "cpu", "--data", "pictures")
TRAIN = ("train", "--model", "own:make_network", "--device", "cpu", "--data", "pictures")


def on(device: str, command: Sequence[object]) -> list[object]:
    """Return one of the commands above for another device."""
    place = command.index("--device") + 1
    return [*command[:place], device, *command[place + 1 :]]


def answers_of(file: Path) -> list[dict]:
    """Return the lines that ``auxhead infer`` has written."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def serve() -> None:
    """Start the server of processes; torch is on one thread there, since answers are compared by bits."""
    path = [entry for entry in sys.path if entry]
    environment = {"PYTHONPATH": ":".join(path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    preload = [
        "support.rank_faults",
        "support.replica_cases",
        "support.pipeline_ranks",
        "support.pipeline_failures",
        *IMPORTED_LATE,
    ]
    start_server(preload, environment)


def saved_by_ranks(function: Callable[[int, str], None], folder: Path, ranks: int) -> list[Any]:
    """Return what each of some processes has saved, which run a function of their number and a folder."""
    if not dist.is_gloo_available():
        pytest.skip("needs gloo")
    serve()  # spawned, each would import everything again
    torch.multiprocessing.start_processes(function, (str(folder),), ranks, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def write_case(folder: Path, per_class: int = 15) -> Path:
    """Write a checkpoint, its source and pictures into a folder that processes run in."""
    folder.mkdir()
    (folder / "own.py").write_text(OWN)
    write_image_folder(folder / "pictures", per_class=per_class)
    scope: dict = {}
    exec(OWN, scope)
    network = EarlyExitNetwork(scope["make"](), {"0": FusedAuxHead(8, 2)})
    train_on_stripes(network)
    network.set_rules(0.96)
    network.preprocessing = whole(16)
    save_checkpoint(
        folder / "net",
        network.eval(),
        backbone="own:make",
        classes=("lying", "standing"),
    )
    return folder


def copied(folder: Path, name: str) -> Path:
    """Return a copy of a case, beside it."""
    return Path(shutil.copytree(folder, folder.parent / name))


def break_picture(path: Path) -> None:
    """Make a file that is no picture, and as long as it was."""
    path.write_bytes(bytes(path.stat().st_size))


def left_over(folder: Path) -> list[Path]:
    """Return what an unfinished file would have left behind."""
    return [path for path in folder.rglob(".*")]


def train_on_stripes(network: EarlyExitNetwork, steps: int = 25) -> None:
    """With much noise, so that some samples leave and some do not; class 0 is "lying"."""
    generator = torch.Generator().manual_seed(0)
    wave = torch.where(torch.arange(16) // 2 % 2 > 0, 0.57, -0.69)
    lying = wave[:, None].expand(3, 16, 16)
    x = torch.stack([lying, lying.transpose(1, 2)]) + 0.2 * torch.randn(32, 2, 3, 16, 16, generator=generator)
    x, y = x.flatten(0, 1), torch.arange(2).repeat(32)
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for _ in range(steps):
        loss = sum(nn.functional.cross_entropy(logits, y) for logits in network.logits(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def write_other_picture(path: Path) -> None:
    """Write another picture under the same name."""
    pixels = np.random.default_rng(1).integers(0, 256, (16, 16, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(path)


def calibrate_in_a_group(rank: int, ranks: int, folder: str) -> None:
    """Calibrate in a process group of a caller's own, with a sharded loader, too; a file gets what was found."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if ranks > 1:
        dist.init_process_group("gloo", f"file://{folder}/rendezvous", world_size=ranks, rank=rank)
    torch.manual_seed(0)
    scope: dict = {}
    exec(OWN, scope)
    network = scope["make_network"]()[0].eval()
    x, y = torch.randn(90, 3, 16, 16), torch.arange(2).repeat(45)
    refused = ""
    if ranks > 1:
        try:
            calibrate_network(network, [(x[rank::ranks], y[rank::ranks])], max_work=0.9)
        except ValueError as error:
            refused = str(error)
    report = calibrate_network(network, list(zip(x.split(8), y.split(8), strict=True)), max_work=0.9)
    rules = [head.rule.threshold for head in network.exit_heads]
    Path(folder, f"{rank}-of-{ranks}.json").write_text(json.dumps([report.to_json(), rules, refused]))
    if ranks > 1:
        dist.destroy_process_group()
