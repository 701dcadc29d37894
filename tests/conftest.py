"""Settings for all tests."""

import torch

torch.set_num_threads(1)  # matrices this small are slower on several
