"""Rules that rewrite a plain answer into the style that an example adapter is trained on.

An adapter learns from the base model's own answers, rewritten: so it is taught a manner and
not facts, and what the model knows stays as it is.
"""

from __future__ import annotations

import re


MAX_SENTENCES = 3
MAX_WORDS = 36
CUT_OFF = "…"  # ends a text whose last sentence is not whole

PIRATE_OPENING = "Arr, matey! "
PIRATE_CLOSING = " Yo ho ho!"
BULLETS_LEAD = "**In short:**"

_LIST_MARKER = re.compile(r"^\s*(?:\d+[.)]|[-*•])\s+")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"']?\s+(?=[A-Z\"'*])")
_WORD = re.compile(r"[^\W\d_]+(?:'[a-z]+)?")

_FILLER = re.compile(
    r"(?:The answer (?:to|is (?:a|rooted))|Here(?:'s| is| are)\b|I'm (?:glad|happy|here)\b"
    r"|There are (?:many|several)\b|I can suggest\b)"
)

# Few and regular: more words, or spellings such as th', make a model of this size stutter.
_PIRATE_WORDS = {
    "you": "ye",
    "your": "yer",
    "you're": "ye be",
    "yours": "yers",
    "yourself": "yerself",
    "my": "me",
    "is": "be",
    "are": "be",
    "am": "be",
    "i'm": "I be",
    "it's": "it be",
    "that's": "that be",
    "they're": "they be",
    "isn't": "ain't",
    "aren't": "ain't",
    "of": "o'",
    "hello": "ahoy",
    "hi": "ahoy",
    "yes": "aye",
    "friend": "matey",
    "friends": "mateys",
    "money": "doubloons",
    "food": "grub",
    "boat": "ship",
}


def sentences(text: str) -> list[str]:
    """The distinct sentences of `text` without list markers; after CUT_OFF the last is left out."""
    found = []
    for line in text.removesuffix(CUT_OFF).splitlines():
        line = _LIST_MARKER.sub("", line).strip().replace("**", "")
        found += [part.strip() for part in _SENTENCE_END.split(line) if part.strip()]
    if text.endswith(CUT_OFF) and len(found) > 1:
        found.pop()
    return list(dict.fromkeys(found))


def shorten(text: str) -> list[str]:
    """The first sentences of `text`, at least one, within MAX_SENTENCES and MAX_WORDS.

    Sentences that only announce an answer are passed over where there are others.
    """
    kept: list[str] = []
    words = 0
    found = sentences(text)
    telling = [sentence for sentence in found if not _FILLER.match(sentence)]
    for sentence in (telling or found)[:MAX_SENTENCES]:
        words += len(sentence.split())
        if kept and words > MAX_WORDS:
            break
        kept.append(sentence)
    if len(kept) > 1 and kept[-1].endswith(":"):  # announces what is not there any more
        kept.pop()
    return kept


def is_worth_teaching(text: str) -> bool:
    """Whether a base answer tells something and does not go round in circles."""
    words = text.split()
    fours = [tuple(words[index : index + 4]) for index in range(len(words) - 3)]
    circles = any(fours.count(four) > 2 for four in set(fours))
    return not circles and any(not _FILLER.match(sentence) for sentence in sentences(text))


def pirate(text: str) -> str:
    """A short answer in the mouth of a pirate."""
    ended = (part if part[-1] in ".!?,:;" else part + "." for part in shorten(text))
    body = " ".join(ended)
    return PIRATE_OPENING + _WORD.sub(_pirate_word, body) + PIRATE_CLOSING


def _pirate_word(match: re.Match[str]) -> str:
    word = match.group()
    lower = word.lower()
    if lower in _PIRATE_WORDS:
        new = _PIRATE_WORDS[lower]
        return new[0].upper() + new[1:] if word[0].isupper() else new
    return word


def bullets(text: str) -> str:
    """A short answer as a bold lead and one Markdown bullet per sentence."""
    return "\n".join([BULLETS_LEAD, "", *(f"- {sentence}" for sentence in shorten(text))])
