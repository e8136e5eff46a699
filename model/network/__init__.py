"""``EarlyExitNetwork``, a backbone with heads behind some of its layers, and its eager pass."""
