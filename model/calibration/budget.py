"""``Budget``: what thresholds are chosen under, checked as it is asked for."""

from typing import NamedTuple

from .exit_latency import ExitLatencies


class Budget(NamedTuple):
    """The one budget of a calibration."""

    name: str
    """``max_accuracy_drop``, ``max_latency_ms`` or ``max_work``, as the argument of :func:`calibrate_network`."""
    value: float


def one_budget(
    max_accuracy_drop: float | None,
    max_latency_ms: float | None,
    max_work: float | None,
    latencies: ExitLatencies | None,
) -> Budget:
    """Return the budget that is given; arguments as of :func:`calibrate_network`.

    Raises:
        TypeError, ValueError: none is, or several, or one that cannot be.
    """
    budgets = {"max_accuracy_drop": max_accuracy_drop, "max_latency_ms": max_latency_ms, "max_work": max_work}
    given = [Budget(name, value) for name, value in budgets.items() if value is not None]
    for name, value in given:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name}: got {value!r}, wants a number or None")
    if len(given) != 1:
        got = " and ".join(name for name, _ in given) or "none"
        raise ValueError(f"{', '.join(budgets)}: got {got}, wants one of them")
    name, value = given[0]
    if name == "max_accuracy_drop" and not 0.0 <= value <= 1.0:
        raise ValueError(f"max_accuracy_drop: got {value}, wants a number in [0, 1]")
    if name == "max_work" and not 0.0 < value <= 1.0:
        raise ValueError(f"max_work: got {value}, wants a share of the backbone's FLOPs in (0, 1]")
    if name == "max_latency_ms":
        if not 0.0 < value < float("inf"):
            raise ValueError(f"max_latency_ms: got {value}, wants milliseconds greater than 0")
        if latencies is None:
            raise ValueError("latencies: got None, wants those of measure_exit_latencies for max_latency_ms")
    return Budget(name, float(value))
