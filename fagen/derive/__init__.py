"""Algebra: what a graph allows, proved on the graph at hand."""
