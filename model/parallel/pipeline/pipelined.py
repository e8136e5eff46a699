"""``pipelined``: a network as stages in several processes, compared before, and balanced by measured times."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ...auto.pass_times import batches_of
from ...basics.arguments import check_batch, check_mode
from ...basics.bad_input import BadInput
from ...basics.machine import package_version
from ...network.early_exit_network import EarlyExitNetwork, check_network
from ...processes.dealing import tensor_digest
from ...processes.process_group import Processes, is_launched, launched_processes, unused_part, watched_processes
from ...runners.checks import check_device
from ..segments import balanced, check_cuttable, median_ms, run_segments, starts_of
from .answered import CutNetwork, cut, to_wire
from .exchange import Exchange
from .runner import PipelinedRunner
from .stage import Stage

#: Micro-batches for each stage that the example is split into, if nobody says how many samples a micro-batch has: the
#: stages then stand still for a third of a request of its size, at most.
_MICRO_BATCHES_A_STAGE = 2
#: A stage that takes too long says so itself, after ``timeout_s``; those that wait for it give up later.
_PATIENCE = 2


def pipelined(
    network: EarlyExitNetwork,
    example_input: Tensor,
    *,
    split_size: int | None = None,
    stages: str | Sequence[str] = "auto",
    device: torch.device | str | None = None,
    trunk: str = "as_is",
    timeout_s: float = 30.0,
) -> PipelinedRunner:
    """Run a network as a pipeline of stages, one in each process.

    The processes are those of the default process group, or if there is none those of torchrun, which are then joined;
    a process by itself has the one stage.
    All of them call this alike, from their main threads, with the same network and arguments, and then the runner:
    the first rank with batches, the others with None; or they call its ``serve``. As a context manager the runner also
    tells the others of an error that leaves the body.

    The backbone is cut at its taps, by ``torch.export``. Each stage sends what the next one needs, by
    ``torch.distributed.pipelining``, and its answers to the first rank. A micro-batch goes through all stages, with
    samples in it that are answered. Rules are those of the first rank's network at each request.

    While the runner is open, a rank that fails, dies or hangs ends all of them with an error that names it: by
    ``RankFailed``, or, one that is in no call of the runner, by its end, with a line on stderr.

    Args:
        network: in eval mode; its backbone takes one tensor.
        example_input: a batch like those to come.
        split_size: samples of a micro-batch; None splits the example into two for each stage.
        stages: "auto" balances the times of the stages, as the first rank measures them; or the taps at which one ends
            and the next begins, one less than ranks.
        device: of this rank's stage, "cuda" is the GPU of its LOCAL_RANK; None is the network's. The stage has copies
            of its part of the network where that is elsewhere; while the stage is made, of all of it.
        trunk: how the backbone is run, "as_is" or "cudnn", see :func:`make_trunk`. For "cudnn" the device of each stage
            keeps a copy of the whole network.
        timeout_s: within so many seconds all ranks have to come, and a stage has to finish a micro-batch.

    Raises:
        BadInput: ranks are unlike each other in number, versions, network or arguments, or one does not come; a device
            is not there; or torch.export cannot trace the backbone.
        ValueError, TypeError: an argument that does not fit.
        RankFailed: another rank has raised one of these, or died.
    """
    with ExitStack() as opened:
        processes = opened.enter_context(_processes(timeout_s))
        ranks = processes.wanted
        _check(network, example_input, split_size, trunk, timeout_s)
        where = _own_device(device, network)
        starts = starts_of("stages", stages, network.taps, ranks, "ranks")
        size = split_size or -(-len(example_input) // (_MICRO_BATCHES_A_STAGE * ranks))
        network.check_taps(example_input)
        processes.meet(_facts(network, example_input, size, stages, trunk, where))
        if not dist.is_initialized():
            opened.enter_context(processes.group("cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo"))
        host, activations = _groups(where, timeout_s, opened)
        opened.enter_context(processes.watch.told_before())  # NCCL's groups end where all ranks end theirs

        made, micro_batch = cut(network, batches_of(example_input.detach(), size)[0], where, trunk)
        if processes.rank == 0:
            ms = segment_ms(made, micro_batch)
            starts = starts or balanced(ms, ranks)
            processes.store.set("placement", json.dumps([starts, ms]))
        else:
            starts, ms = json.loads(processes.wait_for("placement"))

        ends = [*starts[1:], len(made.segments)]
        start, end = starts[processes.rank], ends[processes.rank]
        stage = Stage(made, start, end, size, where, f"stage {processes.rank} of {ranks}")
        opened.callback(stage.close)
        stage.capture(micro_batch)
        processes.store.set(f"ready/{processes.rank}", "1")
        for rank in range(ranks):
            processes.wait_for(f"ready/{rank}")
        return PipelinedRunner(
            network,
            example_input,
            Exchange(stage, processes.rank, ranks, len(made.heads), host, activations),
            "\n".join([*_described(starts, ends, ms, network.taps, size), *made.trunk.notes]),
            timeout_s,
            processes,
            opened.pop_all(),
        )


@contextmanager
def _processes(timeout_s: float) -> Iterator[Processes]:
    """Find the ranks: of the default process group, or those that torchrun has started, or this process alone."""
    if dist.is_initialized():
        store = unused_part(dist.distributed_c10d._get_default_store(), "auxhead pipeline")
        found = watched_processes(store, dist.get_rank(), dist.get_world_size(), timeout_s, "pipelined")
    elif is_launched():
        found = launched_processes(timeout_s)
    else:
        own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        found = watched_processes(own, 0, 1, timeout_s, "pipelined")
    with found as processes:
        yield processes


def _check(
    network: EarlyExitNetwork, example_input: object, split_size: object, trunk: object, timeout_s: object
) -> None:
    check_network(network)
    check_batch("example_input", example_input)
    assert isinstance(example_input, Tensor)
    if not (split_size is None or (type(split_size) is int and split_size > 0)):
        raise ValueError(f"split_size: got {split_size!r}, wants a positive int or None")
    check_cuttable(trunk)
    if not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
        raise ValueError(f"timeout_s: got {timeout_s!r}, wants a number greater than 0")
    check_mode(network)
    check_device(network, example_input.device)
    if torch.is_autocast_enabled(example_input.device.type):
        raise RuntimeError("pipelined: called under autocast, which stages do not follow; cast the network instead")


def _own_device(device: torch.device | str | None, network: EarlyExitNetwork) -> torch.device:
    """Return the device of this rank's stage; raises ``BadInput`` if it is not there."""
    where = network.device if device is None else torch.device(device)
    if where.type == "cuda":
        index = int(os.environ.get("LOCAL_RANK", 0)) if where.index is None else where.index
        there = torch.cuda.device_count()
        if index >= there:
            raise BadInput(f"device: got cuda:{index}, but torch sees {there} CUDA devices here; wants one of those")
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return where


def _facts(
    network: EarlyExitNetwork, x: Tensor, size: int, stages: object, trunk: str, where: torch.device
) -> dict[str, str]:
    """Return by name what has to be the same on all ranks."""
    state = {name: tensor_digest(tensor) for name, tensor in network.state_dict().items()}
    return {
        **{f"version of {name}": str(package_version(name)) for name in ("auxhead", "torch")},
        "taps": ", ".join(network.taps),
        **{f"network: {name}": digest for name, digest in state.items()},
        "example_input": f"{list(x.shape)} of {x.dtype}",
        "split_size": str(size),
        "stages": str(stages),
        "trunk": trunk,
        "kind of device": where.type,
    }


def _groups(where: torch.device, timeout_s: float, opened: ExitStack) -> list[dist.ProcessGroup]:
    """Make process groups of the ranks' hosts and of their devices, with time limits of their own."""
    options = None
    if where.type == "cuda":  # their kernels are placed before the waiting blocks of a stage's graph
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    groups = []
    for backend, its in (("gloo", None), ("nccl" if options else "gloo", options)):
        limit = timedelta(seconds=_PATIENCE * timeout_s)
        groups.append(dist.new_group(timeout=limit, backend=backend, pg_options=its))
        opened.callback(dist.destroy_process_group, groups[-1])
    return groups


def segment_ms(cut: CutNetwork, x: Tensor) -> list[float]:
    """Measure what each segment with its head takes for a micro-batch, in milliseconds.

    Each is a stage by itself, and so a graph where stages are graphs.
    """
    handed: Sequence[Tensor] = [x]
    found = []
    with torch.no_grad():
        runs = zip(cut.segments, run_segments(cut.segments, x), strict=True)
        for index, (segment, (_, hands)) in enumerate(runs):
            stage = Stage(cut, index, index + 1, len(x), x.device, name="")
            stage.capture(x)
            try:
                found.append(median_ms(partial(stage.compute_alone, handed)))
            finally:
                stage.close()
            handed = [to_wire(each, like) for each, like in zip(hands, segment.hands, strict=True)]
    return found


def _described(
    starts: Sequence[int], ends: Sequence[int], ms: Sequence[float], taps: Sequence[str], size: int
) -> list[str]:
    lines = []
    for stage, (start, end) in enumerate(zip(starts, ends, strict=True)):
        begins = f"behind {taps[start - 1]}" if start else "from the input"
        lines.append(f"Stage {stage}, {begins}: {sum(ms[start:end]):.3g} ms a micro-batch of {size}.")
    return lines
