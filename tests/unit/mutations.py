"""Files as chance damages them, for readers that must give what the file says or refuse it."""

import os
import random
import signal
import time
import zlib
from contextlib import contextmanager
from pathlib import Path

from fairhead.errors import FairheadError

SECONDS = float(os.environ.get("FAIRHEAD_FUZZ_SECONDS", 600))  # of all eleven formats together, in the slow tier
CORPUS = Path(__file__).parent / "corpus"  # a folder a format: files to start from, and those that once broke a reader
WORDS = [b"\0", b"\xff", b'"', b"\n", b"\r", b",", b"{", b"}", b"[" * 300, b"\xef\xbb\xbf", b"\xed\xa0\x80", b"1e999"]
WORDS += [b"-1", b"9" * 400, b"NaN", b"null", b"\x1b[31m", b"\\ud800", b"../", b"PK\x05\x06", b"\xff" * 8, b"true"]


def mutated(content, chance, other=b""):
    """The bytes with one to four changes."""
    found = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        at, to = sorted((chance.randint(0, len(found)), chance.randint(0, len(found))))
        kind = chance.randrange(7)
        if kind == 0:
            found[at:at] = chance.choice(WORDS)
        elif kind == 1:
            del found[at : min(to, at + chance.choice((1, 4, 64)))]
        elif kind == 2 and at < len(found):
            found[at] ^= 1 << chance.randrange(8)
        elif kind == 3:
            found[at:at] = found[at : min(to, at + 200)]
        elif kind == 4:
            del found[to:]
        elif kind == 5 and at < len(found):
            found[at] = chance.randrange(256)
        elif other:
            start = chance.randint(0, len(other))
            found[at:to] = other[start : start + 100]
    return bytes(found)


@contextmanager
def at_most(seconds):
    def stop(number, frame):
        raise TimeoutError(f"a file of a few bytes has been read for {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def reads_or_refuses(read, path):
    """Whether a file is read; anything but a refusal of ours is raised."""
    try:
        with at_most(30):
            read(path)
    except FairheadError as error:
        told = str(error)
    else:
        return True
    assert 0 < len(told) < 3000
    return False


def fuzz(read, files, path, seconds, seed, keep):
    """Read damaged files for so long; one that breaks the reader is kept in the corpus. Returns read and refused.

    Args:
        read: called with a path.
        files: sound ones, and those that once broke a reader.
        path: where a damaged one is written.
        seconds: how long.
        seed: of the damages.
        keep: the folder of the corpus.
    """
    chance, ended, counts = random.Random(seed), time.monotonic() + seconds, [0, 0]
    contents = [file.read_bytes() for file in files]
    while time.monotonic() < ended:
        content = mutated(chance.choice(contents), chance, chance.choice(contents))
        path.write_bytes(content)
        try:
            counts[not reads_or_refuses(read, path)] += 1
        except BaseException:
            keep.mkdir(exist_ok=True)
            (keep / f"broke-{zlib.crc32(content):x}{path.suffix}").write_bytes(content)
            raise
    return counts
