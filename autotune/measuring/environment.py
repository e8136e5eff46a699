"""Environment of a measurement, as records keep it: GPU, driver, clocks, versions, commit."""

import gc
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ...model.basics.bad_input import BadInput
from ...model.basics.machine import output_of, versions


def this_device(
    command: str, otherwise: str = "; `auxhead-tune table FILE` prints records without one"
) -> torch.device:
    """Return the current CUDA device for a command.

    Raises:
        BadInput: there is none; ends with ``otherwise``, which says what can be done without.
    """
    if not torch.cuda.is_available():
        raise BadInput(f"{command}: torch sees no CUDA device here, wants one{otherwise}")
    return torch.device("cuda", torch.cuda.current_device())


def release_memory() -> None:
    """Give the device back what nothing holds any more, for whatever is built next."""
    gc.collect()
    torch.cuda.empty_cache()


def environment(device: torch.device) -> dict[str, Any]:
    """Return the fields that do not change during a run; see :class:`Record`. Unknown ones are None."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "gpu": gpu and gpu.name,
        "sm_count": gpu and gpu.multi_processor_count,
        "capability": gpu and f"{gpu.major}.{gpu.minor}",
        **versions(),
        "commit": _commit(Path(__file__).resolve().parent),
    }


def clocks(device: torch.device) -> dict[str, float] | None:
    """Return the GPU's clocks in MHz, temperature in degrees Celsius and power in W, as they are; None if unknown."""
    if device.type != "cuda":
        return None
    names = ("clocks.sm", "clocks.mem", "clocks.max.sm", "temperature.gpu", "power.draw")
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    output = output_of(["nvidia-smi", "-i", uuid, f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"])
    values = (output or "").split(",")
    if len(values) != len(names):
        return None
    found = {}
    for name, value in zip(("sm_mhz", "memory_mhz", "max_sm_mhz", "celsius", "watt"), values, strict=True):
        with suppress(ValueError):  # "[N/A]"
            found[name] = float(value)
    return found


def _commit(folder: Path) -> str | None:
    """Return the commit of the checkout that this very code runs from, if it does."""
    git = ["git", "-C", str(folder)]
    # an installation may lie in a checkout of something else, whose commit says nothing about this code
    if output_of([*git, "ls-files", "--error-unmatch", Path(__file__).name]) is None:
        return None
    commit = output_of([*git, "rev-parse", "HEAD"])
    changed = output_of([*git, "status", "--porcelain", "--untracked-files=no"])
    return commit if commit is None else commit.strip() + ("-dirty" if changed else "")
