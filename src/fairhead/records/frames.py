"""Columns of data frames, whatever library made them: pandas, polars, Arrow, `datasets`, or arrays by name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fairhead.errors import InputError
from fairhead.records.layout import number_repeated


class Frame(NamedTuple):
    """A table by its columns."""

    name: str  # what messages call it
    columns: Sequence[str]
    column: Callable[[str], Any]  # from a name to its values, as `Encoder.add` and `as_floats` take them

    @classmethod
    def of(cls, data: Any) -> "Frame":
        """Read a frame without importing the library that made it.

        Example:
            >>> frame = Frame.of({"y": [1, 0], "race": ["a", None]})
            >>> frame.columns, list(frame.column("race"))
            (['y', 'race'], ['a', None])
        """
        kind = f"{type(data).__module__.partition('.')[0]}.{type(data).__name__}"
        if kind == "pandas.DataFrame":
            names = number_repeated([str(name) for name in data.columns])
            return cls("the data frame", names, lambda name: data.iloc[:, names.index(name)])
        if kind == "polars.LazyFrame":
            return cls.of(data.collect())
        if kind == "polars.DataFrame":
            return cls("the polars frame", list(data.columns), lambda name: _polars(data.get_column(name)))
        if kind in ("pyarrow.Table", "pyarrow.RecordBatch"):
            names = number_repeated(data.schema.names)
            exact = {"integer_object_nulls": True}
            return cls("the Arrow table", names, lambda name: data.column(names.index(name)).to_pandas(**exact))
        if kind == "datasets.Dataset":
            return cls("the data set", list(data.column_names), lambda name: _of_dataset(data, name))
        if isinstance(data, Mapping) and not hasattr(data, "column_names"):
            by_name = {str(name): name for name in data}
            return cls("the columns", list(by_name), lambda name: data[by_name[name]])
        raise InputError(
            f"{type(data).__name__} is no table that can be read; a path, a data frame of pandas or polars, an Arrow "
            "table, a datasets.Dataset or arrays by column name are expected"
        )


def _polars(series: Any) -> Any:
    """A column of polars; what may hold nulls stays a list, in which whole numbers stay whole."""
    return series.to_numpy() if series.dtype.is_numeric() and not series.null_count() else series.to_list()


def _of_dataset(data: Any, name: str) -> Any:
    """A column of `datasets`, decoded when asked for; numbers that it has names for are the names."""
    values, names = data[name], getattr((data.features or {}).get(name), "names", None)
    return values if names is None else [names[v] if v is not None and v >= 0 else None for v in values]
