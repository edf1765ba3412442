"""Text of a wanted number of tokens, without the model's tokenizer.

Short common words are one token in nearly every vocabulary. How many tokens a word really is, and how many
the chat template adds, `probe` learns from the service's own count.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

_COMMON = """
the and for are but not you all any can had her was one our out day get has him his how man new now old
see two way who boy did its let put say she too use dad mom act add age ago air arm art ask bad bag bar
bed big bit box bus buy car cat cup cut dog dry due eat egg end eye far few fit fly fun gas got guy hit
hot ice job key kid law lay led leg lie lot low map may met mix net nor odd off oil own pay per pop raw
red rid row run sad sat sea set sir sit six sky son sun tax tea ten tie tip top try wet win won yes yet
"""
WORDS = _COMMON.split()
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
    def of(cls, short: tuple[int, int], long: tuple[int, int]) -> TokenScale:
        """From two texts: (words, tokens by the service's count)."""
        (words, tokens), (more_words, more_tokens) = short, long
        slope = (more_tokens - tokens) / (more_words - words)
        return cls(slope, tokens - slope * words, True) if slope > 0 else cls()

    def words(self, tokens: float) -> int:
        """As many words as `tokens` tokens have; at least 1."""
        return max(1, round(tokens / self.tokens_per_word))


class TextSource:
    """Much text, of which pieces are cut. Texts that begin anew share no prefix, so no cache helps them."""

    def __init__(self, salt: str) -> None:
        self._text = "".join(f" {word}" for word in Random(f"tape {salt}").choices(WORDS, k=_TAPE_WORDS))
        self._salt = salt

    def cut(self, words: int, name: str) -> str:
        """`words` words; the same for the same name, and another beginning for every other name."""
        random = Random(f"{name} {self._salt}")
        new = "".join(f" {word}" for word in random.choices(WORDS, k=min(words, _NEW_WORDS)))
        rest = words - _NEW_WORDS
        if rest <= 0:
            return new
        start = random.randrange(_TAPE_WORDS) * _WIDTH
        text = self._text
        while len(text) < start + rest * _WIDTH:
            text += text
        return new + text[start : start + rest * _WIDTH]
