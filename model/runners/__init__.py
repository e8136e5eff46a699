"""Runners: an ``EarlyExitNetwork`` made ready for some batch sizes, which turns x into an ``ExitResult``.

``runner`` has the base, and the runner without graphs that the others are tested against; ``overlapped``,
``polled``, ``gated`` and ``compacting`` replay CUDA graphs. They share ``serial_runner``, the lock of a request, its
refresh and end, ``graph_runner``, the way of a request, and its parts: ``checks``, ``segment_times``, ``capture``,
``captures``, ``captured_batch`` and ``captured_heads``.
"""
