"""What users have -> one `Dataset`. A reader is one small module with a function that returns a Dataset."""

from crosel.data.candidates import draw_candidates, full_rule, with_classes_of
from crosel.data.dataset import Dataset
from crosel.data.settings import DataSettings
from crosel.data.sources import load

__all__ = ["DataSettings", "Dataset", "draw_candidates", "full_rule", "load", "with_classes_of"]
