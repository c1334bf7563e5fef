"""What work on many arrays of some hundred kilobytes wants of the memory allocator."""

import numpy as np


def keep_freed_memory() -> None:
    """Have glibc keep memory that is freed, for what is needed next.

    It gives arrays of more than 128 KiB back to the system, and getting fresh pages for the next ones takes a fifth of
    an audit and half of reading a CSV. That size grows, up to 32 MiB, with the largest array that was freed: so one is
    made and freed here. It is never touched and takes no memory.

    Example:
        >>> keep_freed_memory()
    """
    np.empty(31 << 20, dtype=np.uint8)
