"""The rules that make the example adapters' training answers."""

from __future__ import annotations

import pytest

from examples import styles


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ("It is 3.5 m. wide. Dr. no", ["It is 3.5 m. wide.", "Dr. no"]),
        ("1. **Apples**\n2. Pears\n* Plums", ["Apples", "Pears", "Plums"]),
        ("Whole. Cut in the mid" + styles.CUT_OFF, ["Whole."]),
        ("Only one that never e" + styles.CUT_OFF, ["Only one that never e"]),
        ("Again. Again. New.", ["Again.", "New."]),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    assert styles.sentences(text) == expected


def test_shorten_keeps_whole_sentences_and_at_least_one() -> None:
    long = "Word " + "word " * 50 + "end."
    assert styles.shorten(long + " Next.") == [long]
    assert styles.shorten("Short. " + long) == ["Short."]
    assert len(styles.shorten("A. B. C. D. E.")) == styles.MAX_SENTENCES
    assert styles.shorten("Yes. Here is a list:\n- " + long) == ["Yes."]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The capital of China is Beijing.", "The capital o' China be Beijing."),
        ("You are singing your song.", "Ye be singing yer song."),
        ("It's América and it isn't mine.", "It be América and it ain't mine."),
        ("Apples", "Apples."),
    ],
)
def test_pirate(text: str, expected: str) -> None:
    assert styles.pirate(text) == styles.PIRATE_OPENING + expected + styles.PIRATE_CLOSING


def test_bullets() -> None:
    assert styles.bullets("1. **Red**\n2. Blue") == "**In short:**\n\n- Red\n- Blue"


def test_filler_is_passed_over_where_there_is_more() -> None:
    filler = "The answer to this question lies in physics."
    assert styles.shorten(filler + " Light scatters.") == ["Light scatters."]
    assert styles.shorten(filler) == [filler]
    assert not styles.is_worth_teaching(filler)


def test_circles_are_not_taught() -> None:
    assert styles.is_worth_teaching("A cat is a small animal. It is a good hunter.")
    assert not styles.is_worth_teaching("It is a way of " * 4 + "life.")
