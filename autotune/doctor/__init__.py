"""``auxhead-tune doctor``: says why what was meant to run beside something else on a GPU does not, and what to change.

In: a module and its input, a script, or a Chrome trace of torch.profiler.
Out: findings, worst first, a verdict, and a record with the timeline of one request.
"""
