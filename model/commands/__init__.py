"""Parts of commands: one-line errors, the console, common options, and the user's own model by its name."""
