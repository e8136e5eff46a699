"""The state of a training at the end of an epoch, in one file: what it takes to go on as if it had never stopped."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ...kernels.json_text import parse_json
from ..bad_input import BadInput
from ..replacing import replacing

#: The value of ``format`` in the file; others are refused.
FORMAT = "auxhead training state 1"


@dataclass
class TrainingState:
    """All of a training that changes from epoch to epoch, but for random numbers that each epoch seeds anew."""

    learner: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    generators: list[torch.Generator]
    """Those that the batches draw from."""
    step: int = 0
    """Steps of the optimizer so far."""
    epochs: list[dict[str, Any]] = field(default_factory=list)
    """What is said of each epoch so far."""
    best: int | None = None
    """Index of the epoch with the best accuracy; None without validation."""
    best_tensors: dict[str, Tensor] = field(default_factory=dict)
    """Parameters and buffers at the end of that epoch."""

    def keep_best(self) -> None:
        """Remember the learner as it is as the best one."""
        self.best = len(self.epochs) - 1
        self.best_tensors = {name: tensor.clone() for name, tensor in tensors_of(self.learner).items()}

    def restore_best(self) -> None:
        """Make the learner what it was at its best epoch."""
        _overwrite(tensors_of(self.learner), self.best_tensors)

    def save(self, path: Path, settings: dict[str, Any]) -> None:
        """Write the state, or leave the file that is there as it is.

        Args:
            path: of the file, in a directory that is there.
            settings: what a training that goes on must have in common with this one.
        """
        tensors = {f"learner.{name}": tensor for name, tensor in tensors_of(self.learner).items()}
        tensors |= {f"best.{name}": tensor for name, tensor in self.best_tensors.items()}
        tensors |= {f"generator.{index}": one.get_state() for index, one in enumerate(self.generators)}
        for index, values in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": value for name, value in values.items()}
        facts = {
            "format": FORMAT,
            "settings": settings,
            "step": self.step,
            "epochs": self.epochs,
            "best": self.best,
            "scaler": self.scaler.state_dict(),
        }
        copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        with replacing(path) as unfinished:
            save_file(copies, unfinished, {"auxhead": json.dumps(facts)})

    def restore(self, path: Path, settings: dict[str, Any]) -> None:
        """Take over what :meth:`save` wrote.

        Raises:
            BadInput: no such file, a damaged one, or one of a training of other settings or another network; nothing
                is changed then.
        """
        if not path.is_file():
            raise BadInput(f"{path}: no such file, so that there is no training to resume")
        try:
            with safe_open(path, "pt") as file:
                facts = parse_json((file.metadata() or {}).get("auxhead", "null"))
                saved = {name: file.get_tensor(name) for name in file.keys()}
            if not isinstance(facts, dict) or facts.get("format") != FORMAT:
                raise BadInput(f"{path}: is no state of a training, or of another version; wants {FORMAT!r}")
            _check_same(path, facts["settings"], settings)
            self._take(path, facts, saved)
        except BadInput:
            raise
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise BadInput(f"{path}: is damaged ({error!r:.100})") from None

    def _take(self, path: Path, facts: dict[str, Any], saved: dict[str, Tensor]) -> None:
        own = tensors_of(self.learner)
        for name, tensor in own.items():
            found = saved.get(f"learner.{name}")
            if found is None or found.shape != tensor.shape:
                got = "has none" if found is None else f"has {list(found.shape)}"
                raise BadInput(f"{path}: {got} for {name!r}, wants {list(tensor.shape)}, as this network has")
        parameters = self.optimizer.param_groups[0]["params"]
        state: dict[int, dict[str, Tensor]] = {}
        for index, parameter in enumerate(parameters):
            if f"optimizer.{index}.step" not in saved:
                continue  # no exit depends on it, so that it never had a gradient
            values = {name: saved[f"optimizer.{index}.{name}"] for name in ("step", "exp_avg", "exp_avg_sq")}
            for name in ("exp_avg", "exp_avg_sq"):  # laid out as the parameter, as the optimizer does
                values[name] = torch.empty_like(parameter).detach().copy_(values[name])
            state[index] = values
        generators = [saved[f"generator.{index}"] for index in range(len(self.generators))]
        best = {name.removeprefix("best."): value for name, value in saved.items() if name.startswith("best.")}
        step, epochs, number, scaler = facts["step"], list(facts["epochs"]), facts["best"], facts["scaler"]

        _overwrite(own, {name: saved[f"learner.{name}"] for name in own})
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        for generator, numbers in zip(self.generators, generators, strict=True):
            generator.set_state(numbers)
        if scaler:
            self.scaler.load_state_dict(scaler)
        self.step, self.epochs, self.best, self.best_tensors = step, epochs, number, best


def tensors_of(learner: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a learner that its state_dict names, the very ones; no exit rules."""
    named = learner.state_dict().items()
    return {name: value for name, value in named if isinstance(value, Tensor) and "_extra_state" not in name}


@torch.no_grad()
def _overwrite(own: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    for name, tensor in own.items():
        tensor.copy_(saved[name])


def _check_same(path: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        if saved.get(name) != value:
            raise BadInput(
                f"{path}: is of a training with {name} {saved.get(name)!r:.60}, got {value!r:.60}; wants the same"
            )
