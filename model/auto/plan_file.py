"""``PlanFile``: plans kept as JSON, used again where the conditions that they were measured under are the same."""

import dataclasses
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..early_exit_network import EarlyExitNetwork
from ..json_file import read_json, write_json
from ..machine import driver_version, package_version, processor_name
from .example_batches import shares_of
from .plan import Plan

FORMAT = 2
#: A plan made within it is as good where less is asked for.
_BEST_BUDGET = ("budget", "thorough")
#: Shares are told apart in steps of 5 %: a few samples more or less at an exit change no choice.
_STEPS = 20


class PlanFile:
    """The plans of one runner, for all its batch sizes, in a file with the conditions that they were measured under."""

    def __init__(self, path: str | os.PathLike[str], conditions: Mapping[str, Any]) -> None:
        """Name a file, which need not exist, in a folder that does; for conditions see :func:`conditions_of`.

        Raises:
            TypeError, ValueError: the path is none, is a folder, or lies in a folder that does not exist.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"plan: got {type(path).__name__}, wants the path of a JSON file")
        self.path = Path(path)
        if self.path.is_dir() or not self.path.parent.is_dir():
            why = "a folder" if self.path.is_dir() else "in a folder that does not exist"
            raise ValueError(f"plan: got {str(path)!r}, {why}, wants the path of a JSON file")
        self._conditions = json.loads(json.dumps(conditions))  # as they come back from a file: tuples are lists there
        self.differing: list[str] = []
        """Names of the conditions that were others when the file was written."""

    def read(self) -> dict[int, Plan]:
        """Return the plans by batch size, or none where there is no file or its conditions differ.

        A damaged file is named in a warning, and none of its plans is used.
        """
        try:
            content = read_json(self.path)
            if type(content["format"]) is int and 0 < content["format"] < FORMAT:
                self.differing = ["format"]
                return {}
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']!r:.60}, wants {FORMAT}")
            measured = content["conditions"]
            names = dict.fromkeys((*self._conditions, *measured))
            self.differing = [
                name
                for name in names
                if measured.get(name) != self._conditions.get(name) and (name, measured.get(name)) != _BEST_BUDGET
            ]
            plans = {
                int(size): dataclasses.replace(Plan.from_json(plan), from_file=True)
                for size, plan in content["plans"].items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
            warnings.warn(f"{self.path} holds no plan ({why}); measuring anew", stacklevel=2)
            return {}
        return {} if self.differing else plans

    def write(self, plans: Mapping[int, Plan]) -> None:
        """Replace the file, if there is one; where nothing can be written, say so in a warning: the runner is made."""
        by_size = {str(size): plan.as_json() for size, plan in plans.items()}
        content = {"format": FORMAT, "conditions": self._conditions, "plans": by_size}
        try:
            write_json(self.path.resolve(), content)  # a link stays one
        except OSError as error:
            warnings.warn(f"{self.path}: the plan is not kept ({error.strerror or error})", stacklevel=2)


def conditions_of(
    network: EarlyExitNetwork, example_input: Tensor, asked: Mapping[str, Any], exits: Mapping[int, Tensor]
) -> dict[str, Any]:
    """Return by name all that a choice among runners depends on, as JSON can hold it.

    Of that ``asked`` is what the caller chose; ``exits`` holds by batch size what :func:`exits_of` returned.
    """
    taps = len(network.taps)
    return {
        **_device_conditions(example_input.device),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),
        "auxhead": package_version("auxhead"),
        "taps": list(network.taps),
        "layers": [type(layer).__qualname__ for layer in network.modules()],
        "parameters": [
            f"{name} {list(parameter.shape)} {parameter.dtype}" for name, parameter in network.named_parameters()
        ],
        "rules": [
            [head.rule.criterion, head.rule.threshold, head.rule.temperature, head.rule.enabled]
            for head in network.exit_heads
        ],
        **asked,
        "samples": [list(example_input.shape[1:]), str(example_input.dtype), list(example_input.stride()[1:])],
        "exit shares": {
            str(size): {
                "of samples": _rounded(shares_of(of_samples, taps)),
                "of batches": _rounded(shares_of(of_samples.amax(dim=1), taps)),
            }
            for size, of_samples in exits.items()
        },
    }


def _device_conditions(device: torch.device) -> dict[str, Any]:
    """Describe the GPU, and the processor that launches its graphs."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "GPU": gpu and f"{gpu.name}, {gpu.multi_processor_count} SMs",
        "driver": driver_version(),
        "processor": processor_name(),
    }


def _rounded(shares: tuple[float, ...]) -> list[float]:
    return [round(share * _STEPS) / _STEPS for share in shares]
