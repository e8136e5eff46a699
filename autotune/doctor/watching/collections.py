"""CollectionWatcher: notes when Python collects garbage, for how long, and at which line of the user's."""

import gc
import sys
import time
from typing import Any

from ..trace import Collection
from ..user_code import innermost_line


class CollectionWatcher:
    """Notes collections within its ``with`` block, of any thread; without one it costs a request nothing."""

    def __init__(self) -> None:
        """Have seen nothing."""
        self.request = 0
        """The one that runs, as whoever runs it says."""
        self.seen: list[Collection] = []
        self._began = 0.0

    def __enter__(self) -> "CollectionWatcher":
        """Begin to note."""
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *raised: object) -> None:
        """End it; Python is as it was."""
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
            return
        us = 1e6 * (time.perf_counter() - self._began)
        self.seen.append(Collection(self.request, info["generation"], us, innermost_line(sys._getframe(1))))
