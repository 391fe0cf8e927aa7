"""``python -m pdserve_prefill``."""

import sys

from pdserve_prefill.main import main

sys.exit(main())
