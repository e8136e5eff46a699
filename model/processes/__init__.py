"""Processes that work on one task together, as torchrun starts them: what training, evaluation and pipelines share.

process_group    joins the processes, and compares them before
rank_failures    a process that dies, hangs or raises ends all of them, with the cause
worker           a thread for what may wait for another process
dealing          batches dealt to processes, and their results in order; and what has to be the same in all
"""
