"""The verbs of the command line that have no package of their own: `demo`, `eval`, `predict`, `info`."""
