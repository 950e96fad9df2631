"""Makes cases.py and compare.py importable for the tests of this folder and below."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
