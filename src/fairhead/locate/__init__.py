"""Which heads carry a named gap, against controls."""
