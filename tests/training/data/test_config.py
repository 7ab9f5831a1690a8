"""Settings: what is refused and what the message says."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from dmt.training.data.config import DataConfig, SyntheticConfig


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"train_path": "a"}, "train_path has no meaning for kind='synthetic'"),
        ({"num_embeddings": 5}, "num_embeddings has no meaning for kind='synthetic'"),
        ({"kind": "criteo_tsv"}, "kind='criteo_tsv' needs train_path"),
        ({"kind": "criteo_tsv", "train_path": "a", "id_mode": "index"}, "Criteo's ids are hexadecimal"),
        ({"kind": "criteo_tsv", "train_path": "a", "split_column": "s"}, "are for kind='columns'"),
        ({"kind": "columns", "train_path": "a"}, "kind='columns' needs categorical"),
        (
            {"kind": "columns", "train_path": "a", "categorical": ["c"], "eval_path": "b", "split_column": "s"},
            "both say what evaluation rows are",
        ),
        (
            {"kind": "columns", "train_path": "a", "categorical": ["c"], "num_embeddings_per_feature": {"c": 0}},
            "'c' has 0",
        ),
        ({"kind": "parquet"}, "criteo_tsv"),
        ({"shufle_rows": 3}, "shufle_rows"),
        ({"source": "a:b", "categorical": ["c"], "timestamps": ["t"]}, "timestamps has no meaning for kind='source'"),
        ({"synthetic": {"num_features": 3, "num_groups": 4}}, "num_groups=4 exceeds num_features=3"),
        ({"synthetic": {"num_features": 3, "num_multi_hot": 4, "num_groups": 1}}, "num_multi_hot=4 exceeds"),
        ({"prepared": "p", "train_path": "a"}, "train_path has no meaning for kind='prepared'"),
        ({"kind": "columns", "train_path": "a", "categorical": ["c"], "vocabulary": "p"}, "needs id_mode='frequency'"),
    ],
)
def test_refused_settings(settings, text):
    with pytest.raises(ValidationError, match=text):
        DataConfig.model_validate(settings)


def test_every_setting_is_documented_and_frozen():
    for model in (DataConfig, SyntheticConfig):
        assert all(field.description for field in model.model_fields.values())
    with pytest.raises(ValidationError, match="frozen"):
        DataConfig().label = "y"
