import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.stop_strings import StopStringFilter


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Look at ever longer beginnings of the text until one ends with a stop string."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]


# Two letters: stop strings that overlap themselves and each other come up all the time.
letters = st.text(alphabet="ab", max_size=24)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


@settings(derandomize=True, deadline=None)
@given(letters, stop_lists, st.lists(st.integers(0, 100), max_size=6))
def test_any_split_gives_the_text_and_match_of_a_whole_text_search(text, stops, cuts):
    wanted_text, wanted_match = naive(text, stops)
    stop_filter = StopStringFilter(stops)
    shown, matched = "", None
    for piece in cut(text, cuts):
        safe, matched = stop_filter.push(piece)
        shown += safe
        assert wanted_text.startswith(shown)  # nothing shown is ever taken back
        if matched is not None:
            break
    assert (shown + stop_filter.flush(), matched) == (wanted_text, wanted_match)


@settings(derandomize=True, deadline=None)
@given(letters, stop_lists, st.lists(st.integers(0, 100), max_size=6))
def test_included_the_match_ends_the_text_however_it_is_split(text, stops, cuts):
    wanted_text, wanted_match = naive(text, stops)
    stop_filter = StopStringFilter(stops, include=True)
    shown, matched = "", None
    for piece in cut(text, cuts):
        safe, matched = stop_filter.push(piece)
        shown += safe
        if matched is not None:
            break
    assert (shown + stop_filter.flush(), matched) == (
        wanted_text + (wanted_match or ""),
        wanted_match,
    )


@settings(derandomize=True, deadline=None)
@given(letters, stop_lists)
def test_only_a_possible_start_of_a_stop_string_is_held_back(text, stops):
    stop_filter = StopStringFilter(stops)
    safe, matched = stop_filter.push(text)
    if matched is None:
        held = text[len(safe) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_of_two_stops_complete_at_once_the_longer_is_cut():
    assert StopStringFilter(["b", "ab"]).push("xab") == ("x", "ab")


def test_the_stop_complete_first_wins_over_one_that_began_earlier():
    assert StopStringFilter(["abcd", "bc"]).push("abcd") == ("a", "bc")


def test_nothing_is_shown_after_a_match():
    stop_filter = StopStringFilter(["."])
    assert stop_filter.push("one. two") == ("one", ".")
    assert stop_filter.push("three") == ("", ".")
    assert stop_filter.flush() == ""


def test_without_stop_strings_everything_passes():
    stop_filter = StopStringFilter([])
    assert stop_filter.push("text") == ("text", None)
    assert stop_filter.flush() == ""


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        StopStringFilter(["a", ""])


def test_a_hostile_stop_string_costs_no_more_than_its_length():
    start = time.perf_counter()
    stop_filter = StopStringFilter(["a" * 50_000 + "b"])
    shown = "".join(stop_filter.push("a")[0] for _ in range(2_000))
    assert shown == "" and stop_filter.flush() == "a" * 2_000
    assert time.perf_counter() - start < 5
