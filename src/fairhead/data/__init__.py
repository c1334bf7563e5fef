"""Data: readers of published data sets, in the formats their authors publish.

`read("utkface", path)` returns a `Dataset` (labelled images and texts) or `Items` (the pairs, triplets, questions of a
language benchmark). `readers.py` lists the readers; their options are explained where they are: of labelled data here,
of a benchmark in its file in `language/benchmarks/`.
"""

from fairhead.data.datasets import Attributes, Dataset, Examples, Items, TextPair
from fairhead.data.images import Images
from fairhead.data.own import dataset
from fairhead.data.readers import (
    READERS,
    Reader,
    check_spec,
    hold,
    parse_spec,
    read,
    read_items,
    read_labelled,
    reader_named,
)

__all__ = [
    "READERS",
    "Attributes",
    "Dataset",
    "Examples",
    "Images",
    "Items",
    "Reader",
    "TextPair",
    "check_spec",
    "dataset",
    "hold",
    "parse_spec",
    "read",
    "read_items",
    "read_labelled",
    "reader_named",
]
