"""What users have -> one `Dataset`. A reader is one small module with a function that returns a Dataset."""

from crosel.data.dataset import Dataset, draw_candidates
from crosel.data.sources import load

__all__ = ["Dataset", "draw_candidates", "load"]
