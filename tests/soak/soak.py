"""Soak run on one GPU: ``PYTHONPATH=tests python tests/soak/soak.py [--delays] [--replays N] [--minutes M]``.

In rounds, two threads each ask runners of a network of their own on a stream of their own; or one thread asks all
runners of one network on three streams in turn. Inputs, rules, batch sizes and runners change at random; runners are
made anew each round. Beside that memory is allocated, poisoned and freed, canaries are watched over, PyTorch's caches
and cuBLAS's workspaces are emptied. Every answer is compared with what eager mode has said before, on the device.

With ``--delays`` random delays of up to 200 us are put on callers' and runners' streams and into the graphs.

The run fails (1) with the first answer that is wrong, canary that has changed, error or hang, or if memory grows. It
ends with 2 if it cannot say anything: without a GPU, or if the time was over first. Nothing else may use the GPU.
"""

import argparse
import faulthandler
import gc
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import torch
from auxhead.kernels import runs_triton
from auxhead.model import EarlyExitNetwork, ExitResult, ExitRule, make_runner, make_trunk
from auxhead.model.runners import compacting, gated, polled
from auxhead.model.runners.graph_runner import GraphRunner
from auxhead.model.runners.program import HeadLaunches
from support import graph_runner_cases
from support.every_runner import EVERY
from support.example_models import SmallNet
from support.one_by_one import one_by_one
from torch import Tensor, nn

#: Requests between two looks at what the device has found, and of a round, of all threads: runners live as long.
THOUSAND, ROUND, ROUND_OF_DELAYS = 1000, 20_000, 2_000
#: Rounds: of four kinds; the first four warm up, and two times four are compared.
_KINDS, _LEAST_ROUNDS = 4, 12
#: Bytes by which memory may grow: what PyTorch's allocator has given out, and what the process has besides.
_SLACK = (0, 8 << 20)
_HANGS_S = 600  # compiling all kernels may take minutes
#: Sizes of the inputs, the largest two of which are split; and what runners are captured for.
BATCHES, SIZES = [*range(1, 9), 11, 17] * 4, (1, 4, 8)
#: Shares of the requests.
_EAGER, _NEW_RULE, _BESIDE, _OVERWRITTEN, _KEPT, _DELAYED = 0.005, 0.1, 0.125, 0.3, 0.02, 0.3
_PATTERN, _MOST_CANARIES, _MOST_ELEMENTS, _MOST_US = 0x5EAF00D, 48, 1 << 20, 200.0
_TOLERANCE = graph_runner_cases.TOLERANCE[torch.float16]
#: Held while a runner is made: PyTorch refuses to empty its cache while a thread allocates for a capture.
MAKING = threading.Lock()


class SoakNet(SmallNet):
    """Multiplies by a large matrix, for which cuBLAS takes a workspace, and keeps a mask for its last batch size."""

    mask: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.Flatten(), nn.Linear(8 * 32 * 32, 64), nn.Tanh(), nn.Linear(64, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.block0(x)
        if self.mask is None or len(self.mask) != len(x) or self.mask.dtype != x.dtype:
            self.mask = torch.full((len(x), 1, 1, 1), 0.5, device=x.device, dtype=x.dtype)
        x = x * self.mask + self.mix(x)[:, :, None, None]
        x = self.block2(self.block1(x))
        return self.fc(x.mean((2, 3)))


class Case(NamedTuple):
    """A network, what it is asked, and the right answers: of each input by each of the rules."""

    network: Any
    trunk: str
    inputs: list[Tensor]
    rules: list[Any]
    answers: list[list[ExitResult]]


def answers_of(network: Any, inputs: list[Tensor], rules: list[Any], run: Callable) -> list[list[ExitResult]]:
    """Ask for every input under each of the rules."""
    found: list[list[ExitResult]] = [[] for _ in inputs]
    for rule in rules:
        network.set_rules(rule)
        for of_input, x in zip(found, inputs, strict=True):
            of_input.append(run(x))
    return found


def rules_for(network: EarlyExitNetwork) -> list[dict[str, ExitRule]]:
    """Rules by which samples leave everywhere, at one exit alone, with heads disabled and with temperatures."""
    own = [head.rule.threshold for head in network.fused_heads]
    settings = [(own, 1.0, None), ([0.8 * one for one in own], 1.5, None), ([0.7 * one for one in own], 2.0, 1)]
    settings += [(thresholds, 1.0, None) for thresholds in ([0.0] * 3, [1.0] * 3, [1.0, 0.0, 1.0])] + [(own, 1.0, 0)]
    return [
        {
            tap: ExitRule(threshold, temperature=temperature, enabled=index != disabled)
            for index, (tap, threshold) in enumerate(zip(network.taps, thresholds, strict=True))
        }
        for thresholds, temperature, disabled in settings
    ]


def make_case(backbone: nn.Module, trunk: str) -> Case:
    """Batches none of whose samples is near a decision under any rule, and what eager mode answers."""
    x = graph_runner_cases.images(64, torch.float32)
    network = graph_runner_cases.with_heads(backbone, SmallNet.taps, x, torch.float16)
    x, rules = graph_runner_cases.images(4096), rules_for(network)
    made = make_trunk(network.backbone, network.taps, x[:8], trunk)
    for rule in rules:
        network.set_rules(rule)
        x = x[~graph_runner_cases.near_a_decision(network, made, x, 3 * _TOLERANCE)]
    assert len(x) >= sum(BATCHES), f"{len(x)} samples are clear, wants {sum(BATCHES)}"
    inputs = list(x[: sum(BATCHES)].clone().split(BATCHES))
    inputs[1::3] = [y.contiguous(memory_format=torch.channels_last) for y in inputs[1::3]]
    answers = answers_of(network, inputs, rules, partial(one_by_one, network, trunk=made))
    exits = torch.cat([answer.exit_index for of_input in answers for answer in of_input])
    assert exits.unique().numel() == len(network.taps) + 1, "wants answers of each exit"
    return Case(network, trunk, inputs, rules, answers)


def differs(found: ExitResult, wanted: ExitResult) -> Tensor:
    """[] bool on the device: another label or exit, or a number that is too far off."""
    near = [(one - other).abs() <= _TOLERANCE for one, other in zip(found[1:3], wanted[1:3], strict=True)]
    same = (found.label == wanted.label) & (found.exit_index == wanted.exit_index) & near[0] & near[1].all(1)
    return ~same.all()


class Beside:
    """Allocates and frees on some streams, as a program around a runner would, and watches over its memory."""

    def __init__(self, device: torch.device, streams: Sequence[torch.cuda.Stream], random: Random) -> None:
        self._device, self.streams, self._random = device, streams, random
        self._canaries: list[tuple[Tensor, int]] = []
        # Of each stream: additions on several would race.
        self._changed = [torch.zeros((), dtype=torch.int64, device=device) for _ in streams]

    def step(self, *, clears_workspaces: bool) -> None:
        """Do one thing at random; the host does not wait, but where a cache is emptied."""
        draw, where = self._random.random(), self._random.randrange(len(self.streams))
        elements = int(math.exp(self._random.random() * math.log(_MOST_ELEMENTS)))
        if draw < 0.02:
            if draw < 0.002 and clears_workspaces:
                torch._C._cuda_clearCublasWorkspaces()
            if MAKING.acquire(blocking=False):
                try:
                    torch.cuda.empty_cache()
                finally:
                    MAKING.release()
        elif draw < 0.5:
            with torch.cuda.stream(self.streams[where]):
                torch.full((elements,), float("nan"), device=self._device)
        elif draw < 0.75 and len(self._canaries) < _MOST_CANARIES:
            self.add(elements, where)
        elif self._canaries:
            self.check(self._random.randrange(len(self._canaries)))

    def add(self, elements: int, where: int) -> Tensor:
        """Allocate a canary on a stream, by its index, and return it."""
        with torch.cuda.stream(self.streams[where]):
            canary = torch.full((elements,), _PATTERN, dtype=torch.int32, device=self._device)
        self._canaries.append((canary, where))
        return canary

    def check(self, index: int) -> None:
        """Count the changed elements of a canary, on its stream, and free it."""
        canary, where = self._canaries.pop(index)
        with torch.cuda.stream(self.streams[where]):
            self._changed[where].add_((canary != _PATTERN).sum())
            del canary

    def changed(self) -> int:
        """Check all canaries, free them, and return how many elements were ever changed; the host waits."""
        while self._canaries:
            self.check(0)
        for stream in self.streams:
            stream.synchronize()
        return sum(int(count) for count in self._changed)


class Delays:
    """Random delays of up to 200 us."""

    def __init__(self, random: Random) -> None:
        self._random = random
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for cycles in (1_000_000, 20_000_000):  # the first one wakes the device
            begin.record()
            torch.cuda._sleep(cycles)
            end.record()
            torch.cuda.synchronize()
        self._cycles_per_us = cycles / (begin.elapsed_time(end) * 1e3)

    def put(self, stream: torch.cuda.Stream | None = None, runner: object = None) -> None:
        """Delay a stream, or one of those that work for its request to a runner, at a share of the times."""
        if self._random.random() < _DELAYED:
            its = runner._captures.streams if isinstance(runner, GraphRunner) else None
            chosen = self._random.choice((stream, stream, *(() if its is None else (its.trunk, its.side))))
            with torch.cuda.stream(chosen):
                torch.cuda._sleep(1 + int(self._random.random() * _MOST_US * self._cycles_per_us))

    @contextmanager
    def in_graphs(self, networks: Sequence[EarlyExitNetwork]) -> Iterator[None]:
        """Put delays into graphs: before each launch of heads, on its stream, and each layer, on the trunk's."""
        launch = HeadLaunches.launch

        def within(*_: object) -> None:
            if torch.cuda.is_current_stream_capturing():
                self.put()

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(HeadLaunches, "launch", lambda *given: (within(), launch(*given))))
            for layer in (layer for network in networks for layer in network.backbone.children()):
                stack.callback(layer.register_forward_pre_hook(within).remove)
            yield


class Client:
    """Asks runners of one network, from one thread at a time, and compares each answer."""

    def __init__(self, case: Case, device: torch.device, seed: int, delays: Delays | None = None) -> None:
        self.case, self._device, self._delays, self._random = case, device, delays, Random(seed)
        self.requests = self.replays = 0
        on_gpu = device.type == "cuda"  # every fourth input is in pinned memory of the host
        self._inputs = [x.cpu().pin_memory() if on_gpu and n % 4 == 3 else x for n, x in enumerate(case.inputs)]
        self._rule = -1

    def round(
        self,
        callers: Sequence[torch.cuda.Stream],
        others: Sequence[torch.cuda.Stream],
        requests: int,
        goes_on: Callable[[], bool],
    ) -> list[str]:
        """Make runners, ask them on streams in turn while others' work is on more, and let them go; returns alarms."""
        alarms: list[str] = []
        with torch.cuda.stream(callers[0]):
            beside, runners = Beside(self._device, [*callers, *others], self._random), {}
            for name, options in EVERY.items():
                with MAKING:
                    example, trunk = self.case.inputs[-1], self.case.trunk
                    runners[name] = make_runner(self.case.network, example, batch_sizes=SIZES, trunk=trunk, **options)
            callers[0].synchronize()
            for begun in range(0, requests, THOUSAND):
                if alarms or not goes_on():
                    break
                alarms += self.ask(runners, callers, beside, min(THOUSAND, requests - begun))
            for runner in [*runners.values()][::2]:
                runner.close()  # the others go without being closed
        return alarms

    def ask(
        self, runners: dict[str, Callable], callers: Sequence[torch.cuda.Stream], beside: Beside, count: int
    ) -> list[str]:
        """Make some requests of inputs, rules, runners and streams at random; returns alarms.

        The host waits for none of them, and looks at what the device has found at the end.
        """
        draw, kept, flags, said = self._random, [], [], []
        graphs = [name for name in runners if name != "eager"]
        for _ in range(count):
            name = "eager" if draw.random() < _EAGER and "eager" in runners else draw.choice(graphs)
            number, where = draw.randrange(len(self._inputs)), draw.randrange(len(callers))
            # Eager mode takes no batch that is on the host.
            x, caller = (self.case.inputs if name == "eager" else self._inputs)[number], callers[where]
            if self._rule < 0 or draw.random() < _NEW_RULE:
                self._rule = draw.randrange(len(self.case.rules))
                with torch.cuda.stream(draw.choice(callers)):
                    self.case.network.set_rules(self.case.rules[self._rule])
            if draw.random() < _BESIDE:
                beside.step(clears_workspaces=len(callers) > 1)  # no other thread is at work
            with torch.cuda.stream(caller):
                if self._delays is not None:
                    self._delays.put(caller, runners[name])
                given = x.clone() if (overwrites := draw.random() < _OVERWRITTEN) else x
                answer, wanted = runners[name](given), self.case.answers[number][self._rule]
                if overwrites:
                    given.fill_(float("nan"))
                flags.append(differs(answer, wanted))
            said.append(f"to {name!r}: batch of {len(x)} (input {number}), rules {self._rule}, stream {where}")
            if draw.random() < _KEPT:
                kept.append((answer, wanted, said[-1]))
            self.replays += name != "eager"
        self.requests += count
        changed = beside.changed()  # which waits for all callers
        flags += [differs(answer, wanted) for answer, wanted, _ in kept]  # still the same, with all that came after
        said += [f"{request}, kept by the caller until now" for *_, request in kept]
        wrong = [request for flag, request in zip(torch.stack(flags).tolist(), said, strict=True) if flag]
        alarms = (
            [f"{len(wrong)} of {count} answers differ from eager mode's; first of all", *wrong[:5]] if wrong else []
        )
        return alarms + [f"{changed} elements of others' memory were changed, by the end of a thousand"] * bool(changed)


def measure_memory() -> tuple[int, int]:
    """Empty what keeps memory; return bytes that PyTorch's allocator has given out, and that are in use besides."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated(), total - free - torch.cuda.memory_reserved()


def growth(values: Sequence[int]) -> int | None:
    """The least of the last four rounds less the most of the four after the warm-up; None if there were too few."""
    if len(values) < _LEAST_ROUNDS:
        return None
    return min(values[-_KINDS:]) - max(values[_KINDS : 2 * _KINDS])


def run(replays: int, minutes: float, delays: Delays | None, seed: int) -> int:
    """Run, print a summary, and return the exit code."""
    device = torch.device("cuda", torch.cuda.current_device())
    polled._LEAST_SEGMENT_US = gated._LEAST_GATED_US = compacting._LEAST_STOP_US = 0.0
    compacting._BUBBLE_US = compacting._MOVE_US = -1e6  # every stop pays
    torch.manual_seed(seed)
    cases = [make_case(SoakNet(), "as_is"), make_case(SmallNet(), "cudnn" if delays is None else "as_is")]
    clients = [Client(case, device, seed + number, delays) for number, case in enumerate(cases)]
    streams = [[torch.cuda.Stream(device) for _ in range(3)] for _ in clients]
    memory: list[tuple[int, int]] = []
    alarms: list[str] = []
    until, stopped = time.monotonic() + 60 * minutes, threading.Event()
    most = min(ROUND if delays is None else ROUND_OF_DELAYS, -(-replays // _LEAST_ROUNDS))

    def goes_on() -> bool:
        """Asked each thousand requests, so that a hang shows."""
        faulthandler.dump_traceback_later(_HANGS_S, exit=True)
        return not stopped.is_set() and time.monotonic() < until

    def one_round(client: Client, callers: Sequence[torch.cuda.Stream], requests: int) -> None:
        try:
            with torch.cuda.device(device):
                found = client.round(callers, streams[clients.index(client)][1:], requests, goes_on)
        except Exception:
            found = [traceback.format_exc()]
        if found:
            stopped.set()
            alarms.extend([type(client.case.network.backbone).__name__, *found])

    with ThreadPoolExecutor(len(clients)) as threads, ExitStack() as stack:
        if delays is not None:
            stack.enter_context(delays.in_graphs([case.network for case in cases]))
        while (done := sum(client.replays for client in clients)) < replays and not alarms and goes_on():
            requests = min(most, math.ceil(1.02 * (replays - done)))  # some are eager
            if len(memory) % 2 == 0:
                share = -(-requests // len(clients))
                wait = [
                    threads.submit(one_round, one, own[:1], share) for one, own in zip(clients, streams, strict=True)
                ]
                [each.result() for each in wait]
            else:
                index = len(memory) // 2 % len(clients)
                one_round(clients[index], [torch.cuda.default_stream(device), *streams[index][:2]], requests)
            memory.append(measure_memory())
            print(f"{done:9,} replays, {memory[-1][0]:,} bytes allocated, {memory[-1][1]:,} outside", flush=True)
    faulthandler.cancel_dump_traceback_later()
    for name, slack, values in zip(("allocated", "outside"), _SLACK, zip(*memory, strict=True), strict=True):
        if not alarms and (grown := growth(values)) is not None and grown > slack:
            alarms.append(f"memory {name} grows by {grown:,} bytes: {values}, round by round")
    print("\n".join(f"ALARM {alarm}" for alarm in alarms))
    if alarms:
        return 1
    complete = sum(client.replays for client in clients) >= replays and len(memory) >= _LEAST_ROUNDS
    print("No alarm." if complete else "INCOMPLETE: the time was over, or memory cannot be judged: nothing is shown.")
    return 0 if complete else 2


def main() -> int:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description="Soak run of all runners on one GPU.")
    parser.add_argument("--delays", action="store_true", help="random delays on the streams and in the graphs")
    parser.add_argument("--replays", type=int, help="default 1,000,000; with --delays 100,000")
    parser.add_argument("--minutes", type=float, default=60.0, help="give up after so many minutes (default 60)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not torch.cuda.is_available() or not runs_triton(torch.empty(1, device="cuda")):
        print("The soak run needs a CUDA device and Triton, and one of them is not there: NOTHING WAS CHECKED.")
        return 2
    replays = options.replays or (100_000 if options.delays else 1_000_000)
    interval = sys.getswitchinterval()
    with ExitStack() as stack:  # the same numbers again, and threads that take turns often
        stack.enter_context(torch.backends.cudnn.flags(True, benchmark=False, deterministic=True, allow_tf32=False))
        stack.callback(sys.setswitchinterval, interval)
        sys.setswitchinterval(1e-4)
        return run(replays, options.minutes, Delays(Random(options.seed)) if options.delays else None, options.seed)


if __name__ == "__main__":
    sys.exit(main())
