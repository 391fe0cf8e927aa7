"""Stop strings are found wherever the text was cut, and hold back no more than they must."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve_router.stop_strings import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    """What is shown per piece, then at the end; and whether a stop was found."""
    matcher = StopMatcher(stops)
    shown = [matcher.add(piece) for piece in pieces]
    return [*shown, matcher.flush()], matcher.matched


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "matched"),
    [
        (["DEFGHIJ"], ["abcDEF", "G", "HI", "Jxyz"], ["abc", "", "", "", ""], True),
        (["DEFGHIJ"], ["abcDEF", "X"], ["abc", "DEFX", ""], False),
        (["DEFGHIJ"], ["abcDEF"], ["abc", "DEF"], False),
        (["ab", "abc"], ["xa", "bc"], ["x", "", ""], True),
        (["abc", "ab"], ["xabc"], ["x", ""], True),
        (["END"], ["one END two"], ["one ", ""], True),
        (["aab"], ["aaab"], ["a", ""], True),
        (["é"], ["ol", "é!"], ["ol", "", ""], True),
        ([], ["a", "b"], ["a", "b", ""], False),
        (["\n"], ["\n"], ["", ""], True),
    ],
)
def test_text_before_a_stop_is_shown_and_nothing_of_it(
    stops: list[str], pieces: list[str], shown: list[str], matched: bool
) -> None:
    assert run(stops, pieces) == (shown, matched)


TEXT = st.text("abc", max_size=20)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


@given(stops=STOPS, text=TEXT, cuts=st.lists(st.integers(0, 20), max_size=6))
def test_how_the_text_was_cut_does_not_matter(stops: list[str], text: str, cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(bounds)]
    in_pieces, matched = run(stops, pieces)
    one_by_one, also_matched = run(stops, list(text))
    assert ("".join(in_pieces), matched) == ("".join(one_by_one), also_matched)


@given(stops=STOPS, text=TEXT)
def test_the_match_that_is_complete_first_wins(stops: list[str], text: str) -> None:
    """Against the definition, character by character."""
    expected, found = text, False
    for end in range(len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            expected, found = text[: min(begins)], True
            break
    shown, matched = run(stops, [text])
    assert ("".join(shown), matched) == (expected, found)


@given(stops=STOPS, text=TEXT)
def test_what_is_held_back_could_begin_a_stop(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    shown = matcher.add(text)
    held = text[len(shown) :]
    if not matcher.matched:
        assert not held or any(stop.startswith(held) for stop in stops)
