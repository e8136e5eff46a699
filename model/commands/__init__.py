"""What the commands share: errors in one line, and the user's own model by its name."""
