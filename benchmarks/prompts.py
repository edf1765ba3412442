"""What clients ask in `routing`: dialogues as JSON bodies, and the same as the text that an engine reads.

Texts are random, drawn by the client's own seed: the same client asks the same, whatever routes it. Four
bytes are a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

BYTES_PER_TOKEN = 4
_MARK = {"system": b"<|sys |>", "user": b"<|user|>", "assistant": b"<|asst|>", "tool": b"<|tool|>"}


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. body: as the client sends it; text: prompt and answer, as the engine sees them.

    Units: tokens; think_s: how long the client waits before it asks.
    """

    body: bytes
    text: bytes
    prompt_tokens: int
    answer_tokens: int
    think_s: float


class Dialogue:
    """Grows by what is said and answered."""

    def __init__(self, user: str, system: bytes, tools: bytes = b"", adapter: str = "") -> None:
        model = f"m:{adapter}" if adapter else "m"
        described = b'"tools":[{"type":"function","function":{"name":"act","description":"%b"}}],' % tools
        self._body = [
            b'{"model":"%b","user":"%b",%b"messages":['
            % (model.encode(), user.encode(), described if tools else b"")
        ]
        self._text = [_MARK["system"], tools]
        self._add("system", system)

    def ask(self, said: bytes, answer: bytes, think_s: float, role: str = "user") -> Turn:
        """The request that says so, and is answered so."""
        self._add(role, said)
        body = b"".join(self._body)[:-1] + b'],"stream":true}'
        self._text.append(_MARK["assistant"])
        text = b"".join(self._text)
        self._text.pop()
        self._add("assistant", answer)
        return Turn(body, text + answer, _tokens(text), _tokens(answer), think_s)

    def _add(self, role: str, said: bytes) -> None:
        self._body.append(b'{"role":"%b","content":"%b"},' % (role.encode(), said))
        self._text += [_MARK[role], said]


def _tokens(text: bytes) -> int:
    return len(text) // BYTES_PER_TOKEN


def words(draw: Random, tokens: int) -> bytes:
    """Text that was never said before."""
    return draw.randbytes(tokens * BYTES_PER_TOKEN // 2).hex().encode()


def about(draw: Random, mean: float, spread: float = 0.6) -> int:
    """A length: many are short, a few are long (log-normal)."""
    return max(1, round(draw.lognormvariate(0.0, spread) * mean / 2.718281828 ** (spread * spread / 2)))


class Shared:
    """Texts that many requests begin with. The first is asked for most, the n-th 1 / n**skew as often."""

    def __init__(self, seed: str, count: int, tokens: tuple[int, int], skew: float) -> None:
        draw = Random(seed)
        self._texts = [words(draw, draw.randint(*tokens)) for _ in range(count)]
        self._weights = list(accumulate((n + 1) ** -skew for n in range(count)))

    def some(self, draw: Random) -> bytes:
        return draw.choices(self._texts, cum_weights=self._weights)[0]


Client = Callable[[str, Random], Iterator[Turn]]
"""The turns of one client, for ever: its name, and the dice that are its own."""


@dataclass(frozen=True, slots=True)
class Workload:
    """clients: for each replica. make: clients that share what they share, in a fleet of so many replicas.

    adapter_slots: adapters that a replica holds, where requests name some.
    """

    name: str
    title: str
    clients: int
    make: Callable[[int], Client]
    adapter_slots: int = 0


def _chats(replicas: int) -> Client:
    """Conversations of about six turns; a third of the people paste a page before they begin."""
    systems = Shared("chats", 8, (150, 400), 1.0)

    def client(name: str, draw: Random) -> Iterator[Turn]:
        for number in range(1 << 30):
            dialogue = Dialogue(f"{name}-{number}", systems.some(draw))
            pasted = about(draw, 1500) if draw.random() < 1 / 3 else 0
            for _ in range(min(20, 1 + int(draw.expovariate(1 / 5.5)))):
                said = words(draw, about(draw, 80) + pasted)
                yield dialogue.ask(said, words(draw, about(draw, 200)), draw.expovariate(1 / 6))
                pasted = 0

    return client


def _system_prompts(replicas: int) -> Client:
    """One question each to one of 200 applications, of which a few are asked most."""
    systems = Shared("system", 200, (1000, 3000), 1.0)

    def client(name: str, draw: Random) -> Iterator[Turn]:
        while True:
            said, answer = words(draw, about(draw, 120)), words(draw, about(draw, 120))
            yield Dialogue(name, systems.some(draw)).ask(said, answer, draw.expovariate(1 / 2))

    return client


def _agents(replicas: int) -> Client:
    """Tasks of about six steps by agents with long tool descriptions; twelve agents for each replica."""
    tools = Shared("agents", 12 * replicas, (4000, 8000), 0.6)

    def client(name: str, draw: Random) -> Iterator[Turn]:
        for number in range(1 << 30):
            dialogue = Dialogue(f"{name}-{number}", b"", tools.some(draw))
            role = "user"
            for _ in range(1 + int(draw.expovariate(1 / 5))):
                said, answer = words(draw, about(draw, 200)), words(draw, about(draw, 60))
                yield dialogue.ask(said, answer, draw.expovariate(1), role)
                role = "tool"

    return client


def paced(at_once: int, conversations: int = 40, turns: int = 3) -> Iterator[Iterator[Turn]]:
    """Clients that hold so many short conversations in all, with one system prompt of 3,300 characters."""
    system = words(Random("paced"), 825)

    def client(first: int) -> Iterator[Turn]:
        draw = Random(f"paced {first}")
        for number in range(first, conversations, at_once):
            dialogue = Dialogue(f"paced-{number}", system)
            for _ in range(turns):
                said, answer = words(draw, about(draw, 60)), words(draw, about(draw, 60))
                yield dialogue.ask(said, answer, draw.expovariate(1))

    return map(client, range(at_once))


def _independent(replicas: int) -> Client:
    """Prompts that have nothing in common."""

    def client(name: str, draw: Random) -> Iterator[Turn]:
        while True:
            said, answer = words(draw, about(draw, 800)), words(draw, about(draw, 200))
            yield Dialogue(name, words(draw, 40)).ask(said, answer, draw.expovariate(1 / 2))

    return client


def _adapters(replicas: int) -> Client:
    """One question each to one of some applications, of which a few are asked most; each has its adapter."""
    count = 50 * replicas // 8
    weights = list(accumulate(1 / (n + 1) for n in range(count)))
    systems = [words(Random(f"adapter {n}"), 300) for n in range(count)]

    def client(name: str, draw: Random) -> Iterator[Turn]:
        while True:
            [n] = draw.choices(range(count), cum_weights=weights)
            said, answer = words(draw, about(draw, 300)), words(draw, about(draw, 150))
            yield Dialogue(name, systems[n], adapter=f"a{n}").ask(said, answer, draw.expovariate(1 / 2))

    return client


WORKLOADS: Sequence[Workload] = (
    Workload("chats", "multi-turn chats", 64, _chats),
    Workload("system", "shared system prompts", 48, _system_prompts),
    Workload("agents", "agents, long prefixes", 24, _agents),
    Workload("independent", "nothing shared", 40, _independent),
    Workload("adapters", "adapters, 50 for 8 replicas of 8 slots", 40, _adapters, adapter_slots=8),
)
