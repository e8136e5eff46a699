"""Names by which heads and streams are marked in a trace, which nothing else there tells."""

#: Before the name of a head that runs.
HEAD = "auxhead head "
#: Before the device and the handle of the stream on which a kernel is launched.
STREAM = "auxhead stream "
