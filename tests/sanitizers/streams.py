"""Script: eager requests of a small network, for PyTorch's CUDA sanitizer: ``python streams.py [planted]``.

``TORCH_CUDA_SANITIZER=1`` has to be set. The sanitizer takes an operator of ours for a read of its inputs and a write
of its outputs, and sees streams and events of PyTorch, not what the allocator hands out again. It watches operators of
the main thread alone: another thread enters its mode, and runs while this one waits, as it counts one at a time.
With ``planted`` no stream waits for another, so that rules are written while heads read them.
"""

import copy
import sys
import threading

import torch
from auxhead.model import EarlyExitNetwork
from auxhead.model.runners.runner import EagerRunner
from support.example_models import SmallNet, plain_heads
from torch import Tensor, nn

DEVICE = torch.device("cuda", 0)
TURNS = 12


class WithoutNorms(SmallNet):
    """Batch norms return empty tensors, which the sanitizer may take for each other."""

    @staticmethod
    def _block(channels: int, width: int, stride: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(channels, width, 3, stride, 1), nn.ReLU(inplace=True))


def do_not_wait_for_rules() -> None:
    """Plant the fault: heads on one stream read rules while another writes them."""
    torch.cuda.Stream.wait_stream = torch.cuda.Stream.wait_event = lambda _stream, _other: None


def ask(network: nn.Module | EagerRunner, *, stop: bool = False) -> None:
    """Ask on the current stream, which uses the batch and the answer as its own at once."""
    x = torch.randn(3, 3, 8, 8, device=DEVICE)
    answer = network(x, stop=stop)
    x += 1
    (answer.confidence + answer.label + answer.exit_index).add_(1)


def ask_from_another_thread(network: nn.Module, stream: torch.cuda.Stream) -> None:
    """Ask from beginning to end, on a stream of its own; what is raised there is raised here."""
    raised: list[BaseException] = []

    def asking() -> None:
        try:
            with torch.cuda._sanitizer.cuda_sanitizer.dispatch, torch.no_grad(), torch.cuda.stream(stream):
                ask(network)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=asking)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def main() -> None:
    """Ask a network, its copy and a runner on several streams, from two threads, under rules that change."""
    torch.manual_seed(0)
    network = EarlyExitNetwork(WithoutNorms(), plain_heads(), 0.5).to(DEVICE).eval()
    other = copy.deepcopy(network)
    callers = [torch.cuda.Stream() for _ in range(3)]
    if sys.argv[1:] == ["planted"]:
        do_not_wait_for_rules()
    asked = 0

    def beside(_head: nn.Module, _inputs: tuple[Tensor, ...]) -> None:
        nonlocal asked
        if asked % 2:
            ask_from_another_thread(other, callers[2])

    with torch.no_grad():
        torch.cuda.synchronize()  # parameters and rules are there
        for one in (network, other):
            ask(one)  # the first request makes a dry run as well
        torch.cuda.synchronize()
        network.heads[1].register_forward_pre_hook(beside)
        runner = EagerRunner(network)
        for asked in range(TURNS):
            with torch.cuda.stream(callers[asked % 2]):
                network.set_rules(0.1 + 0.05 * asked)
                ask(runner if asked % 3 == 0 else network, stop=asked % 3 == 2)
    torch.cuda.synchronize()
    print(f"asked: {TURNS} requests, and as many beside every other one as reached its second head")


if __name__ == "__main__":
    main()
