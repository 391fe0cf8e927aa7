"""``python -m pdserve_decode``."""

import sys

from pdserve_decode.main import main

sys.exit(main())
