"""What the doctor finds in a trace, a module for findings of the same cause.

In: a :class:`~auxhead.autotune.doctor.trace.Trace`. Out: findings, with what each costs and a remedy.
Nothing here imports torch.
"""
