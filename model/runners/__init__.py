"""Runners: an ``EarlyExitNetwork`` made ready for some batch sizes, which turns x into an ``ExitResult``.

``table`` has them by name. ``runner`` has the bases (the lock of a request, its refresh and end) and the runner without
graphs that the others are tested against; ``overlapped``, ``polled``, ``gated`` and ``compacting`` replay CUDA graphs.
They share ``graph_runner``, the way of a request, and its parts: ``checks``, ``segment_times``, ``capture``,
``program``, ``captures`` and ``captured_network``.
"""
