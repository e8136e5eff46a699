"""``auxhead infer``: answers of a checkpoint's network for image files, batch by batch, as a table or as JSON lines.

In: a checkpoint and images. Out: of each image the answer, how sure it is, and the exit that gave it.
"""
