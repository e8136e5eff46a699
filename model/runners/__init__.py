"""Runners: an ``EarlyExitNetwork`` made ready for some batch sizes, which turns x into an ``ExitResult``.

``runner`` is the base; ``eager`` runs without graphs and is what the others are tested against; ``overlapped``,
``polled``, ``gated`` and ``compacting`` replay CUDA graphs. They share ``serial_runner``, the lock of a request, its
refresh and end, ``graph_runner``, the way of a request, and its parts: ``checks``, ``segment_times``, ``capture``,
``head_launches``, ``captured_batch``, ``captured_heads`` and ``captured_memory``.
"""
