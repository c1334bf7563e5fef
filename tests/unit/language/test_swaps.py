"""Counterfactual sentences: lists as published, words in their case, pronouns in theirs."""

import pytest

from fairhead.errors import InputError
from fairhead.language.lexicons import Swaps, read_swaps

WINOBIAS = "he \t she \nshe \t he \nhim \t her \nhis \t her \nhimself \t herself \nmr. \t mrs. \naunt\tuncle \n"


@pytest.fixture
def swaps(tmp_path):
    (tmp_path / "generalized_swaps.txt").write_text(WINOBIAS)
    (tmp_path / "extra_gendered_words.txt").write_text("cowboy\tcowgirl\n")
    return read_swaps(tmp_path)


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("He saw his aunt.", "She saw her uncle."),
        ("The cowgirl hurt herself; SHE left", "The cowboy hurt himself; HE left"),
        ("I told her.", "I told him."),
        ("I told her that he left", "I told him that she left"),
        ("I took her hat", "I took his hat"),
        ("Her hat is mine", "His hat is mine"),
        ("the shepherd and the hero", "the shepherd and the hero"),  # parts of words are not words
    ],
)
def test_words_are_swapped_in_their_case(swaps, text, other):
    assert swaps.swapped(text) == other


@pytest.mark.parametrize("text", ["He saw his aunt with her hat.", "A cowboy lost himself", "I met her, and she him."])
def test_swapping_twice_gives_the_text_again(swaps, text):
    assert swaps.swapped(swaps.swapped(text)) == text
    assert swaps.swapped(text) != text


def test_gn_glove_is_two_files_line_by_line(tmp_path):
    (tmp_path / "gn_glove_female_words.txt").write_text("woman\nhair_salon\nher\nher\n")
    (tmp_path / "gn_glove_male_words.txt").write_text("man\nbarbershop\nhis\nhim\n")
    swaps = read_swaps(tmp_path)
    assert swaps.words == {"woman": "man", "man": "woman", "her": "his", "his": "her", "him": "her"}
    (tmp_path / "gn_glove_male_words.txt").write_text("man\n")
    with pytest.raises(InputError, match="4 female but 1 male words"):
        read_swaps(tmp_path)


def test_what_is_no_list_is_named(tmp_path):
    with pytest.raises(InputError, match="holds no word lists"):
        read_swaps(tmp_path)
    (tmp_path / "pairs.txt").write_text("man\twoman\nalone\n")
    with pytest.raises(InputError, match="line 2: 'alone' is not a pair"):
        read_swaps(tmp_path / "pairs.txt")
    (tmp_path / "none.txt").write_text("mr.\tmrs.\n")
    with pytest.raises(InputError, match="has no pair of words"):
        read_swaps(tmp_path / "none.txt")


def test_a_text_without_such_words_stays_as_it_is():
    assert Swaps({"he": "she"}).swapped("They left.") == "They left."
