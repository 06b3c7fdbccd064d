"""`python -m tests.gpu`: see suite.py."""

import sys

from tests.gpu.suite import main

sys.exit(main(sys.argv[1:]))
