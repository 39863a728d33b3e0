"""Generations over HTTP: server-sent events, several at once, and clients that go away.

Whoever leaves, at whatever moment, has their generations aborted: that frees what they held.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hicache.engine.completion import Completion
from hicache.engine.generation import Generation
from hicache.engine.outputs import Output

DONE = "data: [DONE]\n\n"


class EventStream(Response):
    """An answer of server-sent events; a client that goes away ends its generations."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], generations: Sequence[Generation]) -> None:
        """``events`` is an async generator of whole events, and is closed in any case."""
        self.status_code = 200
        self.background = None
        self.body = b""
        self._events = events
        self._generations = generations
        self.init_headers({"Cache-Control": "no-cache"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the events end or the client goes."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(_cancel_when_gone, receive, group.cancel_scope)
                await self._send_all(send)
                group.cancel_scope.cancel()
        finally:
            for generation in self._generations:
                generation.abort()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(start)
            async with aclosing(self._events) as events:  # type: ignore[type-var]
                async for event in events:
                    body = event.encode()
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            return  # the connection is gone, which some servers say only so


class ClientGone(Exception):
    """Nobody is there to read the answer."""


async def completed(request: Request, generations: Sequence[Generation]) -> list[Completion]:
    """Wait for the end of all generations; raise ``ClientGone`` when the client does not."""
    completions = [Completion(generation) for generation in generations]
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(_cancel_when_gone, request.receive, group.cancel_scope)
            async for index, output in merged(generations):
                completions[index].add(output)
            group.cancel_scope.cancel()
    finally:
        for generation in generations:
            generation.abort()
    if any(completion.finish_reason is None for completion in completions):
        raise ClientGone
    return completions


async def merged(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, Output]]:
    """Yield the outputs of several generations as they come, each with its index."""
    if len(generations) == 1:
        async for output in generations[0]:
            yield 0, output
        return
    readers = [aiter(generation) for generation in generations]
    pending = {asyncio.ensure_future(anext(reader)): i for i, reader in enumerate(readers)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=pending.__getitem__):
                index = pending.pop(task)
                if isinstance(task.exception(), StopAsyncIteration):
                    continue
                yield index, task.result()
                pending[asyncio.ensure_future(anext(readers[index]))] = index
    finally:
        for task in pending:
            task.cancel()


async def _cancel_when_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
