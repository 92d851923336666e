"""The tests' inputs for honed: templates, tokenizers, tiny models, data sets."""

from honed.worker.model import torchvision

torchvision.mend()  # checkpoints are built before a worker mends it
