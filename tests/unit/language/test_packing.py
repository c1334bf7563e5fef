"""Rows of shared prefixes: every sequence can be read back, and sees its own tokens alone."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairhead.errors import InputError
from fairhead.language.answers import Journal, Request, Score
from fairhead.language.packing import StartToken, TokenSequence, batches, encode, pack

sequences = st.lists(
    st.lists(st.integers(0, 2), min_size=2, max_size=8).flatmap(
        lambda tokens: st.integers(1, len(tokens) - 1).map(lambda start: TokenSequence(tokens, start))
    ),
    max_size=20,
)


@given(sequences, st.integers(1, 30), st.booleans())
def test_each_token_sees_exactly_what_leads_to_it(items, row_tokens, share):
    rows = pack(items, row_tokens, share)
    seen = []
    for row in rows:
        here = np.arange(len(row.tokens))
        visible = (here[None, :] <= here[:, None]) & (here[:, None] < row.end[None, :])
        for path in row.paths:
            tokens, start = items[path.sequence]
            last = np.flatnonzero(visible[path.positions[-1]])
            assert row.tokens[last].tolist() == list(tokens)
            assert row.depth[last].tolist() == list(range(len(tokens)))
            assert row.parent[last].tolist() == [-1, *last[:-1].tolist()]
            assert path.positions.tolist() == last[start:].tolist()
            seen.append(path.sequence)
        at, scored, source, paths = row.predicting
        assert at[source].tolist() == row.parent[scored].tolist()
        assert [scored[k].tolist() for k in paths] == [path.positions.tolist() for path in row.paths]
    assert sorted(seen) == list(range(len(items)))


@given(sequences)
def test_a_wide_row_holds_each_beginning_once(items):
    rows = pack(items, 10_000)
    beginnings = {tuple(s.tokens[:k]) for s in items for k in range(1, len(s.tokens) + 1)}
    assert sum(len(row.tokens) for row in rows) == len(beginnings)


@given(sequences, st.integers(2, 20))
def test_rows_stay_within_a_window(items, window):
    for row in pack([s for s in items if len(s.tokens) <= window], 1000, longest=window):
        assert len(row.tokens) <= window


@given(sequences, st.integers(1, 40), st.integers(1, 10))
def test_batches_hold_every_row_once_within_bounds(items, batch_tokens, max_scored):
    rows = pack(items, 12)
    found = batches(rows, batch_tokens, max_scored)
    assert sorted(i for batch in found for i in batch) == list(range(len(rows)))
    for batch in found:
        if len(batch) > 1:
            assert len(batch) * max(rows[i].followed.sum() for i in batch) <= batch_tokens
            assert sum(len(rows[i].predicting.at) for i in batch) <= max_scored


@given(sequences, st.integers(1, 30))
def test_what_is_not_followed_is_the_end_of_a_sequence(items, row_tokens):
    for row in pack(items, row_tokens):
        ends = {int(path.positions[-1]) for path in row.paths}
        assert set(np.flatnonzero(~row.followed).tolist()) <= ends
        assert set(row.predicting.at.tolist()) <= set(np.flatnonzero(row.followed).tolist())


def test_a_row_grows_before_it_parts_sequences_that_share_much():
    def three(shared):
        common = range(1, 1 + shared)
        return [TokenSequence([0, *common, *range(100 * i, 100 * i + 23 - shared)], 1) for i in (1, 2, 3)]

    # Of 24 tokens each, so that a row ends at 48, or at 72 where it would part them.
    assert [len(row.tokens) for row in pack(three(5), row_tokens=24)] == [60]
    assert [len(row.tokens) for row in pack(three(0), row_tokens=24)] == [47, 24]


def test_a_long_shared_beginning_is_not_repeated_for_each_end():
    items = [TokenSequence([*range(1000), 2000 + i], 1000) for i in range(500)]
    rows = pack(items, 256)
    assert len(rows) == 1
    assert len(rows[0].tokens) == 1500


class Letters:
    """A tokeniser of single letters that joins "th", so that a prefix may end inside a token."""

    def __call__(self, texts, **options):
        return {"input_ids": [[ord(c) for c in text.replace("th", "þ")] for text in texts]}


@pytest.mark.parametrize(
    ("prefix", "continuation", "scored", "merged"),
    [
        ("ab", " cd", " cd", False),
        ("ab ", "cd", " cd", False),  # the space goes with the continuation
        ("", "cd", "cd", False),
        ("at", "he", "e", True),  # a, þ, e: the split after two tokens falls behind the joined one
        ("at", "h", "þ", True),  # nothing would be left: the joined token is scored
        ("  ", "cd", "  cd", False),
    ],
)
def test_text_is_encoded_whole_and_split_where_the_prefix_ends(prefix, continuation, scored, merged):
    start = StartToken(0, "<s>", "bos")
    (found,) = encode([Request("a", prefix, continuation)], Letters(), start, "fairhead")
    tokens, scored_from = found.sequence
    assert tokens[0] == 0
    assert "".join(map(chr, tokens[scored_from:])) == scored
    assert found.merged == merged
    (bare,) = encode([Request("a", prefix, continuation)], Letters(), start, "lm-eval")
    assert (bare.sequence.tokens[0] == 0) == (not prefix.strip())


def test_a_journal_keeps_whole_lines_and_refuses_foreign_ones(tmp_path):
    file, request = tmp_path / "deep" / "scores.jsonl", Request("a", "x", " y")
    with Journal(file, {"weights": "w"}) as journal:
        journal.add([request], [Score("a", -1.25, 2, True, (-1.0, -0.25))])
    for cut in range(1, 30):  # killed while writing another line
        with open(file, "ab") as raw:
            raw.write(b'{"id": "b", "text": "00", "logprob": -1.0'[:cut])
        with Journal(file, {"weights": "w"}) as journal:
            assert journal.find(request, per_token=True) == Score("a", -1.25, 2, True, (-1.0, -0.25))
            assert journal.find(Request("a", "x", " z")) is None
        assert [json.loads(line)["id"] for line in file.read_text().splitlines()[1:]] == ["a"]
    with pytest.raises(InputError, match="made with weights 'w', not 'v'"), Journal(file, {"weights": "v"}):
        pass
    file.write_text(file.read_text() + "nonsense\n")
    with pytest.raises(InputError, match="line 3: is not a line of scores"), Journal(file, {"weights": "w"}):
        pass
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(InputError, match="is not a file of scores"), Journal(tmp_path / "other.jsonl", {}):
        pass
    with pytest.raises(InputError, match="cannot be written"), Journal(tmp_path, {}):
        pass


def test_a_journal_without_per_token_values_does_not_answer_for_them(tmp_path):
    request = Request("a", "", "x")
    with Journal(tmp_path / "s.jsonl", {}) as journal:
        journal.add([request], [Score("a", -1.0, 1)])
        assert journal.find(request) is not None
        assert journal.find(request, per_token=True) is None
