"""The tap: the one place that touches attention. Reads and edits heads of any Hugging Face model."""
