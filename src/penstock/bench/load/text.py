"""Text of a wanted number of tokens, without the model's tokenizer.

Short common words are one token in nearly every vocabulary. `probe` learns from the service which of them
have the same number of tokens, which number that is, and how many tokens the chat template adds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Self

_COMMON = """
the and for are but not you all any can had her was one our out day get has him his how man new now old
see two way who boy did its let put say she too use dad mom act add age ago air arm art ask bad bag bar
bed big bit box bus buy car cat cup cut dog dry due eat egg end eye far few fit fly fun gas got guy hit
hot ice job key kid law lay led leg lie lot low map may met mix net nor odd off oil own pay per pop raw
red rid row run sad sat sea set sir sit six sky son sun tax tea ten tie tip top try wet win won yes yet
"""
WORDS = tuple(_COMMON.split())
TWICE = "".join(f" {word} {word}" for word in WORDS)
_FEWEST_WORDS = 8
_WIDTH = 4  # of every word, with the space before it
_TAPE_WORDS = 1 << 17
_NEW_WORDS = 12


@dataclass(frozen=True, slots=True)
class TokenScale:
    """How long text is, in tokens. overhead: what the chat template adds to the first message.

    exact: whether the service told it; else a word is taken for a token.
    """

    tokens_per_word: float = 1.0
    overhead: float = 0.0
    exact: bool = False

    @classmethod
    def of(cls, short: tuple[int, int], long: tuple[int, int]) -> Self:
        """From two texts: (words, tokens by the service's count)."""
        (words, tokens), (more_words, more_tokens) = short, long
        slope = (more_tokens - tokens) / (more_words - words)
        return cls(slope, tokens - slope * words, True) if slope > 0 else cls()

    def words(self, tokens: float) -> int:
        """As many words as `tokens` tokens have; at least 1."""
        return max(1, round(tokens / self.tokens_per_word))


def even_words(tokens: Sequence[int]) -> tuple[str, ...]:
    """Words with the same number of tokens, the smallest that enough words have.

    None where the tokens do not show where a word ends.
    tokens: of `TWICE`, with at most one more before them.
    """
    return _even_words(tokens) or _even_words(tokens[1:])


def _even_words(tokens: Sequence[int]) -> tuple[str, ...]:
    by_size: dict[int, list[str]] = {}
    for word in WORDS:
        sizes = range(1, min(_WIDTH, len(tokens) // 2) + 1)
        size = next((n for n in sizes if tokens[:n] == tokens[n : 2 * n]), None)
        if size is None:
            return ()
        by_size.setdefault(size, []).append(word)
        tokens = tokens[2 * size :]
    enough = (tuple(words) for _, words in sorted(by_size.items()) if len(words) >= _FEWEST_WORDS)
    return () if tokens else next(enough, ())


class TextSource:
    """Much text, of which pieces are cut. Texts that begin anew share no prefix, so no cache helps them."""

    def __init__(self, salt: str, words: Sequence[str] = WORDS) -> None:
        self._text = "".join(f" {word}" for word in Random(f"tape {salt}").choices(words, k=_TAPE_WORDS))
        self._salt, self._words = salt, words

    def cut(self, words: int, name: str) -> str:
        """`words` words; the same for the same name, and another beginning for every other name."""
        random = Random(f"{name} {self._salt}")
        new = "".join(f" {word}" for word in random.choices(self._words, k=min(words, _NEW_WORDS)))
        rest = words - _NEW_WORDS
        if rest <= 0:
            return new
        start = random.randrange(_TAPE_WORDS) * _WIDTH
        text = self._text
        while len(text) < start + rest * _WIDTH:
            text += text
        return new + text[start : start + rest * _WIDTH]
