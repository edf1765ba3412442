"""What requests cost, in whole numbers, so that sums are exact. A unit is that of the prices in the config,
whatever the currency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.config.schema.tenants import PriceConfig

NANO = 10**9
_PICO = 10**12
_PER = 10**6  # tokens


class Price(NamedTuple):
    """Of one model. Units: 1e-12 a token, a second of audio, or a picture."""

    input: int
    cached: int
    output: int
    second: int
    image: int

    def cost(self, prompt: int, cached: int, output: int, seconds: int = 0, images: int = 0) -> int:
        """In nano-units, rounded. cached: of the prompt's."""
        one, hit, out, second, image = self
        if cached > prompt:
            cached = prompt
        tokens = (prompt - cached) * one + cached * hit + output * out
        return (tokens + seconds * second + images * image + 500) // 1000


class PriceList:
    """Of all models of a gateway that have one."""

    def __init__(self, given: Mapping[str, PriceConfig]) -> None:
        """given: by model, or by `model:adapter`."""
        self._prices = {name: _price(one) for name, one in given.items()}

    def find(self, model: str, adapter: str) -> Price | None:
        """Of an adapter without a price, its model's; of a version, `MODEL@NAME`, that of what it is of."""
        found, names = self._prices, (model, model.partition("@")[0])
        if not found:
            return None
        keys = [f"{name}:{adapter}" for name in names] if adapter else []
        return next((found[one] for one in (*keys, *names) if one in found), None)

    def dearest(self, models: Sequence[str], prompt: int, cached: int, output: int) -> int:
        """The cost of these tokens by the model of these for which it is highest."""
        prices = (self.find(one, "") for one in models)
        return max((one.cost(prompt, cached, output) for one in prices if one is not None), default=0)


def nano(amount: float) -> int:
    """Nano-units of an amount as users write it."""
    return round(amount * NANO)


def shown(cost: int) -> str:
    """An amount for people."""
    return f"{cost / NANO:.6f}".rstrip("0").rstrip(".")


def _price(given: PriceConfig) -> Price:
    cached = given.input if given.cached_input is None else given.cached_input
    one, hit, out = (round(each * _PICO / _PER) for each in (given.input, cached, given.output))
    return Price(one, hit, out, round(given.audio_second * _PICO), round(given.image * _PICO))
