"""``python -m pdserve_router``."""

import sys

from pdserve_router.main import main

sys.exit(main())
