"""Runners: an ``EarlyExitNetwork`` made ready for some batch sizes, which turns x into an ``ExitResult``.

``table`` has them by name. ``runner`` has the bases (a request, refresh and end of what replays graphs) and the runner
without graphs that the others are tested against; ``overlapped``, ``polled``, ``gated`` and ``compacting`` replay CUDA
graphs. They share ``graph_runner``, which captures, and its parts: ``checks``, ``segment_times``, ``capture``,
``program``, ``captures`` and ``captured_network``.
"""
