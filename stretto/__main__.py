"""`python -m stretto` is the command `stretto`."""

from __future__ import annotations

import sys

from stretto.cli import main

sys.exit(main())
