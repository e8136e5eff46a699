"""Watching of live requests: what the profiler's trace does not tell of accesses, streams, events and devices.

In: code as it runs within a :class:`~auxhead.autotune.doctor.watching.watcher.Watcher`.
Out: a :class:`~auxhead.autotune.doctor.trace.Watched`.
"""
