"""``pipelined``: a network as stages in several processes, compared before, and balanced by measured times."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from ...basics.arguments import check_batch, check_mode
from ...basics.bad_input import BadInput
from ...basics.machine import package_version
from ...basics.memory import bytes_by_key, free_bytes
from ...listening.batches import of_size
from ...network.early_exit_network import EarlyExitNetwork, check_network
from ...processes.dealing import tensor_digest
from ...processes.process_group import Processes, is_launched, launched_processes, unused_part, watched_processes
from ...trunk.trunk import format_of
from ..balance import check_cuttable, described, measure, starts_of
from ..cut import Cut, device_of
from .answers import AnswerForm
from .exchange import Exchange
from .runner import PipelinedRunner
from .stage import Stage
from .wire import Wire

#: Micro-batches for each stage that the example is split into, if nobody says how many samples a micro-batch has: the
#: stages then stand still for a third of a request of its size, at most.
_MICRO_BATCHES_A_STAGE = 2
#: A stage that takes too long says so itself, after ``timeout_s``; who waits for it gives up so many seconds later.
_PATIENCE_S = 5.0


def pipelined(
    network: EarlyExitNetwork,
    example_input: Tensor,
    *,
    split_size: int | None = None,
    stages: str | Sequence[str] = "auto",
    max_memory: Mapping[int, int | str] | None = None,
    device: torch.device | str | None = None,
    trunk: str = "as_is",
    timeout_s: float = 20.0,
) -> PipelinedRunner:
    """Run a network as a pipeline of stages, one in each process.

    The processes are those of the default process group, or if there is none those of torchrun, which are then joined;
    a process by itself has the one stage.
    All of them call this alike, from their main threads, with the same network and arguments, and then the runner:
    the first rank with batches, the others with None; or they call its ``serve``. As a context manager the runner also
    tells the others of an error that leaves the body.

    Each process is given its part of the backbone and the heads of that on its device, and nothing else: what the
    network has is moved there, and stays the same tensors. So a network that no device has room for is made on the CPU,
    or on ``meta`` and loaded by :func:`load_checkpoint`, of which each process then reads its part.

    Each stage sends what the next one needs, by ``torch.distributed.pipelining``, and what was said of samples so far;
    the last one sends the answers to the first rank. A micro-batch goes through all stages, with samples in it that are
    answered; where the first stage answers for all, its answers are returned while the others are at it. Rules are
    those of the first rank's network at each request.

    While the runner is open, a rank that fails, dies or hangs ends all of them with an error that names it: by
    ``RankFailed``, or, one that is in no call of the runner, by its end, with a line on stderr.

    Args:
        network: in eval mode, on one device of any kind; its backbone takes one tensor.
        example_input: a batch like those to come, on the network's device or the CPU.
        split_size: samples of a micro-batch; None splits the example into two for each stage.
        stages: "auto" balances the times of the stages, as the first rank measures them; or the taps at which one ends
            and the next begins, one less than ranks.
        max_memory: bytes that the network may take on the device of a rank, by rank, as an int or as in "10GiB", for
            "auto"; of others what is free.
        device: of this rank's stage, "cuda" is the GPU of its LOCAL_RANK; None is the network's, or the CPU.
        trunk: how the backbone is run, "as_is" or "cudnn", see :func:`parallelize`.
        timeout_s: within so many seconds all ranks have to come, and a stage has to finish a micro-batch.

    Raises:
        BadInput: ranks are unlike each other in number, versions, network or arguments, or one does not come; a device
            is not there; or the network cannot be cut or does not fit, as in :func:`parallelize`.
        ValueError, TypeError: an argument that does not fit.
        RankFailed: another rank has raised one of these, or died.
    """
    with ExitStack() as opened:
        processes = opened.enter_context(_processes(timeout_s))
        ranks = processes.wanted
        _check(network, example_input, split_size, trunk, timeout_s)
        where = _own_device(device, network)
        size = split_size or -(-len(example_input) // (_MICRO_BATCHES_A_STAGE * ranks))
        x = example_input.detach().to(device_of(network))
        network.check_taps(x)
        cut = Cut(network, x)
        if cut.mixes_samples():
            raise BadInput("network: what it says of a sample depends on the others of a batch, wants one without")
        processes.meet(_facts(cut, example_input, size, stages, trunk, where))
        room = bytes_by_key("max_memory", max_memory, range(ranks), f"a rank below {ranks}").get(processes.rank)
        processes.store.set(f"room/{processes.rank}", json.dumps(free_bytes(where) if room is None else room))
        if not dist.is_initialized():
            opened.enter_context(processes.group("cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo"))
        host, activations = _groups(where, timeout_s, opened)
        opened.enter_context(processes.watch.told_before())  # NCCL's groups end where all ranks end theirs

        micro_batch = of_size(example_input.detach(), size).to(where)
        opened.push(lambda kind, *_: None if kind is None else cut.move_back())
        if processes.rank == 0:
            limits = [json.loads(processes.wait_for(f"room/{rank}")) for rank in range(ranks)]
            costs = cache(lambda: measure(cut, {size: micro_batch}, trunk))
            starts = starts_of("stages", stages, cut, limits, "ranks", costs)
            on_ranks = [f"rank {rank}" for rank in range(ranks)]
            said = described(cut, starts, on_ranks, costs() if stages == "auto" else None, size)
            processes.store.set("placement", json.dumps([starts, said]))
        else:
            starts, said = json.loads(processes.wait_for("placement"))
        stage = _stage(cut, [*starts, cut.segments], processes.rank, micro_batch, trunk, ranks)
        opened.callback(stage.close)
        processes.store.set(f"ready/{processes.rank}", "1")
        for rank in range(ranks):
            processes.wait_for(f"ready/{rank}")
        return PipelinedRunner(
            network,
            example_input,
            Exchange(stage, processes.rank, ranks, len(network.taps), host, activations),
            "\n".join([*said, *stage.notes]),
            timeout_s,
            processes,
            opened.pop_all(),
        )


def _stage(cut: Cut, starts: Sequence[int], rank: int, micro_batch: Tensor, trunk: str, ranks: int) -> Stage:
    """Move a rank's part of the network to the device of a micro-batch, and make its stage."""
    start, end, device = starts[rank], starts[rank + 1], micro_batch.device
    own = cut.move(start, end, device)
    cut.move_heads(cut.heads(start, end), device)
    form, size, handed = AnswerForm.of(cut.network, device), len(micro_batch), cut.handed_like(len(micro_batch))
    last = trunk == "cudnn" or format_of(micro_batch) is torch.channels_last

    def wire(behind: int) -> Wire:
        """Return how what a segment hands over is sent; behind the last one it is what was said alone."""
        like = handed[behind] if behind < len(handed) else None
        maps = last and like is not None and like.ndim == 4
        memory_format = torch.channels_last if maps else torch.contiguous_format
        return Wire(form.nothing_said(size, device), like, memory_format)

    x, takes = micro_batch, None
    if start > 0:  # of other values than zeros, by which a trunk could not be checked
        takes, like = wire(start - 1), handed[start - 1]
        x = torch.randn(like.shape, device=device).to(like.dtype)
        x = x.contiguous(memory_format=torch.channels_last) if last and x.ndim == 4 else x
    placed = cut.place(start, end, own, x, trunk)
    if takes is None:
        x = x.contiguous(memory_format=placed.trunk.memory_format)
    return Stage(placed, form, takes, wire(end - 1), x, size, f"stage {rank} of {ranks}")


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
    if torch.is_autocast_enabled(example_input.device.type):
        raise RuntimeError("pipelined: called under autocast, which stages do not follow; cast the network instead")


def _own_device(device: torch.device | str | None, network: EarlyExitNetwork) -> torch.device:
    """Return the device of this rank's stage; raises ``BadInput`` if it is not there."""
    try:
        where = torch.device(device or (network.device if network.device.type == "cuda" else "cpu"))
    except (RuntimeError, TypeError):
        raise ValueError(f"device: got {device!r}, wants 'cuda', 'cuda:0' and the like, 'cpu' or None") from None
    if where.type not in ("cuda", "cpu"):
        raise ValueError(f"device: got {where}, wants a CUDA device or the CPU")
    if where.type == "cuda":
        index = int(os.environ.get("LOCAL_RANK", 0)) if where.index is None else where.index
        there = torch.cuda.device_count()
        if index >= there:
            raise BadInput(f"device: got cuda:{index}, but torch sees {there} CUDA devices here; wants one of those")
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return where


def _facts(cut: Cut, x: Tensor, size: int, stages: object, trunk: str, where: torch.device) -> dict[str, str]:
    """Return by name what has to be the same on all ranks: all but rules, which go with each request."""
    network = cut.network
    state = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    digests = {
        f"network: {name}": f"{each.dtype} {[*each.shape]} of {network.unread and network.unread.name}"
        if each.is_meta
        else tensor_digest(each)
        for name, each in state.items()
    }
    return {
        **{f"version of {name}": str(package_version(name)) for name in ("auxhead", "torch")},
        "taps": ", ".join(network.taps),
        **digests,
        "network: operations of its forward": cut.operations,
        "network: form of its answers": str(AnswerForm.of(network, where)),
        "network: heads": "; ".join(f"{type(head).__name__} {head.describe()}" for head in network.exit_heads),
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
        limit = timedelta(seconds=timeout_s + _PATIENCE_S)
        groups.append(dist.new_group(timeout=limit, backend=backend, pg_options=its))
        opened.callback(dist.destroy_process_group, groups[-1])
    return groups
