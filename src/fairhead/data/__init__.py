"""Readers of published data sets, in the formats their authors publish."""
