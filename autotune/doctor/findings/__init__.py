"""What the doctor finds, a module for what findings have in common."""
