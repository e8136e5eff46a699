"""Names by which the doctor marks in a trace what nothing else there tells; requests have that of profiled requests."""

#: Before the name of a head that runs.
HEAD = "auxhead head "
#: Before the device and the handle of the stream on which a kernel is launched.
STREAM = "auxhead stream "
