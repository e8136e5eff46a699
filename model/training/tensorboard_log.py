"""``TensorBoardLog``: writes loss, learning rate and accuracies of each epoch for TensorBoard."""

from collections.abc import Sequence
from pathlib import Path

from ..bad_input import BadInput
from ..replacing import naming
from .train import Epoch


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
