"""A stepper over a real tiny model and private pages, one step at a time, without a thread."""

from collections.abc import Callable, Sequence

from torch import Tensor

from hicache.engine.detokenizing import Detokenizer
from hicache.engine.generation import Generation
from hicache.engine.model import LoadedModel
from hicache.engine.outputs import Output, SamplingParams
from hicache.engine.requests import Request
from hicache.engine.runner import Batch, ModelRunner
from hicache.engine.sampling import Sampler
from hicache.engine.scheduler import Scheduler
from hicache.engine.stepping import Stepper
from hicache.engine.stopping import Answer
from hicache.engine.uncached import PrivatePages
from hicache.events import RequestId
from hicache.keys import pack
from tests.engine.kit import GREEDY

PAGE_SIZE = 8


class RecordingRunner:
    """The real runner, which also notes what it was asked to compute."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.lengths: list[list[int]] = []
        self.starts: list[list[int]] = []
        self.error: Exception | None = None
        self.before: Callable[[Batch], None] = lambda batch: None
        """May raise."""

    def forward(self, batch: Batch) -> Tensor:
        """Compute, or raise what it was told to raise once."""
        self.lengths.append([len(item.token_ids) for item in batch.sequences])
        self.starts.append([item.start for item in batch.sequences])
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.before(batch)
        return self.runner.forward(batch)


class Bench:
    """A stepper, and what it is made of."""

    def __init__(
        self,
        model: LoadedModel,
        num_pages: int = 64,
        *,
        is_late: bool | None = None,
        **settings: object,
    ) -> None:
        self.model = model
        self.pages = PrivatePages(model.layout_for(PAGE_SIZE), num_pages)
        self.runner = RecordingRunner(ModelRunner(model, self.pages.device_pages))
        settings = {"chunk_tokens": 32, **settings}
        self.scheduler = Scheduler("fcfs", page_size=PAGE_SIZE, **settings)  # type: ignore[arg-type]
        digest = model.namespace(model.layout_for(PAGE_SIZE)).digest
        self.stepper = Stepper(
            self.pages, self.runner, self.scheduler, lambda salt: digest, is_late=is_late
        )
        self.requests: list[Request] = []

    def add(
        self, prompt_ids: Sequence[int], params: SamplingParams = GREEDY, priority: int = 0
    ) -> Request:
        """Queue a request."""
        sequence = len(self.requests)
        request = Request(
            id=RequestId(0),
            sequence=sequence,
            tokens=bytearray(pack(prompt_ids)),
            num_prompt_tokens=len(prompt_ids),
            generation=Generation(str(sequence), len(prompt_ids), 0.0, lambda: None),
            sampler=Sampler(params),
            answer=Answer(
                Detokenizer(self.model.tokenizer, prompt_ids), params, self.model.eos_token_ids
            ),
            priority=priority,
        )
        self.requests.append(request)
        self.stepper.add(request)
        return request

    def run(self) -> None:
        """Step until nobody is left."""
        for _ in range(2000):
            if self.stepper.is_idle:
                break
            self.stepper.step()
            self.pages.check()
            self.scheduler.check()
        assert self.stepper.is_idle
        assert self.pages.num_free_pages == len(self.pages.device_pages)


def outputs_of(request: Request) -> list[Output]:
    assert request.generation.is_ended
    return list(request.generation)


def tokens_of(request: Request) -> list[int]:
    return [token_id for output in outputs_of(request) for token_id in output.token_ids]


def params(max_tokens: int = 16, **others: object) -> SamplingParams:
    settings = {"temperature": 0.0, "ignore_eos": True, **others}
    return SamplingParams(max_tokens=max_tokens, **settings)  # type: ignore[arg-type]
