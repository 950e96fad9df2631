"""`python -m quantmla` is the command `quantmla`."""

import sys

from quantmla.cli import main

sys.exit(main())
