"""Progress of a training: counts images, and tells epoch and loss from time to time."""

import time
from collections.abc import Callable

from .train import Step

#: Seconds between two looks at the loss, each of which waits for the device.
_BETWEEN_LOOKS = 0.5


def show_steps(advance: Callable[[int, str], None], epochs: int, images_an_epoch: int) -> Callable[[Step], None]:
    """Return an ``on_step`` for :func:`train` that counts images as done; of a resumed training those before, too.

    Args:
        advance: counts images, with a remark to show.
        epochs: how many there are in all.
        images_an_epoch: how many images each has.
    """
    remark, looked, begun = "", 0.0, False

    def on_step(step: Step) -> None:
        nonlocal remark, looked, begun
        if time.monotonic() > looked + _BETWEEN_LOOKS:
            remark, looked = f"epoch {step.epoch + 1} of {epochs}, loss {step.loss.item():.2f}", time.monotonic()
        before = 0 if begun else step.epoch * images_an_epoch
        begun = True
        advance(before + step.images, remark)

    return on_step
