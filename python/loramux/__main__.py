"""``python -m loramux``."""

import sys

from .cli import main

sys.exit(main())
