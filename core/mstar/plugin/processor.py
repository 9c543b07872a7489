"""The CPU side of a model: a request's inputs to walk inputs, emissions to chunks. Runs off the event loop.

One instance per server; `decode` and `step` may run concurrently for different requests, never for the same one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mstar.types import Chunk, Emission, Encoded, Request

if TYPE_CHECKING:
    from mstar.plugin.spec import Checkpoint, Limits


class Processor(ABC):
    """Turns requests into walk inputs and emissions into chunks.

    Example:
        class EchoProcessor(Processor):
            def encode(self, request):
                ids = torch.tensor(list(request.parts[0].text.encode()))
                return Encoded(inputs={"ids": ids}, kv_tokens={"lm.main": len(ids) + 16})

            def decode(self, state, emission):
                yield TextChunk(chr(int(emission.value)))
    """

    def __init__(self, checkpoint: Checkpoint, limits: Limits) -> None:
        self.checkpoint = checkpoint
        self.limits = limits

    @abstractmethod
    def encode(self, request: Request) -> Encoded:
        """Walk inputs of a request. Raises RequestError (status 400, `param` set) for what cannot be served."""

    def start(self, request: Request, encoded: Encoded) -> Any:
        """State that `decode` gets at every emission of this request (default: the request itself)."""
        return request

    @abstractmethod
    def decode(self, state: Any, emission: Emission) -> Iterable[Chunk]:
        """Chunks for the client from one emission. Called in order; `emission.final` ends an item."""

    def step(self, name: str, request: Request, outputs: dict[str, Any]) -> dict[str, Any]:
        """Between walks (`Then.step`): the next walk's inputs from the finished walks' outputs."""
        raise NotImplementedError(f"{type(self).__name__} has no step {name!r}")

    def finish(self, state: Any, result: dict[str, Any]) -> None:
        """Last look at a whole result before it is sent: may add to `usage` and other fields."""
