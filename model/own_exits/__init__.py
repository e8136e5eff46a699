"""Models that return the logits of exits of their own: their heads found, taken out, and put beside them.

In: such a model, and a batch. Out: an ``EarlyExitNetwork`` that shares its parameters, by ``attach_exits``.
"""
