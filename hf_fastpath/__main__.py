"""``python -m hf_fastpath``."""

import sys

from .cli.main import main

sys.exit(main())
