"""``Plan``: the runner chosen for one batch size and the times it was chosen by, in words and as JSON."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..trunk.trunk import check_kind
from .candidates import Candidate
from .pass_times import PassTimes

#: No request takes less or more microseconds: a nanosecond, a day.
_US = (1e-3, 86_400e6)


@dataclass(frozen=True)
class Plan:
    """The way to run a network for one batch size, and why."""

    chosen: Candidate
    plain: str
    """Name of the plain graph, which ``exits="overlapped"`` captures: nothing slower is chosen."""
    times: Mapping[str, PassTimes]
    """Times of each candidate by its name, simplest first."""
    trunk_times: Mapping[str, PassTimes]
    """Times of the plain graph by the kind of its trunk, if there was a choice of them; measured before ``times``."""
    left_out: Mapping[str, str]
    """Reason why a candidate or a trunk was not measured, by its name."""
    shares: tuple[float, ...]
    """Shares, 0 to 1, of the samples measured with that left at each tap and, last, at the classifier."""
    utc: str
    """Time of the measurement, ISO 8601."""
    from_file: bool = False
    """True if it was read from a file, False if it was measured for this runner."""

    def describe(self) -> str:
        """Say what was chosen, by which measurement, and why others were not measured."""
        when = f"measured on {self.utc[:10]}" if self.from_file else "measured"
        sentences = [f"{self.chosen.name}, {when} {self.reason()}."]
        others = [
            f"{name} {self._us(name)}"
            for name in self.times
            if name not in (self.chosen.name, self._fastest, self.plain)
        ]
        if others:
            sentences.append(f"The others: {', '.join(others)} us.")
        if self.trunk_times:
            trunks = [f"{kind} {statistics.median(times.host):,.1f}" for kind, times in self.trunk_times.items()]
            sentences.append(f"The plain graph by trunk: {', '.join(trunks)} us.")
        sentences += [f"{name} left out: {why.rstrip('.')}." for name, why in self.left_out.items()]
        return " ".join(sentences)

    def others(self) -> list[str]:
        """Name in a sentence each what else was measured, and what was not."""
        measured = [name for name in self.times if name not in (self.chosen.name, self.plain)]
        measured += [f"trunk {kind}" for kind in self.trunk_times if kind not in ("as_is", self.chosen.trunk)]
        parts = {"Also measured": measured, "Left out": self.left_out}
        return [f"{what}: {', '.join(names)}." for what, names in parts.items() if names]

    def reason(self) -> str:
        """Say why it was chosen, beginning with the time of a request."""
        chosen, plain, fastest = self.chosen.name, self.plain, self._fastest
        reason = f"{self._us(chosen)} us to the answer: "
        if chosen == plain:
            reason += "nothing is faster than this plain graph" if fastest == plain else "this is the plain graph"
        else:
            less = 1 - self._host_us(chosen) / self._host_us(plain)
            reason += f"{less:.1%} less than the plain graph, {plain}, {self._us(plain)} us"
        if fastest == chosen:
            return reason
        simpler = "" if chosen == plain else ", and less simple"
        return f"{reason}; {fastest}, {self._us(fastest)}, is no faster beyond the noise{simpler}"

    @property
    def _fastest(self) -> str:
        return min(self.times, key=lambda name: (self._host_us(name), name != self.plain))

    def _host_us(self, name: str) -> float:
        return statistics.median(self.times[name].host)

    def _us(self, name: str) -> str:
        return f"{self._host_us(name):,.1f}"

    def as_json(self) -> dict[str, Any]:
        """Return what :meth:`from_json` takes."""
        return {
            "chosen": self.chosen._asdict(),
            "plain": self.plain,
            "times": _times_as_json(self.times),
            "trunk_times": _times_as_json(self.trunk_times),
            "left_out": dict(self.left_out),
            "shares": list(self.shares),
            "utc": self.utc,
        }

    @classmethod
    def from_json(cls, content: Any) -> "Plan":
        """Read what :meth:`as_json` returned.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: content of any other form.
        """
        chosen = Candidate(**{**content["chosen"], "forks": tuple(content["chosen"]["forks"])})
        if type(chosen.compact) is not bool or not all(isinstance(fork, str) for fork in chosen.forks):
            raise ValueError(f"chosen: got {chosen!r:.100}")
        plan = cls(
            chosen,
            content["plain"],
            _times_from_json(content["times"]),
            _times_from_json(content["trunk_times"]),
            {str(name): str(why) for name, why in content["left_out"].items()},
            tuple(_number("shares", share, 0.0, 1.0) for share in content["shares"]),
            str(content["utc"]),
        )
        check_kind("trunk", chosen.trunk)
        if chosen.exits not in ("overlapped", "polled", "gated"):
            raise ValueError(f"chosen: got {chosen!r:.100}")
        if chosen.name not in plan.times or plan.plain not in plan.times:
            raise ValueError(f"times: {chosen.name:.60} or {plan.plain!s:.60} is not among them")
        return plan


def _times_as_json(times: Mapping[str, PassTimes]) -> dict[str, Any]:
    return {name: {"host_us": us.host, "device_us": us.device} for name, us in times.items()}


def _times_from_json(content: Any) -> dict[str, PassTimes]:
    return {
        str(name): PassTimes(_microseconds(us["host_us"]), _microseconds(us["device_us"]))
        for name, us in content.items()
    }


def _microseconds(values: Any) -> list[float]:
    if not values:
        raise ValueError("times: got none of a runner")
    return [_number("times", value, *_US) for value in values]


def _number(name: str, value: Any, least: float, most: float) -> float:
    if type(value) not in (int, float) or not least <= value <= most:
        raise ValueError(f"{name}: got {value!r:.60}, wants {least:g} to {most:g}")
    return float(value)
