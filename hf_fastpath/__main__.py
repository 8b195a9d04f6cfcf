"""``python -m hf_fastpath``."""

import sys

from .cli import main

sys.exit(main())
