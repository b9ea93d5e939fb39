"""scikit-learn estimators: what people pass (`inputs`), fit and predict (`classifier`), what is kept (`model`)."""

from crosel.estimator.classifier import CroSelClassifier, PartialLabelClassifier
from crosel.estimator.model import History

__all__ = ["CroSelClassifier", "History", "PartialLabelClassifier"]
