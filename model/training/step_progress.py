"""Progress of a training: a function that counts images, and one that writes curves for TensorBoard."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..basics.bad_input import BadInput
from ..basics.files import naming
from .train import Epoch, Step

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


class TensorBoardLog:
    """An ``on_epoch`` for :func:`train` that writes event files; close it at the end."""

    def __init__(self, directory: Path, exits: Sequence[str]) -> None:
        """Open a log.

        Args:
            directory: gets the event files.
            exits: names of the exits, the classifier's last.

        Raises:
            BadInput: TensorBoard is not installed.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise BadInput("--tensorboard: it is not installed: pip install 'auxhead[tensorboard]'") from None
        self._directory = directory
        self._writer = SummaryWriter(str(directory))
        self._exits = tuple(exits)

    def __call__(self, epoch: Epoch) -> None:
        """Write one epoch."""
        values = {f"accuracy/{name}": each for name, each in zip(self._exits, epoch.accuracy or (), strict=False)}
        with naming(self._directory):
            for name, value in {"loss": epoch.loss, "learning_rate": epoch.learning_rate, **values}.items():
                self._writer.add_scalar(name, value, epoch.epoch)
            self._writer.flush()

    def close(self) -> None:
        """Close the files."""
        self._writer.close()
