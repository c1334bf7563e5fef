"""One self-contained HTML page and its JSON twin. Imports no torch."""
