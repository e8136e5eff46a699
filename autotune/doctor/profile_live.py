"""Runs requests of a factory: alone, watched, and under torch.profiler; all that is told goes into one file."""

import dataclasses
import gzip
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from ...model.basics.arguments import kind_of
from ...model.basics.bad_input import BadInput
from ...model.basics.files import replacing
from ...model.commands.user_model import import_function
from ...model.heads.fuse_aux_heads import find_aux_heads
from ...model.listening.batches import call_with, map_tensors
from ..measuring.cuda_calls import ANNOTATION, HEAD, STREAM
from ..measuring.environment import environment
from ..measuring.profiled_requests import exported_trace
from .trace import KEY, FusibleHead, StreamUse, Watched
from .user_code import user_code
from .watching.collections import CollectionWatcher
from .watching.loads import LoadWatcher
from .watching.watcher import Watcher

#: Requests before any that count: compilation, cuDNN's choice of algorithms, the allocator.
WARM_UP = 5
#: Requests that are timed without a profiler.
TIMED = 30
#: Requests that are watched: what one of them makes for the next but one is used within them.
WATCHED = 4


#: Called with the name of a layer.
OnCall = Callable[[str], None]


class Runnable(NamedTuple):
    """A request that can be run."""

    request: Callable[[], object]
    module: nn.Module | None
    """None: anything else that can be called."""


def find_target(spec: str) -> Callable[[torch.device], Runnable]:
    """Import the factory that ``package.module:factory`` names; what is returned calls it.

    Args:
        spec: ``factory()`` returns a module, or anything else that can be called, and an input for it: a tensor, a
            tuple of arguments or a dict of keyword arguments. Modules are put on the device, in eval mode, tensors of
            the input too; they are called without gradients.

    Raises:
        BadInput: no such factory, one that takes arguments, or, once it is called, one that returns anything else.
        UserCodeError: importing it, calling it or, later, a request raises an error.
    """
    with user_code(f"TARGET: {spec}: importing {spec.partition(':')[0]}"):
        factory = import_function("TARGET", spec)

    def make(device: torch.device) -> Runnable:
        with user_code(f"TARGET: {spec}"):
            made = factory()
        if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
            got = ", ".join(map(kind_of, made)) if isinstance(made, tuple) else kind_of(made)
            raise BadInput(f"TARGET: {spec} returned ({got}), wants (an nn.Module or a function, an input for it)")
        called, x = made
        module = called.to(device).eval() if isinstance(called, nn.Module) else None
        x = map_tensors(x, lambda each: each.to(device))

        def request() -> object:
            with user_code(f"TARGET: {spec}: a request"), torch.no_grad():
                return call_with(called, x)

        return Runnable(request, module)

    return make


def profile_live(
    request: Callable[[], object], file: Path, *, requests: int = 3, module: nn.Module | None = None
) -> None:
    """Run a request a few times on the current CUDA device and write its trace.

    Args:
        request: one request; what it returns is kept until the device is done.
        file: the Chrome trace, replaced; compressed if it ends in .gz. Beside the events it has what was watched.
        requests: how many are profiled.
        module: whose heads are looked for; None: there are none.
    """
    heads = {} if module is None else find_aux_heads(module)
    with _noting(module, heads) as ran:
        for _ in range(WARM_UP):
            request()
    times = []
    with CollectionWatcher() as collections, LoadWatcher() as loads:
        for index in range(TIMED):
            collections.request = loads.request = index
            times.append(_timed(request))
    with profiler() as running, _annotating(module, ran):
        request()  # pays for the profiler's own set-up, and is thrown away
        torch.cuda.synchronize()
        running.step()
        for _ in range(requests):
            with record_function(ANNOTATION):
                kept = request()
            torch.cuda.synchronize()
            del kept
    # last: once watching has begun, PyTorch tells of each allocation, which takes time
    with Watcher() as watcher:
        for _ in range(WATCHED):
            request()
    torch.cuda.synchronize()
    told = dataclasses.replace(
        watcher.watched(requests=WATCHED),
        host_us=statistics.median(times),
        samples_us=tuple(times),
        heads=tuple(FusibleHead(name, heads[name]) for name in ran),
        collections=tuple(collections.seen),
        loads=loads.seen,
        without_tf32=without_tf32(),
    )
    write_trace(running, told, file)


def profiler() -> profile:
    """Return a profiler whose trace has stacks and what streams wait for; its first step is thrown away."""
    return profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        with_stack=True,
        schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
        acc_events=True,
        experimental_config=_ExperimentalConfig(enable_cuda_sync_events=True, profile_all_threads=True),
    )


def write_trace(profiler: profile, watched: Watched, file: Path) -> None:
    """Write what a profiler recorded, with what was watched; the file is complete or not there, its folder is made."""
    content = _content(profiler)  # the next profiler that runs empties this one
    streams = with_numbers(watched.streams, _marked(watched.streams))
    device = torch.device("cuda", torch.cuda.current_device())
    content[KEY] = dataclasses.asdict(dataclasses.replace(watched, streams=streams, environment=environment(device)))
    file.parent.mkdir(parents=True, exist_ok=True)
    opened = gzip.open if file.suffix == ".gz" else open
    with replacing(file) as unfinished, opened(unfinished, "wt", encoding="utf-8") as out:
        json.dump(content, out)


def _content(profiler: profile) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return exported_trace(profiler, Path(folder, "trace.json"))


def _marked(streams: Sequence[StreamUse]) -> list[Mapping[str, Any]]:
    """Profile a kernel on each stream, annotated with its handle: what number a trace gives a stream is told nowhere.

    Numbers are the same in all traces of a process.
    """
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as marking:
        for one in streams:
            device = torch.device("cuda", one.device)
            stream = torch.cuda.ExternalStream(one.handle, device) if one.handle else torch.cuda.default_stream(device)
            with torch.cuda.stream(stream), record_function(f"{STREAM}{one.device} {one.handle}"):
                torch.zeros(1, device=device)
        torch.cuda.synchronize()
    events: list[Mapping[str, Any]] = _content(marking)["traceEvents"]
    return events


def with_numbers(streams: Sequence[StreamUse], events: Sequence[Mapping[str, Any]]) -> tuple[StreamUse, ...]:
    """Return streams with their numbers in traces, from the events of annotated kernels."""
    ran = {
        event["args"]["correlation"]: int(event["args"]["stream"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memset")
    }
    launches = [
        (event["ts"], ran[event["args"]["correlation"]])
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and event.get("args", {}).get("correlation") in ran
    ]
    numbers = {
        event["name"]: number
        for event in events
        if event.get("cat") == "user_annotation"
        for time, number in launches
        if event["ts"] <= time <= event["ts"] + event["dur"]
    }
    return tuple(dataclasses.replace(one, number=numbers.get(f"{STREAM}{one.device} {one.handle}")) for one in streams)


def without_tf32() -> tuple[str, ...]:
    """Return which of matrix products and convolutions PyTorch may not compute in TF32 as it is set now."""
    families = {"matmul": torch.backends.cuda.matmul, "convolution": torch.backends.cudnn.conv}  # type: ignore[attr-defined]
    return tuple(name for name, settings in families.items() if settings.fp32_precision != "tf32")


def _timed(request: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    kept = request()
    torch.cuda.synchronize()
    del kept
    return 1e6 * (time.perf_counter() - began)


@contextmanager
def _hooked(module: nn.Module | None, names: Iterable[str], before: OnCall, after: OnCall) -> Iterator[None]:
    """Call with the name of a layer before and after it runs."""
    with ExitStack() as stack:
        for name in names:
            assert module is not None
            layer = module.get_submodule(name)
            stack.callback(layer.register_forward_pre_hook(lambda *_, name=name: before(name)).remove)
            stack.callback(layer.register_forward_hook(lambda *_, name=name: after(name)).remove)
        yield


@contextmanager
def _noting(module: nn.Module | None, heads: Mapping[str, str | None]) -> Iterator[list[str]]:
    """Note the names of heads that run, in their order, but for the one that has the last Linear: the classifier."""
    linears = () if module is None else [name for name, one in module.named_modules() if isinstance(one, nn.Linear)]
    ran: list[str] = []
    with _hooked(module, dict.fromkeys([*linears, *heads]), lambda name: None, ran.append):
        yield ran
    last_linear = next((name for name in reversed(ran) if name in linears), "")
    ran[:] = [name for name in dict.fromkeys(ran) if name in heads and not f"{last_linear}.".startswith(f"{name}.")]


@contextmanager
def _annotating(module: nn.Module | None, heads: Sequence[str]) -> Iterator[None]:
    """Annotate heads in a trace as they run."""
    opened: list[record_function] = []

    def begin(name: str) -> None:
        opened.append(record_function(f"{HEAD}{name}"))
        opened[-1].__enter__()

    with _hooked(module, heads, begin, lambda name: opened.pop().__exit__(None, None, None)):
        yield
