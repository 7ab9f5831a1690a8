"""The paper's sizes: layer widths of DLRM, DCN and their multi-tower forms, and the tables of Criteo-1TB."""

from __future__ import annotations

from dmt.plan.tables import TableSpec

__all__ = [
    "CRITEO_1TB_ROWS",
    "CRITEO_DENSE_FEATURES",
    "CROSS_LAYERS",
    "CROSS_RANK",
    "DENSE_ARCH_LAYER_SIZES",
    "DMT_DLRM_OVER_ARCH_LAYER_SIZES",
    "OVER_ARCH_LAYER_SIZES",
    "criteo_1tb_tables",
]

DENSE_ARCH_LAYER_SIZES = (512, 256)
"""Bottom MLP; the models append the dimension that their interaction needs (N, or D with towers)."""
OVER_ARCH_LAYER_SIZES = (1024, 1024, 512, 256, 1)
"""Top MLP of DLRM, DCN and DMT-DCN."""
DMT_DLRM_OVER_ARCH_LAYER_SIZES = (1024, 512, 256, 1)
"""Top MLP of DMT-DLRM: one layer less, found by rederiving the MFLOPs of the DMT paper's Tables 4 and 5."""
CROSS_RANK = 512
"""Rank of every cross layer of DCN and DMT-DCN, in the towers too."""
CROSS_LAYERS = 3
"""Cross layers of the global interaction of DCN and DMT-DCN; a tower has one."""

CRITEO_DENSE_FEATURES = 13
"""Integer columns of a Criteo sample."""
CRITEO_1TB_ROWS = (
    *(45833188, 36746, 17245, 7413, 20243, 3, 7114, 1441, 62, 29275261, 1572176, 345138, 10),
    *(2209, 11267, 128, 4, 974, 14, 48937457, 11316796, 40094537, 452104, 12606, 104, 35),
)
"""Distinct values of the 26 categorical columns of Criteo-1TB, in column order."""


def criteo_1tb_tables(embedding_dim: int = 128) -> tuple[TableSpec, ...]:
    """The 26 tables of Criteo-1TB: feature ``C1`` in table ``t_C1`` and so on.

    N, the columns of every table, is 128 in the paper (22.78 G parameters); `InputError` if it is not positive.
    """
    return tuple(
        TableSpec(name=f"t_C{i}", num_embeddings=rows, embedding_dim=embedding_dim, feature_names=(f"C{i}",))
        for i, rows in enumerate(CRITEO_1TB_ROWS, start=1)
    )
