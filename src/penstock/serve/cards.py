"""What the gateway knows of each model, and how `/v1/models` shows it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from penstock.config import LLMConfig
from penstock.config.options import DEFAULTS
from penstock.config.routing import DEFAULT_POLICY, SESSION_HEADER
from penstock.errors import BadRequest, ConfigError, ModelNotFound

_NAMED = 20  # models named in an error


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One model. Units: created in seconds since 1970; limits in requests, -1 for a queue without limit.

    max_model_len: what is known before a replica told its own. engine_metrics: whether /metrics shows theirs.
    scales: whether the model may have more than one replica.
    """

    id: str
    created: int
    owned_by: str = "penstock"
    max_ongoing_requests: int = DEFAULTS["max_ongoing_requests"]
    max_queued_requests: int = -1
    max_model_len: int | None = None
    engine_metrics: bool = True
    routing_policy: str = DEFAULT_POLICY
    session_header: str = SESSION_HEADER
    scales: bool = True

    @classmethod
    def of(cls, config: LLMConfig, max_model_len: int | None = None) -> ModelCard:
        """The card of a configured model, made now."""
        given = {name: value for name, value in config.deployment_config.items() if value is not None}
        options = {**DEFAULTS, **given}
        return cls(
            id=config.model_id,
            created=int(time.time()),
            max_ongoing_requests=options["max_ongoing_requests"],
            max_queued_requests=options.get("max_queued_requests", -1),
            max_model_len=max_model_len,
            engine_metrics=config.log_engine_metrics,
            routing_policy=config.routing_policy,
            session_header=config.routing_config.session_header.lower(),
            scales=options.get("num_replicas", 1) != 1 or "autoscaling_config" in options,
        )


class _Shown(msgspec.Struct, frozen=True, kw_only=True):
    """A model as OpenAI clients read it, with the context window that vLLM adds."""

    id: str
    object: str = "model"
    created: int
    owned_by: str
    max_model_len: int | None


class _List(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[_Shown]


class Catalogue:
    """The models behind one gateway. Finds the one that a request means."""

    def __init__(self, cards: Sequence[ModelCard], default_model: str | None) -> None:
        """Raises: ConfigError when `default_model` is none of them, or an id comes twice."""
        self.cards = {card.id: card for card in cards}
        if len(self.cards) < len(cards):
            raise ConfigError(f"Two models have the same id; the ids are {', '.join(c.id for c in cards)}.")
        if default_model is not None and default_model not in self.cards:
            raise ConfigError(f"The default model '{default_model}' is none of {self._known()}.")
        only = cards[0].id if len(cards) == 1 else None
        self._default = default_model or only

    def resolve(self, name: str | None) -> ModelCard:
        """The model that `name` means: its id, or `id:adapter`, longest id first; without one, the default.

        Raises: ModelNotFound, or BadRequest when no name is given and no model is the default.
        """
        if not name:
            if self._default is None:
                raise BadRequest(f"The request names no model; name one of {self._known()}.", param="model")
            return self.cards[self._default]
        base = name
        while base not in self.cards:
            base, colon, _ = base.rpartition(":")
            if not colon:
                raise self._not_found(name)
        return self.cards[base]

    def show(self, model_id: str, max_model_len: int | None) -> bytes:
        """JSON of one model. Raises: ModelNotFound."""
        if model_id not in self.cards:
            raise self._not_found(model_id)
        return msgspec.json.encode(_shown(self.cards[model_id], max_model_len))

    def show_all(self, max_model_lens: dict[str, int | None]) -> bytes:
        """JSON of all models, in the order of the configuration."""
        shown = [_shown(card, max_model_lens.get(card.id)) for card in self.cards.values()]
        return msgspec.json.encode(_List(data=shown))

    def _not_found(self, name: str) -> ModelNotFound:
        return ModelNotFound(
            f"The model '{name[:200]}' is not served here. Served are {self._known()}.", param="model"
        )

    def _known(self) -> str:
        names = [f"'{model_id}'" for model_id in self.cards]
        rest = f" and {len(names) - _NAMED} more (GET /v1/models)" if len(names) > _NAMED else ""
        return (", ".join(names[:_NAMED]) or "none") + rest


def _shown(card: ModelCard, max_model_len: int | None) -> _Shown:
    return _Shown(
        id=card.id,
        created=card.created,
        owned_by=card.owned_by,
        max_model_len=max_model_len or card.max_model_len,
    )
