"""Short scripts to copy from, one a task: ``python -m auxhead.model.examples.NAME``, on the CPU and on a GPU.

``swap_heads``, ``train_save_load_run``, ``run_from_graphs``, ``folder_to_runner``, ``classify_text``, ``two_streams``,
and ``serve`` with its ``load_test``. Unlike the rest of the sources they import ``auxhead.model`` by its name, as a
script elsewhere has to.
"""
