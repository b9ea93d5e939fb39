"""The training loop, its steps and state. See `trainer` for the loop, `session` for what a run holds in memory."""
