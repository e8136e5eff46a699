"""State of a training: its file, its random numbers, and what several processes share.

An interrupted training goes on from the file as if it had never stopped. Processes are started by torchrun, and know
each other by ``torch.distributed``; without a process group there is one.
"""

import json
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..answers.exit_rule import ExitRule
from ..basics.bad_input import BadInput
from ..basics.files import parse_json, replacing
from ..processes.process_group import own_rank, ranks

#: The value of ``format`` in the file; others are refused.
FORMAT = "auxhead training state 2"


@dataclass
class TrainingState:
    """All of a training that changes from epoch to epoch, but for random numbers that each epoch seeds anew."""

    learner: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    generators: list[torch.Generator]
    """Those that the batches draw from."""
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    """Of the learning rate, where that is the user's."""
    average: "Average | None" = None
    """Of parameters and buffers, if that is what is kept."""
    step: int = 0
    """Steps of the optimizer so far."""
    epochs: list[dict[str, Any]] = field(default_factory=list)
    """What is said of each epoch so far."""
    best: int | None = None
    """Index of the epoch with the best accuracy; None without validation."""
    kept: "Snapshot" = field(init=False)
    """Parameters and buffers at the end of that epoch, or the last one without validation; at first those of before."""

    def __post_init__(self) -> None:
        self.keep()

    def keep(self) -> None:
        """Remember the learner as it is now."""
        self.kept = Snapshot(self.learner)

    def averaged(self) -> AbstractContextManager[None]:
        """Let the learner have its averages until the context ends, if there are some."""
        return nullcontext() if self.average is None else self.average.in_place()

    def save(self, path: Path, settings: dict[str, Any]) -> None:
        """Write the state, or leave the file that is there; ``settings`` are those that it goes on with alone."""
        tensors = {f"learner.{name}": tensor for name, tensor in tensors_of(self.learner).items()}
        if self.best is not None:
            tensors |= {f"best.{name}": self.kept.values[name] for name in tensors_of(self.learner)}
        if self.average is not None:
            tensors |= {f"average.{name}": value for name, value in self.average.values.items()}
        tensors |= {f"generator.{index}": one.get_state() for index, one in enumerate(self.generators)}
        optimizer = self.optimizer.state_dict()
        numbers: dict[str, dict[str, Any]] = {}
        names: dict[str, list[str]] = {}
        for index, values in optimizer["state"].items():
            own = names[str(index)] = [name for name, value in values.items() if isinstance(value, Tensor)]
            tensors |= {f"optimizer.{index}.{name}": values[name] for name in own}
            numbers[str(index)] = {name: value for name, value in values.items() if name not in own}
        facts = {
            "optimizer": {"numbers": numbers, "tensors": names, "param_groups": optimizer["param_groups"]},
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "format": FORMAT,
            "settings": settings,
            "step": self.step,
            "epochs": self.epochs,
            "best": self.best,
            "scaler": self.scaler.state_dict(),
        }
        try:
            text = json.dumps(facts)
        except TypeError as error:
            wants = "wants one that keeps numbers, text and tensors alone, or no state"
            raise TypeError(f"state: the optimizer or scheduler cannot be saved ({error}), {wants}") from None
        copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        with replacing(path) as unfinished:
            save_file(copies, unfinished, {"auxhead": text})

    def restore(self, path: Path, settings: dict[str, Any]) -> None:
        """Take over what :meth:`save` wrote; of a training with another learning rate, the best epoch.

        That one's later epochs, and the moments of its gradients, belong to its rate, under which it may have failed.
        ``BadInput`` for no file or a damaged one, or one of a training of other settings or another network. Of several
        processes rank 0 alone needs a file.
        """
        try:
            facts, saved = _read_by_rank_0(path)
            if not isinstance(facts, dict) or facts.get("format") != FORMAT:
                raise BadInput(f"{path}: is no state of a training, or of another version; wants {FORMAT!r}")
            _check_same(path, facts["settings"], settings)
            self._take(path, facts, saved, facts["settings"].get("learning_rate") != settings.get("learning_rate"))
        except BadInput:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise BadInput(f"{path}: is damaged ({error!r:.100})") from None

    def _take(self, path: Path, facts: dict[str, Any], saved: dict[str, Tensor], other_rate: bool) -> None:
        own = tensors_of(self.learner)
        for name, tensor in own.items():
            found = saved.get(f"learner.{name}")
            if found is None or found.shape != tensor.shape:
                got = "has none" if found is None else f"has {list(found.shape)}"
                raise BadInput(f"{path}: {got} for {name!r}, wants {list(tensor.shape)}, as this network has")
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        numbers, names = facts["optimizer"]["numbers"], facts["optimizer"]["tensors"]
        state: dict[int, dict[str, Any]] = {}
        for index, parameter in enumerate(parameters):
            if str(index) not in numbers or other_rate:
                continue  # no exit depends on it, so that it never had a gradient
            state[index] = dict(numbers[str(index)])
            for name in names[str(index)]:
                value = state[index][name] = saved[f"optimizer.{index}.{name}"]
                if value.shape == parameter.shape:  # laid out as the parameter, as the optimizer does
                    state[index][name] = torch.empty_like(parameter, dtype=value.dtype).detach().copy_(value)
        generators = [saved[f"generator.{index}"] for index in range(len(self.generators))]
        step, epochs, best, scaler = facts["step"], list(facts["epochs"]), facts["best"], facts["scaler"]
        if other_rate and best is not None:
            step, epochs = step * (best + 1) // len(epochs), epochs[: best + 1]
        at_best = {name: saved[f"best.{name}"] for name in own} if best is not None else {}
        begin = at_best if other_rate else {}
        averages = {} if self.average is None else begin or {name: saved[f"average.{name}"] for name in own}

        _overwrite(own, begin or {name: saved[f"learner.{name}"] for name in own})
        if self.average is not None:
            _overwrite(self.average.values, averages)
        groups = self.optimizer.state_dict() if other_rate else facts["optimizer"]
        self.optimizer.load_state_dict({"param_groups": groups["param_groups"], "state": state})
        if self.scheduler is not None:
            self.scheduler.load_state_dict(facts["scheduler"])
        for generator, numbers in zip(self.generators, generators, strict=True):
            generator.set_state(numbers)
        if scaler:
            self.scaler.load_state_dict(scaler)
        self.step, self.epochs, self.best = step, epochs, best
        self.keep()
        if at_best:
            _overwrite({name: self.kept.values[name] for name in own}, at_best)


class Average:
    """A moving average of a learner's parameters and buffers (Polyak & Juditsky 1992), quicker at first."""

    def __init__(self, learner: nn.Module, decay: float) -> None:
        self._own, self._decay = tensors_of(learner), decay
        self.values = {name: tensor.detach().clone() for name, tensor in self._own.items()}
        """By name."""

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the learner as it is after a step, counted from 1."""
        share = 1.0 - min(self._decay, (1 + step) / (10 + step))
        for name, tensor in self._own.items():
            if tensor.is_floating_point():
                self.values[name].lerp_(tensor, share)
            else:
                self.values[name].copy_(tensor)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the learner have the averages until the context ends."""
        before = {name: tensor.detach().clone() for name, tensor in self._own.items()}
        try:
            _overwrite(self._own, self.values)
            yield
        finally:
            _overwrite(self._own, before)


class Snapshot:
    """Parameters and buffers of a module as they are now, which can be put back; but for those of exit rules."""

    def __init__(self, module: nn.Module) -> None:
        self._held = [(*place, place[1][place[2]]) for place in _places(module)]
        self.values = {name: tensor.detach().clone() for name, _, _, tensor in self._held}
        """Copies of them, by name."""

    def put_back(self) -> None:
        """Make the module what it was, with the very tensors that it had."""
        _overwrite({name: tensor for name, _, _, tensor in self._held}, self.values)
        for _, holder, key, tensor in self._held:
            holder[key] = tensor


def _places(module: nn.Module, *, saved: bool = False) -> list[tuple[str, dict[str, Any], str]]:
    """Name a module's parameters and buffers, all or those that are saved; each with the dict that has it, and key."""
    return [
        (f"{prefix}.{key}" if prefix else key, holder, key)
        for prefix, part in module.named_modules(remove_duplicate=False)
        if not isinstance(part, ExitRule)
        for holder in (part._parameters, part._buffers)
        for key, tensor in holder.items()
        if tensor is not None and not tensor.is_inference()  # which nobody may write to
        if not (saved and key in part._non_persistent_buffers_set)
    ]


def tensors_of(learner: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a learner that are saved with it, the very ones; no exit rules."""
    return {name: holder[key] for name, holder, key in _places(learner, saved=True)}


@torch.no_grad()
def _overwrite(own: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    for name, tensor in own.items():
        tensor.copy_(saved[name])


def _read_by_rank_0(path: Path) -> tuple[Any, dict[str, Tensor]]:
    """Return facts and tensors of rank 0's file, in every process; all raise ``BadInput`` where it has none."""
    found: list[Any] = [None]
    if own_rank() == 0:
        try:
            with safe_open(path, "pt") as file:
                facts = parse_json((file.metadata() or {}).get("auxhead", "null"))
                found[0] = facts, {name: file.get_tensor(name) for name in file.keys()}
        except FileNotFoundError:
            found[0] = f"{path}: no such file, so that there is no training to resume"
        except (SafetensorError, OSError, ValueError, TypeError, RuntimeError) as error:
            found[0] = f"{path}: is damaged ({error!r:.100})"
    if ranks() > 1:
        group = dist.new_group(backend="gloo")  # it goes from host to host, whatever the devices are
        dist.broadcast_object_list(found, 0, group)
        dist.destroy_process_group(group)
    if isinstance(found[0], str):
        raise BadInput(found[0])
    return found[0]


def _check_same(path: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        if saved.get(name) != value and name != "learning_rate":
            raise BadInput(
                f"{path}: is of a training with {name} {saved.get(name)!r:.60}, got {value!r:.60}; wants the same"
            )


def seed_of(*parts: int) -> int:
    """Return a seed that differs wherever one of the parts (a seed, an epoch, a rank, each from 0) does."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_all(seed: int) -> None:
    """Seed the random numbers of Python, NumPy and PyTorch on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def generators_of(batches: object) -> list[torch.Generator]:
    """Return the generators of their own that some batches draw from: their ``generator`` and those of samplers."""
    found = (getattr(owner, "generator", None) for owner in _drawing(batches))
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def set_epoch(batches: object, epoch: int) -> None:
    """Tell samplers that draw an epoch's order by its number, DistributedSampler among them."""
    for owner in _drawing(batches):
        tell = getattr(owner, "set_epoch", None)
        if callable(tell):
            tell(epoch)


def _drawing(batches: object) -> list[object]:
    batch_sampler = getattr(batches, "batch_sampler", None)
    owners = (batches, getattr(batches, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    return list({id(owner): owner for owner in owners}.values())


def shared(module: nn.Module, device: torch.device) -> nn.Module:
    """Return what averages a module's gradients over all processes, or with one process the module."""
    if ranks() == 1:
        return module
    return DistributedDataParallel(module, device_ids=[device.index] if device.type == "cuda" else None)


def from_rank_0(tensors: list[Tensor]) -> None:
    """Overwrite tensors by those of rank 0, so that all processes go on alike."""
    if ranks() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, 0)


def averaged(tensor: Tensor) -> Tensor:
    """Return the mean of a tensor over all processes."""
    if ranks() == 1:
        return tensor
    dist.all_reduce(tensor)
    return tensor / ranks()
