"""One framework for the studies of quality: arms, settings, comparisons -> JSON, table, picture."""
