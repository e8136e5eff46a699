"""One network's requests before and after: naive early exit against a runner, checked, timed and profiled."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .agreement import Agreement, agreement
from .bad_input import BadInput
from .checkpoint import load_checkpoint
from .early_exit_network import EarlyExitNetwork
from .fused_aux_head import FusedAuxHead
from .images import normalise, open_image, to_pixels
from .naive_forward import NaiveForward
from .profiling import HostTimes, RequestProfile, profile_requests, steady_state_problems, time_requests
from .user_model import UserModel

BEFORE, AFTER = "before", "after"


@dataclass(frozen=True)
class Comparison:
    """What was found for one network and one batch; each by ``BEFORE`` and ``AFTER``."""

    profiles: dict[str, RequestProfile]
    times: dict[str, HostTimes]
    agreements: dict[str, Agreement]
    """With the eager runner: before on the trunk as it is, after on the same trunk as the runner."""
    samples_by_exit: dict[str, int]
    """How many samples of the batch leave at each tap, and last how many the classifier answers."""

    @property
    def problems(self) -> list[str]:
        """What keeps the runner from a steady state."""
        return steady_state_problems(self.profiles[AFTER])


def compare(network: EarlyExitNetwork, x: Tensor, *, exits: str, trunk: str, requests: int, out: Path) -> Comparison:
    """Check, time and profile naive early exit and a runner; writes ``before.json`` and ``after.json``.

    Args:
        network: in eval mode, on x's device.
        x: the input of every request.
        exits: the kind of runner, as ``make_runner`` takes it.
        trunk: what the runner makes of the trunk, as ``make_runner`` takes it.
        requests: counted requests of each measurement.
        out: directory of the traces.

    Raises:
        BadInput: the network cannot be run so; says why.
        RuntimeError: an answer differs from the eager runner's by more than rounding; nothing is timed then.
    """
    from .make_runner import make_runner

    batch_sizes = (len(x),)
    try:
        network.check_taps(x)
        naive = NaiveForward(network)
        runner = make_runner(network, x, exits=exits, batch_sizes=batch_sizes, trunk=trunk)
    except (TypeError, ValueError) as error:
        raise BadInput(f"profile: {' '.join(str(error).split())}") from None
    try:
        calls: dict[str, Callable[[Tensor], object]] = {BEFORE: naive, AFTER: runner}
        agreements = {}
        for name, call, same_trunk in ((BEFORE, naive, "as_is"), (AFTER, runner, trunk)):
            eager = make_runner(network, x, exits="eager", batch_sizes=batch_sizes, trunk=same_trunk)
            wanted = eager(x)
            agreements[name] = agreement(call(x), wanted, _thresholds(network))
            eager.close()
            if agreements[name].unlike:
                raise RuntimeError(
                    f"{name}: {agreements[name].unlike} of {len(x)} samples have another label or exit than the eager "
                    "runner gives them; not timed"
                )
        samples = torch.bincount(wanted.exit_index.cpu(), minlength=len(network.taps) + 1).tolist()
        times = time_requests(calls, x, requests)
        profiles = {name: profile_requests(call, x, requests, out / f"{name}.json") for name, call in calls.items()}
    finally:
        runner.close()
    return Comparison(profiles, times, agreements, dict(zip([*network.taps, "classifier"], samples, strict=True)))


def _thresholds(network: EarlyExitNetwork) -> list[float]:
    return [head.rule.threshold_in_force for head in network.heads if isinstance(head, FusedAuxHead)]


def demo_model(checkpoint: Path, batch: int) -> tuple[UserModel, str]:
    """Load what ``auxhead demo`` wrote, with pictures of its test split where it left some, else noise.

    Returns:
        The network with a batch for it, and what the batch is made of.

    Raises:
        BadInput: files that are missing or damaged.
    """
    loaded = load_checkpoint(checkpoint)
    size = loaded.image_size
    paths = sorted((checkpoint / "examples").glob("*.png"))
    if not paths:  # the demo keeps no copies of pictures that its user has as files
        return UserModel(loaded.network, torch.randn(batch, 3, size, size)), "random numbers"
    pixels = torch.stack([to_pixels(open_image(path), size) for path in paths])
    images = normalise(pixels, loaded.mean, loaded.std)
    return UserModel(loaded.network, repeated(images, batch)), f"pictures of {checkpoint / 'examples'}"


def repeated(x: Tensor, batch: int) -> Tensor:
    """Return ``batch`` samples of x, beginning anew after the last."""
    return torch.cat([x] * -(-batch // len(x)))[:batch]  # keeps channels_last, which indexing would not
