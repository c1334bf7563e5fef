"""`python -m fairhead` is `fairhead`."""

from fairhead.cli import main

main()
