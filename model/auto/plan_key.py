"""What a plan is good for: a remembered one is used only where all of this is the same again."""

import hashlib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import kernels
from ..early_exit_network import EarlyExitNetwork
from ..machine import driver_version, processor_name
from ..runners.eager import EagerRunner
from .fingerprint import network_fingerprint

#: Shares are told apart in steps of 5 %: a few samples more or less at an exit change no choice.
_STEPS = 20


def plan_key(
    network: EarlyExitNetwork, batches: Sequence[Tensor], smaller: Sequence[int], trunk: str, exits: Tensor
) -> dict[str, Any] | None:
    """Return all that a choice depends on, as JSON can hold it.

    Args:
        network: whose taps have been checked.
        batches: that it was, or will be, measured with; all of one shape.
        smaller: batch sizes that samples may be gathered into.
        trunk: see :func:`make_trunk`.
        exits: see :func:`exits_of`.

    Returns:
        dict: or None for a network that cannot be told from others, see :func:`network_fingerprint`.
    """
    fingerprint = network_fingerprint(network)
    if fingerprint is None:
        return None
    example = batches[0]
    return {
        "device": _device(example.device),
        "software": _software(),
        "settings": _settings(),
        "code": _code_hash(),
        "network": fingerprint,
        "sample": [list(example.shape[1:]), str(example.dtype), list(example.stride()[1:])],
        "trunk": trunk,
        "batch": len(example),
        "smaller": list(smaller),
        "rules": [
            [head.rule.criterion, head.rule.threshold, head.rule.temperature, head.rule.enabled]
            for head in network.fused_heads
        ],
        "exits": {
            "of_samples": _rounded(shares_of(exits, len(network.taps))),
            "of_batches": _rounded(shares_of(exits.amax(dim=1), len(network.taps))),
        },
    }


def exits_of(network: EarlyExitNetwork, batches: Sequence[Tensor]) -> Tensor:
    """Return [B, N] int64: where each sample of each batch leaves, by the eager runner."""
    eager = EagerRunner(network)
    with torch.inference_mode(False):
        return torch.stack([eager(x).exit_index for x in batches]).cpu()


def shares_of(exits: Tensor, taps: int) -> tuple[float, ...]:
    """Return how many of some exits are at each tap and, last, at the classifier, 0 to 1."""
    return tuple((exits.flatten().bincount(minlength=taps + 1) / exits.numel()).tolist())


def _rounded(shares: Sequence[float]) -> list[float]:
    return [round(share * _STEPS) / _STEPS for share in shares]


def _device(device: torch.device) -> dict[str, Any]:
    """The GPU, and the processor that launches its graphs."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "gpu": gpu and gpu.name,
        "sm_count": gpu and gpu.multi_processor_count,
        "driver": driver_version(),
        "processor": processor_name(),
    }


def _software() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def _settings() -> dict[str, Any]:
    """Settings of PyTorch by which cuDNN and cuBLAS choose other kernels."""
    return {
        "benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.backends.cudnn.deterministic,
        "convolutions": torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        "products": torch.backends.cuda.matmul.fp32_precision,
    }


def _code_hash() -> str:
    """Hash kernels, their tuned tables and runners."""
    found = hashlib.sha256()
    for package in (Path(kernels.__file__).parent, Path(__file__).parent):
        for path in sorted(path for path in package.rglob("*") if path.suffix in (".py", ".json")):
            found.update(f"{package.name}/{path.relative_to(package)}\0".encode() + path.read_bytes())
    return found.hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
