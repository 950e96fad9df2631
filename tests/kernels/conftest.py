"""Makes the modules that tests of kernels share importable: cases, compare, sass."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "triton")]
