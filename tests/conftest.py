"""Settings that all tests share."""

import os

import torch
from hypothesis import settings

# Two cores shared by many processes: how long an example takes says nothing. In CI every run
# tries the same examples, so that a change, not chance, decides whether it passes.
settings.register_profile("pdserve", deadline=None, print_blob=True, derandomize="CI" in os.environ)
settings.load_profile("pdserve")

torch.set_num_threads(1)
