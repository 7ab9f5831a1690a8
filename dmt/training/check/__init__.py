"""``dmt check``: a run's model, towers, sharding plan, precision and id route against the plain module."""
