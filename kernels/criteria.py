"""Exit criteria by name with the range of their thresholds, and checks of criterion, temperature and threshold."""

import torch

_SMALLEST, _LARGEST = torch.finfo(torch.float32).smallest_normal, torch.finfo(torch.float32).max

#: For each criterion the closed range its threshold may take. A sample exits when its confidence is strictly greater
#: than the threshold, so that 1.0 never exits under ``max_prob`` and 0.0 always does. State_dicts hold the position of
#: a criterion in this order: new ones go to the end.
CRITERIA: dict[str, tuple[float, float]] = {"max_prob": (0.0, 1.0)}


def check_criterion(criterion: str) -> None:
    """Raise ``ValueError`` unless ``criterion`` is a known one."""
    if criterion not in CRITERIA:
        raise ValueError(f"criterion: got {criterion!r}, wants one of {sorted(CRITERIA)}")


def check_temperature(temperature: float) -> None:
    """Raise ``TypeError`` for no number, ``ValueError`` unless it is a finite float32 greater than 0."""
    if not isinstance(temperature, (int, float)):
        raise TypeError(f"temperature: got {temperature!r}, wants a number")
    if not _SMALLEST <= temperature <= _LARGEST:
        raise ValueError(f"temperature: got {temperature}, wants a finite float32 greater than 0")


def check_threshold(criterion: str, threshold: float) -> None:
    """Raise ``TypeError`` for no number, ``ValueError`` unless it lies in the range of ``criterion``."""
    low, high = CRITERIA[criterion]
    if not isinstance(threshold, (int, float)):
        raise TypeError(f"threshold: got {threshold!r}, wants a number")
    if not low <= threshold <= high:
        raise ValueError(f"threshold: got {threshold}, wants a number in [{low}, {high}] for criterion {criterion!r}")
