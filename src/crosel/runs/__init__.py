"""Runs on disk: the run folder, a run from start to end, and the labels that come out of it."""
