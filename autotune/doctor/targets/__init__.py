"""Targets of the doctor: a factory, a script or a trace, named, made ready and run; errors of the user's own code."""
