"""The reference trainer: config, data, loop, metrics, checkpoints, and the ``dmt`` command.

Run it with ``torchrun --nproc-per-node 4 -m dmt.training CONFIG.toml [section.key=value ...]``.
"""
