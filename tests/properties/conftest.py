"""The slow versions of the equations (`tests/maths/slow.py`) serve the property tests too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "maths"))
