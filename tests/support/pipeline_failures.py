"""Ranks of the tests of pipelines with which something goes wrong, mostly with the last; see ``pipeline_ranks``."""

import os
import signal
import sys
import time
from collections.abc import Callable

import torch
from auxhead.model import EarlyExitNetwork, pipelined
from auxhead.model.parallel.pipeline import pipelined as set_up
from auxhead.model.parallel.pipeline.stage import Stage
from support.pipeline_ranks import batch_of, normed
from torch import Tensor, nn


def _run(change: Callable[[EarlyExitNetwork], None] = lambda _: None, **options: object) -> None:
    """Ask two times; the last rank is not as the others are."""
    network = normed()
    network.set_rules(1.0)
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        change(network)
    example = batch_of("plain", 8)
    with pipelined(network, example, split_size=2, **{"timeout_s": 5.0, **options}) as run:  # type: ignore[arg-type]
        for _ in range(2):
            run(example if run.is_first else None)
    print("done")


def _on_fifth_micro_batch(act: Callable[[], object]) -> Callable[[EarlyExitNetwork], None]:
    def change(_: EarlyExitNetwork) -> None:
        original, steps = Stage._compute, []

        def compute(self: Stage, *given: object) -> object:
            steps.append(1)
            if len(steps) == 5:
                act()
            return original(self, *given)  # type: ignore[arg-type]

        Stage._compute = compute  # type: ignore[method-assign]

    return change


def fails_in_a_layer() -> None:
    _run(_on_fifth_micro_batch(lambda: torch.zeros(2, 3) @ torch.zeros(2, 3)))


def dies() -> None:
    _run(_on_fifth_micro_batch(lambda: os.kill(os.getpid(), signal.SIGKILL)))


def _hits_the_host(number: int) -> Callable[[], None]:
    """Return what sends a signal to all of the own host: the agent of torchrun and this process."""

    def hit() -> None:
        os.kill(os.getppid(), number)
        os.kill(os.getpid(), number)

    return hit


def first_host_freezes() -> None:
    """The one that has torchrun's store, which nobody answers for then."""
    if os.environ["RANK"] == "0":
        _on_fifth_micro_batch(_hits_the_host(signal.SIGSTOP))(normed())
    _run()


def hangs_in_a_layer() -> None:
    _run(_on_fifth_micro_batch(lambda: time.sleep(60)), timeout_s=2.0)


def other_parameters() -> None:
    def change(network: EarlyExitNetwork) -> None:
        with torch.no_grad():
            network.heads[0].linear.bias[0] += 1

    _run(change)


def no_such_device() -> None:
    device = "cuda:7" if os.environ["RANK"] == "1" else "cpu"
    _run(device=device)


def reads_a_number() -> None:
    def change(network: EarlyExitNetwork) -> None:
        pool = network.backbone[2].forward
        network.backbone[2].forward = lambda x: pool(x) if bool(x.sum() > 0) else -pool(x)

    _run(change)


class _Shifting(nn.Module):
    """Keeps what no state_dict has."""

    def __init__(self, shift: float, number: float) -> None:
        super().__init__()
        self.number = number
        self.register_buffer("shift", torch.tensor([shift]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.shift).mean((2, 3), keepdim=True) * self.number


def unlike() -> None:
    """Argument: what of the last rank's network is another one."""
    other = {sys.argv[1]} if os.environ["RANK"] == "1" else set()
    network = normed()
    network.backbone[2] = _Shifting(2.0 if "buffer" in other else 1.0, 2.0 if "number" in other else 1.0).eval()
    network.exit_heads[0].return_probs = "probs" not in other
    with pipelined(network, batch_of("plain", 8), split_size=2, timeout_s=5.0) as run:
        run(batch_of("plain", 8) if run.is_first else None)


def other_heads() -> None:
    """Changed on the first rank, which is refused and nobody hears of it; then on the last one."""
    network, example = normed(), batch_of("plain", 8)
    with pipelined(network, example, split_size=2, timeout_s=5.0) as run:
        change = network.heads[0].linear.register_forward_hook
        if run.is_first:
            handle = change(lambda *_: None)
            try:
                run(example)
            except RuntimeError as error:
                assert str(error).startswith("heads['0']: its linear was given other hooks")
            else:
                raise AssertionError("was answered")
            handle.remove()
        run(example if run.is_first else None)
        if not run.is_first:
            change(lambda *_: None)
        run(example if run.is_first else None)


def raises_while_another_waits_elsewhere() -> None:
    """NCCL's communicators end together, so that one rank's waits for the other's. Argument: the device."""
    device = sys.argv[1] if sys.argv[1:] else "cpu"
    network, example = normed(), batch_of("plain", 8)
    if device == "cpu":
        torch.distributed.destroy_process_group = lambda *_: time.sleep(60)
    with pipelined(network, example, split_size=2, timeout_s=5.0, device=device) as run:
        run(example if run.is_first else None)
        if not run.is_first:
            raise LookupError("of the user's")
        time.sleep(60)


def is_elsewhere() -> None:
    """The last rank is in no call of its runner."""
    set_up._PATIENCE_S = 0.5
    network, example = normed(), batch_of("plain", 8)
    with pipelined(network, example, split_size=2, timeout_s=1.5) as run:
        if run.is_first:
            run(example)
        time.sleep(60)


def ends_before_the_others() -> None:
    network, example = normed(), batch_of("plain", 8)
    with pipelined(network, example, split_size=2, timeout_s=5.0) as run:
        run(example if run.is_first else None)
        if not run.is_first:
            run(None)
