"""What a planner has measured and chosen for one batch size, in words and as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..spread import Spread
from .candidates import Candidate


class CandidateTimes(NamedTuple):
    """What a request takes on average over the batches of the example; the spread is that of several passes."""

    host: Spread
    """From the call, on an idle device, until the answer is there."""
    device: Spread
    """When requests follow back to back."""


@dataclass(frozen=True)
class Plan:
    """How to run a network for one batch size, and why."""

    chosen: Candidate
    plain: str
    """The name of the plain graph, which ``exits="overlapped"`` captures: nothing slower is chosen."""
    times: Mapping[str, CandidateTimes]
    """By name, simplest first."""
    left_out: Mapping[str, str]
    """By name why a candidate was not measured."""
    shares: tuple[float, ...]
    """Of the samples that were measured with: how many left at each tap and, last, at the classifier, 0 to 1."""
    utc: str
    """When it was measured, ISO 8601."""
    remembered: bool = False
    """Whether it comes from an earlier process, or an earlier runner of this one."""

    def describe(self) -> str:
        """Say what was chosen, and by which measurement."""
        when = f"remembered from {self.utc[:10]}: measured" if self.remembered else "measured"
        said = [f"{self.chosen.name}, {when} {self.reason()}."]
        others = [
            f"{name} {self._us(name)}"
            for name in self.times
            if name not in (self.chosen.name, self._fastest, self.plain)
        ]
        if others:
            said.append(f"The others: {', '.join(others)} us.")
        said += [f"{name} left out: {why.rstrip('.')}." for name, why in self.left_out.items()]
        return " ".join(said)

    def reason(self) -> str:
        """Say why it was chosen, beginning with the time of a request."""
        chosen, plain, fastest = self.chosen.name, self.plain, self._fastest
        said = f"{self._us(chosen)} us to the answer: "
        if chosen == plain:
            said += "nothing is faster than this plain graph" if fastest == plain else "this is the plain graph"
        else:
            less = 1 - self.times[chosen].host.median / self.times[plain].host.median
            said += f"{less:.1%} less than the plain graph, {plain}, {self._us(plain)}"
        if fastest == chosen:
            return said
        simpler = "" if chosen == plain else ", and less simple"
        return f"{said}; {fastest}, {self._us(fastest)}, is no faster beyond the noise{simpler}"

    @property
    def _fastest(self) -> str:
        return min(self.times, key=lambda name: (self.times[name].host.median, name != self.plain))

    def _us(self, name: str) -> str:
        return f"{self.times[name].host.median:,.1f}"

    def as_json(self) -> dict[str, Any]:
        """Return what :meth:`from_json` takes."""
        return {
            "chosen": self.chosen._asdict(),
            "plain": self.plain,
            "times": {
                name: {"host_us": times.host._asdict(), "device_us": times.device._asdict()}
                for name, times in self.times.items()
            },
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
        times = {
            str(name): CandidateTimes(_spread(measured["host_us"]), _spread(measured["device_us"]))
            for name, measured in content["times"].items()
        }
        plan = cls(
            chosen,
            content["plain"],
            times,
            {str(name): str(why) for name, why in content["left_out"].items()},
            tuple(float(share) for share in content["shares"]),
            str(content["utc"]),
        )
        if chosen.exits not in ("overlapped", "polled", "gated"):
            raise ValueError(f"chosen: got {chosen}")
        if chosen.name not in times or plan.plain not in times:
            raise ValueError(f"times: {chosen.name} or {plan.plain} is not among them")
        return plan


def _spread(content: Mapping[str, Any]) -> Spread:
    return Spread(**{name: float(value) for name, value in content.items()})
