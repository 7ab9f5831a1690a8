"""``torchrun --nproc-per-node 4 -m dmt.training CONFIG.toml [section.key=value ...]``: trains one model."""

from __future__ import annotations

import logging
import os
import sys
import warnings

import click

from dmt.errors import InputError
from dmt.training.config import load_config

EXAMPLE = "torchrun --nproc-per-node 4 -m dmt.training demo train.max_steps=200 model.arch=dlrm"


@click.command(epilog=f"Example: {EXAMPLE}")
@click.argument("config")
@click.argument("overrides", nargs=-1)
def main(config: str, overrides: tuple[str, ...]) -> None:
    """Trains the model that CONFIG (a TOML file or a shipped config) describes.

    OVERRIDES replace single values, as section.key=value.
    """
    _quiet()
    rank = int(os.environ.get("RANK", "0"))
    try:
        settings = load_config(config, overrides)
        from dmt.training.run import train

        result = train(settings)
    except InputError as error:
        # One line, from the rank it concerns; faults every rank sees alike are told by rank 0 only.
        print(f"{'' if rank == 0 else f'[rank {rank}] '}error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    if rank == 0:
        from dmt.training.summary import print_summary

        print_summary({settings.model.arch: result})


def _quiet() -> None:
    """Leaves our own messages, of rank 0; what TorchRec and FBGEMM say at INFO on every rank helps nobody here."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    ours = logging.getLogger("dmt")
    ours.addHandler(handler)
    ours.propagate = False
    ours.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR)
    warnings.simplefilter("ignore")
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


if __name__ == "__main__":
    main()
