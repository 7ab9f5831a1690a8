"""Imports torchmetrics once, with the warning that it raises while it is imported ignored."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    # torchmetrics 1.0.3, which TorchRec 1.8.0 wants, compares versions by distutils; pytest would make that an error.
    warnings.simplefilter("ignore", DeprecationWarning)
    import torchmetrics  # noqa: F401
