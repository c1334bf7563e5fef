"""Methods that reduce a gap, one file each. None of them ever sees a group."""
