"""Measurements: fagen beside its peers, time and memory against length, plans against one another."""
