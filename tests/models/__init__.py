"""Tests of `dmt.models`."""
