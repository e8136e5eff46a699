"""The strategies of a sweep, by the effort they take; see :mod:`auxhead.autotune.sweep.search` for what one is."""

from ..strategies import full, quick

STRATEGIES = {"quick": quick.search, "full": full.search}
